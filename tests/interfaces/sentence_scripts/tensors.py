"""Tensors in place of arrays."""

import os

import torch
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"])
tensor = model.encode(["the dog", "a cat"], convert_to_tensor=True)
print(type(tensor).__name__, tensor.shape, tensor.dtype, tensor[:, :4])
each = model.encode(["the dog", "a cat"], convert_to_numpy=False)
print(type(each).__name__, len(each), torch.allclose(torch.stack(each), tensor))
print(model.similarity(tensor, each), model.encode("cat", convert_to_tensor=True).shape)

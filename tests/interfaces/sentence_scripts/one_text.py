"""A text gives a vector, a list an array, an empty list an empty one."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"], device="cpu")
print(
    model.encode("the dog").shape,
    model.encode(["the dog"]).shape,
    len(model.encode([])),
)
print(model.encode("the dog"), model.device, model.max_seq_length)

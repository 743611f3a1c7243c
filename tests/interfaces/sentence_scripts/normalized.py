"""Vectors of length 1, compared by their products."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"])
a = model.encode(["the dog", "a cat"], normalize_embeddings=True)
b = model.encode(["red", "blue house"], normalize_embeddings=True, truncate_dim=8)
print(a @ a.T, (b * b).sum(axis=1), b.shape)

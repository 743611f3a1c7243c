"""Texts that are longer than the model reads, in any order, are cut at their end."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"])
texts = ["dog " * 200, "a cat", "the sun and the house " * 50, ""]
vectors = model.encode(texts, batch_size=1)
print(vectors[:, :6])
print(abs(vectors[1] - model.encode("a cat")).max() < 1e-5)

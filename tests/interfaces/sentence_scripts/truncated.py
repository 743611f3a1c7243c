"""Shorter vectors, as of Matryoshka models."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["NORMED"], truncate_dim=12)
vectors = model.encode(["the dog", "a cat"])
print(vectors.shape, vectors, model.get_embedding_dimension())
print(model.encode("the dog", truncate_dim=5))

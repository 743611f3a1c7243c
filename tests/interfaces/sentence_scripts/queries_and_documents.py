"""Queries and documents have prompts of their own."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["PROMPTED"])
queries = model.encode_query(["dog", "cat"])
documents = model.encode_document(["the dog", "a cat", "the sun"])
print(queries[:, :4], documents[:, :4])
print(model.similarity(queries, documents))

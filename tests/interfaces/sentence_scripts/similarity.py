"""The first example of sentence-transformers: sentences, vectors, similarities."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"])
sentences = ["the dog and a cat", "a cat", "the house is red"]
embeddings = model.encode(sentences)
print(embeddings.shape, embeddings.dtype)
print(embeddings)
similarities = model.similarity(embeddings, embeddings)
print(similarities)

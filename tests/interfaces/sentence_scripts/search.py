"""A semantic search with numpy."""

import os

import numpy as np
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"])
corpus = [
    "the dog",
    "a cat",
    "the house is red",
    "red and blue",
    "a dog and a cat",
    "the sun",
]
corpus_embeddings = model.encode(corpus, batch_size=2, show_progress_bar=True)
for query in ["dog", "red house"]:
    vector = model.encode(query)
    norms = np.linalg.norm(corpus_embeddings, axis=1) * np.linalg.norm(vector)
    scores = corpus_embeddings @ vector / norms
    for i in np.argsort(-scores)[:3]:
        print(query, corpus[i], scores[i])

"""Clusters of sentences, by scikit-learn."""

import os

from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans

model = SentenceTransformer(os.environ["MODEL"])
corpus = ["the dog", "a dog", "the dog and a dog", "red", "blue", "red and blue"]
embeddings = model.encode(corpus)
clusters = KMeans(n_clusters=2, random_state=0, n_init=3).fit(embeddings)
print(sorted(clusters.labels_.tolist()), clusters.inertia_)

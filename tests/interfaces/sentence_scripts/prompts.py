"""Prompts by name and as texts."""

import os

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(
    os.environ["MODEL"],
    prompts={"query": "the red ", "passage": "a "},
    default_prompt_name="passage",
)
print(model.encode("dog")[:5], model.encode("a dog", prompt="")[:5])
print(
    model.encode("dog", prompt_name="query")[:5],
    model.encode("dog", prompt="the red ")[:5],
)
print(model.prompts["query"], model.default_prompt_name)

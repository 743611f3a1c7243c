"""Vectors of texts, and scores of pairs."""

import os

from vllm import LLM


def main():
    llm = LLM(model=os.environ["VECTORS"], runner="pooling", dtype="float32")
    for output in llm.embed(["the dog", "a cat", "the dog and a cat"]):
        embedding = output.outputs.embedding
        print(len(embedding), embedding[:4])
    llm = LLM(model=os.environ["SCORES"], runner="pooling", dtype="float32")
    for output in llm.score("the dog", ["a cat", "the dog"], use_tqdm=False):
        print(output.outputs.score)
    print(llm.score("the dog", "a cat")[0].outputs.score)


if __name__ == "__main__":
    main()

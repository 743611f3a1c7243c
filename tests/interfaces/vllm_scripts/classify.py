"""The probabilities of classes."""

import os

from vllm import LLM


def main():
    llm = LLM(model=os.environ["CLASSES"], runner="pooling", dtype="float32")
    for text, output in zip(
        ["the dog", "a cat"], llm.classify(["the dog", "a cat"]), strict=True
    ):
        probs = output.outputs.probs
        print(text, [round(p, 6) for p in probs], len(probs))


if __name__ == "__main__":
    main()

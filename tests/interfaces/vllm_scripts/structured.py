"""Answers of a choice and a regex."""

import os

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main():
    llm = LLM(model=os.environ["MODEL"], dtype="float32", enforce_eager=True)
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    params = SamplingParams(structured_outputs=choice, temperature=0)
    print(
        llm.generate("Classify this sentiment: vLLM is wonderful!", params)[0]
        .outputs[0]
        .text
    )

    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex=r"[a-c]{2}@[x-z]{3}\.com\n"),
        stop=["\n"],
        temperature=0,
        max_tokens=20,
    )
    text = llm.generate("Generate an email address:", params)[0].outputs[0].text
    print("@" in text, "\n" in text)


if __name__ == "__main__":
    main()

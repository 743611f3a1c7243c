"""One set of parameters for each prompt; penalties, biases, and lengths."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        model=os.environ["MODEL"], dtype="float32", max_num_seqs=8, enforce_eager=True
    )
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=6, frequency_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=6, presence_penalty=1.5, min_tokens=4),
        SamplingParams(temperature=0, max_tokens=6, logit_bias={11: 30.0}),
        SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[28, 30, 339]),
        SamplingParams(temperature=0, max_tokens=6, bad_words=["the"]),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    ]
    for output in llm.generate(["I like"] * len(params), params):
        print(output.request_id, list(output.outputs[0].token_ids))


if __name__ == "__main__":
    main()

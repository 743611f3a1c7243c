"""vLLM's example of prefix caching: one long prefix, many questions."""

import os

from vllm import LLM, SamplingParams

prefix = (
    "You are an expert school principal, skilled in effectively managing faculty and staff. "
    "Draft 10-15 questions for a potential first grade Head Teacher. Based on these "
    "instructions, complete the following: "
)
prompts = ["Hello, my name is", "The president is", "The capital of France is"]
generating_prompts = [prefix + prompt for prompt in prompts]


def main():
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
    llm = LLM(
        model=os.environ["MODEL"],
        enable_prefix_caching=True,
        gpu_memory_utilization=0.4,
        dtype="float32",
        enforce_eager=True,
    )
    for output in llm.generate(generating_prompts, sampling_params):
        print(repr(output.outputs[0].text))
    for output in llm.generate(generating_prompts, sampling_params):
        print(list(output.outputs[0].token_ids))


if __name__ == "__main__":
    main()

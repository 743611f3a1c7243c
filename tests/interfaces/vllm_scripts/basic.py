"""The first example of vLLM's documentation: prompts in, texts out."""

import os

from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.0, top_p=0.95)


def main():
    llm = LLM(model=os.environ["MODEL"], dtype="float32", enforce_eager=True)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
        print(output.prompt_token_ids, list(output.outputs[0].token_ids))


if __name__ == "__main__":
    main()

"""Several answers a prompt; only what chance does not decide is printed."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], seed=0, dtype="float32", enforce_eager=True)
    params = SamplingParams(n=4, temperature=0.8, top_p=0.9, seed=1, max_tokens=5)
    output = llm.generate("Once upon a time", params)[0]
    print(len(output.outputs), [c.index for c in output.outputs], output.finished)
    print([len(c.token_ids) for c in output.outputs], output.outputs[0].logprobs)
    params = SamplingParams(n=2, temperature=0.5, top_k=1, max_tokens=5)
    print([c.text for c in llm.generate("Once upon a time", params)[0].outputs])


if __name__ == "__main__":
    main()

"""Logprobs of the answer and of the prompt, and a perplexity."""

import math
import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], dtype="float32", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=1)
    texts = ["The capital of France is", "Cats and dogs are"]
    for output in llm.generate(texts, params):
        completion = output.outputs[0]
        print(list(completion.token_ids), round(completion.cumulative_logprob, 6))
        for position in completion.logprobs:
            best = sorted(position.items(), key=lambda item: -item[1].logprob)[:3]
            print([(i, x.logprob, x.rank) for i, x in best])
        nlls = []
        for token_id, position in zip(
            output.prompt_token_ids, output.prompt_logprobs, strict=True
        ):
            if position is not None:
                nlls.append(-position[token_id].logprob)
        print("perplexity", math.exp(sum(nlls) / len(nlls)))


if __name__ == "__main__":
    main()

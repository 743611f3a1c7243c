"""Prompts as token ids, and stops."""

import os

from vllm import LLM, SamplingParams, TokensPrompt


def main():
    llm = LLM(model=os.environ["MODEL"], dtype="float32", enforce_eager=True)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("The quick brown fox")
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = [TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids[:2]}]
    for output in llm.generate(prompts, params):
        print(output.prompt, output.prompt_token_ids, list(output.outputs[0].token_ids))

    stop = list(
        llm.generate({"prompt": "The quick brown fox"}, params)[0].outputs[0].token_ids
    )
    params = SamplingParams(
        temperature=0, max_tokens=8, stop_token_ids=[stop[3]], logprobs=0
    )
    answer = llm.generate("The quick brown fox", params)[0].outputs[0]
    print(
        repr(answer.text),
        answer.finish_reason,
        answer.stop_reason,
        len(answer.logprobs),
    )
    params = SamplingParams(
        temperature=0, max_tokens=8, stop=[tokenizer.decode(stop[2:4])]
    )
    answer = llm.generate("The quick brown fox", params)[0].outputs[0]
    print(repr(answer.text), answer.finish_reason, answer.stop_reason)


if __name__ == "__main__":
    main()

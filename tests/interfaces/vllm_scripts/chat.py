"""A conversation with a system message, and several at once."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        os.environ["MODEL"], dtype="float32", max_model_len=512, enforce_eager=True
    )
    sampling_params = SamplingParams(temperature=0, max_tokens=24)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print(outputs[0].outputs[0].text, outputs[0].outputs[0].finish_reason)

    conversations = [conversation[:2], conversation]
    outputs = llm.chat(messages=conversations, sampling_params=sampling_params)
    for output in outputs:
        print(list(output.outputs[0].token_ids), output.outputs[0].finish_reason)


if __name__ == "__main__":
    main()

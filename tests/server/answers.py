"""Answers of a server beside those of a file run."""

from __future__ import annotations

from typing import Any

import fminfer
from fminfer.engine.engine_core import FURTHER_FIELDS


def answer_file(
    requests: list[tuple[str, dict[str, Any]]], **options: Any
) -> list[dict[str, Any]]:
    """Answer a Batch file with an engine of its own; return the bodies.

    Args:
        requests: url and body of each line.
        options: of the engine.
    """
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(requests)
    ]
    engine = fminfer.Engine(**options)
    try:
        records = [record.to_dict() for record in engine.run(lines)]
    finally:
        engine.close()
    records.sort(key=lambda record: int(record["custom_id"]))
    return [record["response"]["body"] for record in records]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare choices and usage; prompts that are cached differ in the usage's details."""
    expected_choices = [
        {k: v for k, v in choice.items() if k not in ("prompt_token_ids", "token_ids")}
        for choice in expected["choices"]
    ]
    choices = [
        {k: v for k, v in choice.items() if k not in ("prompt_token_ids", "token_ids")}
        for choice in found["choices"]
    ]
    assert rounded(choices) == rounded(expected_choices)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == expected["usage"][name]


def rounded(value: Any) -> Any:
    """Round logprobs: rows that run beside others differ in the last digits."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def join(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the parts of choices."""
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        choice = choices.setdefault(part["index"], {"text": "", "index": part["index"]})
        choice["text"] += part["text"]
        if part["logprobs"] is None:
            choice.setdefault("logprobs", None)
        else:
            found = choice.setdefault("logprobs", {key: [] for key in part["logprobs"]})
            for key, values in part["logprobs"].items():
                found[key] = None if values is None else found[key] + values
        assert choice.get("finish_reason") is None
        choice["finish_reason"] = part["finish_reason"]
        if "stop_reason" in part:
            choice["stop_reason"] = part["stop_reason"]
    return [choices[index] for index in sorted(choices)]


def join_chat(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the parts of chat choices."""
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        index = part["index"]
        delta = part["delta"]
        if index not in choices:
            assert delta["role"] == "assistant" and part["finish_reason"] is None
            message = {"role": "assistant", "content": "", "refusal": None}
            choices[index] = {"index": index, "message": message, "logprobs": None}
        choice = choices[index]
        assert choice.get("finish_reason") is None
        _join_message(choice["message"], delta)
        if part.get("logprobs") is not None:
            found = choice["logprobs"] = choice["logprobs"] or {
                "content": [],
                "refusal": None,
            }
            found["content"] = found["content"] + part["logprobs"]["content"]
        choice["finish_reason"] = part["finish_reason"]
        ends = ("stop_reason", *FURTHER_FIELDS)
        choice |= {name: part[name] for name in ends if name in part}
    return [choices[index] for index in sorted(choices)]


def _join_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message, as the OpenAI API has it whole."""
    message["content"] = (message["content"] or "") + (delta.get("content") or "")
    if reasoning := delta.get("reasoning_content"):
        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
    for call in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append(
                {"id": call["id"], "type": "function", "function": call["function"]}
            )
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"][
                "arguments"
            ]
    if message.get("tool_calls"):
        message["content"] = message["content"] or None

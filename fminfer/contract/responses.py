"""Requests to `/v1/responses` as chats, and answers of chats as responses.

Nothing is kept, so that each request has its whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fminfer.contract.field_table import FIELDS
from fminfer.contract.read_fields import parse_fields
from fminfer.contract.request import RequestParams
from fminfer.contract.response_fields import LOGPROBS
from fminfer.contract.response_items import (
    EXTRAS,
    make_choice,
    make_output,
    parse_input,
)
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.errors import RequestError

# What errors of chats name, and what it is called here.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    '"logprobs": true': f'"include": ["{LOGPROBS}"]',
}
# What comes back with a response as the request has it, or as these defaults.
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
    "background": False,
    "previous_response_id": None,
    "truncation": "disabled",
}


@dataclass(slots=True, frozen=True)
class ResponseAsChat:
    """The chat that a request means."""

    fields: dict[str, Any]  # of the chat
    names: dict[str, str]  # of fields in messages, as the request has them
    warnings: tuple[RowWarning, ...]


def parse_response(
    fields: Mapping[str, Any], *, max_logprobs: int, is_strict: bool = False
) -> ResponseAsChat:
    """Check what chat does not check of a request; return the chat that it means."""
    if fields.get("input") is None:
        state = "null" if "input" in fields else "absent"
        raise RequestError(
            "missing_prompt",
            f'input is {state}; give a text, or a list such as [{{"role": "user", '
            '"content": "Hello"}]. /v1/chat/completions takes messages',
            "input",
        )
    values, warnings = parse_fields(
        fields, "responses", max_logprobs=max_logprobs, is_strict=is_strict
    )
    has_logprobs = LOGPROBS in values.get("include", ())
    messages, names = parse_input(fields["input"], values.get("instructions"))
    tools = values.get("tools")
    if isinstance(tools, list):
        names |= {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))}
        tools = [*map(_convert_tool, tools)]
    chat = {name: fields[name] for name in values.keys() & _SHARED}
    chat |= {
        "messages": messages,
        "tools": tools,
        "max_tokens": values.get("max_output_tokens"),
        "response_format": values.get("text", {}).get("format"),
        "reasoning_effort": values.get("reasoning", {}).get("effort"),
        "logprobs": has_logprobs,
        "top_logprobs": values.get("top_logprobs"),
    }
    return ResponseAsChat(chat, names, tuple(warnings))


def rename_error(
    error: RequestError, message_names: Mapping[str, str] | None = None
) -> RequestError:
    """Return an error of a chat, with the names that a response's request has."""
    text = f"{error.message} {error.param}"
    renamed = message_names or {}
    names = _NAMES | {name: renamed[name] for name in renamed if name in text}
    longest_first = sorted(names, key=len, reverse=True)
    pattern = rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)"

    def rename(text: str) -> str:
        return re.sub(pattern, lambda match: names[match[0]], text)

    param = (
        "input" if error.param == "messages" else error.param and rename(error.param)
    )
    return RequestError(error.code, rename(error.message), param)


_SHARED = {
    name
    for name, each in FIELDS["responses"].items()
    if each.fate == "acted on" and FIELDS["chat"].get(name) is each
}


def _convert_tool(tool: object) -> object:
    """Return a flat tool in chat's form, which chat checks."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    function = {key: each for key, each in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def make_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage by the names that a response has."""
    inputs = {"cache_write_tokens": 0} | usage["prompt_tokens_details"]
    outputs = {"reasoning_tokens": 0} | usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": inputs,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": outputs,
        "total_tokens": usage["total_tokens"],
    }


def convert_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the choices and the usage of a chat, if it is a response's."""
    if not isinstance(result.get("output"), list):
        return result
    usage = result["usage"]
    counts = {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": usage["input_tokens_details"],
        "completion_tokens_details": usage["output_tokens_details"],
    }
    return result | {"choices": [make_choice(result)], "usage": counts}


def make_result(
    choice: Mapping[str, Any], usage: Mapping[str, Any], item_id: str
) -> dict[str, Any]:
    """Return what a response says of its answer, the only choice of a chat."""
    is_cut = choice["finish_reason"] == "length"
    result = {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": make_output(choice, item_id),
    }
    extras = {name: choice[name] for name in EXTRAS if name in choice}
    return result | extras | {"usage": make_usage(usage)}


def make_response_head(
    fields: Mapping[str, Any],
    response_id: str,
    created: int,
    model: str,
    params: RequestParams,
) -> dict[str, Any]:
    """Return a response without its answer: what it is, and what was asked.

    Args:
        params: those that hold.
    """
    echoed = {
        name: default if fields.get(name) is None else fields[name]
        for name, default in _ECHOED.items()
    }
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        **echoed,
        "store": False,  # whatever was asked
        "temperature": params.temperature,
        "top_p": params.top_p,
        "output": [],
        "usage": None,
    }

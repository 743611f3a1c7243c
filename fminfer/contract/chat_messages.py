"""Reads the messages and tools of a chat request; `ChatTemplate` gives them a template's forms."""

from __future__ import annotations

import json
from typing import Any

from fminfer.contract.fields import (
    NULL,
    SOME_TEXT,
    TEXT,
    Schema,
    allow_null,
    json_type,
    object_of,
    show,
    wrong_type,
)
from fminfer.core.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_PART = object_of({"type": {"const": "text"}, "text": TEXT}, "type", "text")
_CONTENT: Schema = {"anyOf": [TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_ARGUMENTS: Schema = {
    "anyOf": [{"type": "object"}, NULL, TEXT],
    "description": "An object, or a string that holds one as JSON.",
}
_CALLED = object_of({"name": TEXT, "arguments": _ARGUMENTS}, "name")
_CALLS: Schema = {"type": "array", "items": object_of({"function": _CALLED}, "function")}
_OLD: Schema = {"function_call": NULL, "audio": NULL}
_OTHERS: Schema = {"enum": [role for role in ROLES if role != "assistant"]}
_ANSWERED = object_of(
    {"role": {"const": "assistant"}, "content": allow_null(_CONTENT)}
    | {"tool_calls": allow_null(_CALLS)}
    | _OLD,
    "role",
) | {
    "anyOf": [
        {"properties": {"content": _CONTENT}, "required": ["content"]},
        {
            "properties": {"tool_calls": {"type": "array", "minItems": 1}},
            "required": ["tool_calls"],
        },
    ]
}
_SPOKEN = object_of({"role": _OTHERS, "content": _CONTENT} | _OLD, "role", "content")
MESSAGES: Schema = {"type": "array", "items": {"anyOf": [_SPOKEN, _ANSWERED]}, "minItems": 1}
_FUNCTION = {"name": SOME_TEXT, "description": {}, "parameters": {}, "strict": {}}
_TOOL = object_of(
    {"type": {"const": "function"}, "function": object_of(_FUNCTION, "name")}, "type", "function"
)
TOOLS: Schema = {"type": "array", "items": _TOOL}
_TEXT_ONLY = "only text is read: give a string, or parts of type text"


def read_messages(value: object) -> list[dict[str, Any]]:
    """Return messages as they were sent, without nulls; each call has a type and arguments.

    Contents are strings or lists of text parts. Arguments are objects, or strings that hold one.
    What else a message says is for the template.

    Raises:
        RequestError: what is wrong with one.
    """
    if not isinstance(value, list):
        raise wrong_type("messages", value, "a list of messages")
    if not value:
        raise RequestError("out_of_range", "messages is an empty list; give a message", "messages")
    return [_read_message(each, f"messages[{place}]") for place, each in enumerate(value)]


def read_tools(value: object) -> list[dict[str, Any]]:
    """Return the tools that a model may call; none for null.

    Raises:
        RequestError: what is wrong with one.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("tools", value, "a list of tools or null")
    for place, tool in enumerate(value):
        _check_tool(tool, f"tools[{place}]")
    return value


def count_chars(messages: object) -> int:
    """Return how long the texts of messages are; 0 of what is no list of messages."""
    if not isinstance(messages, list):
        return 0
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    num_chars = 0
    for content in contents:
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        num_chars += sum(len(text) for text in texts if isinstance(text, str))
    return num_chars


def _read_message(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, value, 'an object, such as {"role": "user", "content": "Hello"}')
    role = value.get("role")
    if role not in ROLES:
        remedy = ". An answer of a function has the role tool" if role == "function" else ""
        found = show(role) if "role" in value else "absent"
        raise RequestError(
            "out_of_range",
            f"{name}.role is {found}; it must be one of {', '.join(ROLES)}{remedy}",
            f"{name}.role",
        )
    for field, instead in (("function_call", "tool_calls"), ("audio", "content")):
        if value.get(field) is not None:
            raise RequestError(
                "unsupported_parameter",
                f"{name}.{field} is {show(value[field])}, which is not read; give {instead}",
                f"{name}.{field}",
            )
    message = {field: each for field, each in value.items() if each is not None}
    calls = (
        _read_calls(value.get("tool_calls"), f"{name}.tool_calls") if role == "assistant" else []
    )
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    if value.get("content") is not None:
        message["content"] = _read_content(value["content"], f"{name}.content")
    elif not calls:
        found = "null" if "content" in value else "absent"
        raise RequestError(
            "invalid_type",
            f"{name}.content is {found}; it must be a string or a list of text parts. Only an "
            "assistant's message with tool_calls may go without",
            f"{name}.content",
        )
    return message


def _read_content(content: object, name: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(name, content, "a string or a list of text parts")
    if not content:
        raise RequestError("out_of_range", f"{name} is an empty list; give a text part", name)
    return [_read_part(part, f"{name}[{place}]") for place, part in enumerate(content)]


def _read_part(part: object, name: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_type(name, part, 'an object, such as {"type": "text", "text": "Hello"}')
    if part.get("type") != "text":
        raise RequestError(
            "unsupported_parameter",
            f"{name} is a part of type {show(part.get('type'))}; {_TEXT_ONLY}",
            name,
        )
    if not isinstance(part.get("text"), str):
        raise wrong_type(f"{name}.text", part.get("text"), "a string")
    # A template may ask whether a part has an "image": tables have a column of nulls for it.
    return {key: each for key, each in part.items() if each is not None}


def _read_calls(value: object, name: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list of calls or null")
    return [_read_call(call, f"{name}[{place}]") for place, call in enumerate(value)]


def _read_call(call: object, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise wrong_type(name, call, 'an object with a "function"')
    if not isinstance(function.get("name"), str):
        raise wrong_type(f"{name}.function.name", function.get("name"), "a string")
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(_parse(arguments) if isinstance(arguments, str) else arguments, dict):
        raise RequestError(
            "invalid_type",
            f"{name}.function.arguments is {show(function['arguments'])}; it must be an object, or "
            "a string that holds one as JSON",
            f"{name}.function.arguments",
        )
    written = function | {"arguments": arguments}
    # The names stay in their order, in which a template may write them.
    return call | {"type": call.get("type") or "function", "function": written}


def _parse(text: str) -> object:
    try:
        # orjson would make floats of integers over 64 bits.
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_tool(tool: object, name: str) -> None:
    if not isinstance(tool, dict):
        raise wrong_type(name, tool, 'an object, such as {"type": "function", "function": {…}}')
    if tool.get("type") != "function":
        raise RequestError(
            "unsupported_parameter",
            f'{name}.type is {show(tool.get("type"))}; only tools of type "function" are known',
            f"{name}.type",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{name}.function", function, "an object with a name and parameters")
    if not (isinstance(function.get("name"), str) and function["name"]):
        found = show(function.get("name"))
        kind = json_type(function.get("name"))
        raise RequestError(
            "invalid_type",
            f"{name}.function.name is {found}, a {kind}; it must be a string, not empty",
            f"{name}.function.name",
        )

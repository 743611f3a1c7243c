"""Parses the messages and tools of a chat request.

`ChatTemplate` turns them into a template's forms.
"""

from __future__ import annotations

from typing import Any

from fminfer.contract.fields import (
    NULL,
    SOME_TEXT,
    TEXT,
    Schema,
    allow_null,
    check_type,
    describe_value,
    make_full_object_schema,
    make_list_schema,
    make_object_schema,
    wrong_type_error,
)
from fminfer.contract.prompts import MEDIA, check_unsupported_keys
from fminfer.core.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# an answer may be empty, a question may not
MAY_LACK_CONTENT = ("assistant", "tool", "function")
_CALL_ID = "call{:05}"  # of an old call; some templates want nine letters or digits
_PART = make_full_object_schema(type={"const": "text"}, text=TEXT)
_REFUSAL = make_full_object_schema(type={"const": "refusal"}, refusal=TEXT)
_ARGUMENTS: Schema = {
    "anyOf": [{"type": "object"}, NULL, TEXT],
    "description": "An object, or what the model wrote, broken or not.",
}
_FUNCTION_CALL = make_object_schema({"name": TEXT, "arguments": _ARGUMENTS}, "name")
_CALLS = {
    "tool_calls": make_list_schema(make_full_object_schema(function=_FUNCTION_CALL)),
    "function_call": _FUNCTION_CALL,
}
_ANSWER_CONTENT: Schema = {
    "anyOf": [TEXT, NULL, make_list_schema({"anyOf": [_PART, _REFUSAL]})]
}
_TOOL_CONTENT: Schema = {"anyOf": [TEXT, NULL, make_list_schema(_PART)]}
_QUESTION_CONTENT: Schema = {"anyOf": [TEXT, make_list_schema(_PART) | {"minItems": 1}]}
_TEXT_ALONE: Schema = {key: {"enum": [None, "", [], {}]} for key in MEDIA}
_NO_CALLS: Schema = _TEXT_ALONE | {"function_call": NULL, "audio": NULL}
_QUESTION_ROLES: Schema = {
    "enum": [role for role in ROLES if role not in MAY_LACK_CONTENT]
}
_TOOL_ROLES: Schema = {
    "enum": [role for role in MAY_LACK_CONTENT if role != "assistant"]
}
_MESSAGE: Schema = {
    "anyOf": [
        make_object_schema(
            {"role": _QUESTION_ROLES, "content": _QUESTION_CONTENT} | _NO_CALLS,
            "role",
            "content",
        ),
        make_object_schema(
            {"role": {"const": "assistant"}, "content": _ANSWER_CONTENT}
            | _TEXT_ALONE
            | {name: allow_null(each) for name, each in _CALLS.items()},
            "role",
        ),
        make_object_schema(
            {"role": _TOOL_ROLES, "content": _TOOL_CONTENT} | _NO_CALLS, "role"
        ),
    ]
}
MESSAGES: Schema = make_list_schema(_MESSAGE) | {"minItems": 1}
_FUNCTION = {"name": SOME_TEXT, "description": {}, "parameters": {}, "strict": {}}
TOOLS = make_list_schema(
    make_full_object_schema(
        type={"const": "function"}, function=make_object_schema(_FUNCTION, "name")
    )
)
_LAST_MESSAGE_REMEDIES = MEDIA | dict.fromkeys(
    ("prefix", "partial"),
    'to go on with that message, give "continue_final_message": true and '
    '"add_generation_prompt": false beside messages',
)
_TEXT_ONLY = "only text is read: give a string, or parts of type text"


def parse_messages(value: object, *, continues: bool = False) -> list[dict[str, Any]]:
    """Return messages as they were sent, without nulls; each call has a type and arguments.

    Contents are strings or lists of text parts. Arguments are objects, or what a model wrote,
    which may be broken. What else a message says is for the template. The past is taken as it
    was: older forms of calls and answers become today's.
    """
    messages = check_type("messages", value, list, "a list of messages")
    if not messages:
        raise RequestError(
            "out_of_range", "messages is an empty list; give a message", "messages"
        )
    last = len(messages) - 1
    return [
        _parse_message(
            each, place, MEDIA if continues or place < last else _LAST_MESSAGE_REMEDIES
        )
        for place, each in enumerate(messages)
    ]


def parse_tools(value: object) -> list[dict[str, Any]]:
    items = [] if value is None else value
    tools = check_type("tools", items, list, "a list of tools or null")
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools[{place}]")
    return tools


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


def _parse_message(
    value: object, place: int, remedies: dict[str, str]
) -> dict[str, Any]:
    name = f"messages[{place}]"
    example = 'an object, such as {"role": "user", "content": "Hello"}'
    fields = check_type(name, value, dict, example)
    role = fields.get("role")
    if role not in ROLES:
        shown_role = describe_value(role) if "role" in fields else "absent"
        text = f"{name}.role is {shown_role}; it must be one of {', '.join(ROLES)}"
        raise RequestError("out_of_range", text, f"{name}.role")
    check_unsupported_keys(fields, name, remedies)
    message = {field: each for field, each in fields.items() if each is not None}
    for field, instead in (("function_call", "tool_calls"), ("audio", "content")):
        if role != "assistant" and field in message:
            text = (
                f"{name}.{field} is {describe_value(message[field])}, which is not read; "
                f"give {instead}"
            )
            raise RequestError("unsupported_parameter", text, f"{name}.{field}")
    for field in ("reasoning_content", "reasoning"):
        if role == "assistant" and field in message:
            check_type(f"{name}.{field}", message[field], str, "a string or null")
    # the old form of tool, which answers the call just before it
    if role == "function":
        message = (
            {"tool_call_id": _CALL_ID.format(place - 1)} | message | {"role": "tool"}
        )
    calls = _parse_past_calls(message, place) if role == "assistant" else []
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    lacks_content = message.get("content") in (None, [])
    if not (lacks_content and role in MAY_LACK_CONTENT):
        message["content"] = _parse_content(message, name)
    elif calls:
        message.pop("content", None)
    else:
        message["content"] = ""
    return message


def _parse_past_calls(message: dict[str, Any], place: int) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message, and let its content be what was said."""
    name = f"messages[{place}]"
    old = message.get("function_call")
    sent_calls = message.get("tool_calls", [])
    check_type(f"{name}.tool_calls", sent_calls, list, "a list of calls or null")
    calls = [
        _parse_call(call, f"{name}.tool_calls[{i}]")
        for i, call in enumerate(sent_calls)
    ]
    if old is not None and not calls:
        name = f"{name}.function_call"
        if not isinstance(old, dict) or not isinstance(old.get("name"), str):
            raise wrong_type_error(
                name, old, "an object with the name and arguments of a function"
            )
        del message["function_call"]
        calls = [_parse_call({"id": _CALL_ID.format(place), "function": old}, name)]
    if message.get("content") in (None, []) and isinstance(message.get("refusal"), str):
        message["content"] = message.pop("refusal")
    return calls


def _parse_content(message: dict[str, Any], name: str) -> str | list[dict[str, Any]]:
    content = message.get("content")
    name = f"{name}.content"
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(
            "invalid_type",
            f"{name} is null or absent; give a string or a list of text parts. Only answers, of "
            "the roles assistant and tool, may go without",
            name,
        )
    parts = check_type(name, content, list, "a string or a list of text parts")
    if not parts:
        raise RequestError(
            "out_of_range", f"{name} is an empty list; give a text part", name
        )
    is_past = message["role"] == "assistant"
    return [
        _parse_part(each, f"{name}[{i}]", is_past=is_past)
        for i, each in enumerate(parts)
    ]


def _parse_part(value: object, name: str, *, is_past: bool) -> dict[str, Any]:
    part = check_type(
        name, value, dict, 'an object, such as {"type": "text", "text": "Hello"}'
    )
    if is_past and part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    if part.get("type") != "text":
        text = (
            f"{name} is a part of type {describe_value(part.get('type'))}; {_TEXT_ONLY}"
        )
        raise RequestError("unsupported_parameter", text, name)
    check_type(f"{name}.text", part.get("text"), str, "a string")
    check_unsupported_keys(part, name, MEDIA)
    # A template may ask whether a part has an "image": tables have a column of nulls for it.
    return {key: each for key, each in part.items() if each is not None}


def _parse_call(call: object, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise wrong_type_error(name, call, 'an object with a "function"')
    name = f"{name}.function"
    check_type(f"{name}.name", function.get("name"), str, "a string")
    arguments = {} if function.get("arguments") in (None, "") else function["arguments"]
    if not isinstance(arguments, str | dict):
        allowed = "an object, or a string as the model wrote it"
        raise wrong_type_error(f"{name}.arguments", arguments, allowed)
    written = function | {"arguments": arguments}
    # The names stay in their order, in which a template may write them.
    return call | {"type": call.get("type") or "function", "function": written}


def _check_tool(value: object, name: str) -> None:
    example = 'an object, such as {"type": "function", "function": {…}}'
    tool = check_type(name, value, dict, example)
    if tool.get("type") != "function":
        text = (
            f"{name}.type is {describe_value(tool.get('type'))}; only tools of type "
            '"function" are known'
        )
        raise RequestError("unsupported_parameter", text, f"{name}.type")
    name = f"{name}.function"
    function = check_type(
        name, tool.get("function"), dict, "an object with a name and parameters"
    )
    if not check_type(f"{name}.name", function.get("name"), str, "a string, not empty"):
        raise wrong_type_error(f"{name}.name", "", "a string, not empty")

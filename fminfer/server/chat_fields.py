"""The fields of chat requests, beside those that they share with completions."""

from __future__ import annotations

from fminfer.contract.chat import NEUTRAL
from fminfer.contract.chat_messages import ROLES
from fminfer.engine.intake import Limits
from fminfer.server.json_schema import (
    NULL,
    SOME_TEXT,
    SWITCH,
    TEXT,
    Field,
    FieldTable,
    Schema,
    allow_null,
    integer,
    object_of,
)
from fminfer.server.request_fields import around_fields, draw_fields


def chat_fields(limits: Limits) -> FieldTable:
    """Return the fields of `/v1/chat/completions`."""
    most = integer(0, limits.context_length - 1)
    fields = (
        Field(
            "messages",
            "The conversation so far. The model's chat template makes a prompt of it.",
            {"type": "array", "items": _message(), "minItems": 1},
            is_required=True,
        ),
        Field("max_tokens", "Tokens to draw at most. Default: the rest of the context.", most),
        Field("max_completion_tokens", "The newer name of max_tokens.", most),
        *draw_fields(limits),
        Field("logprobs", "Tell the logprob of each token.", SWITCH, False),
        Field(
            "top_logprobs",
            "How many alternatives of each token are told; it needs logprobs.",
            integer(0, limits.max_logprobs),
            0,
        ),
        Field(
            "tools",
            "Functions that the model may call. The template shows them to it.",
            {"type": "array", "items": _tool()},
        ),
        Field("tool_choice", '"none" hides the tools.', {"enum": ["auto", "none"]}),
        Field("parallel_tool_calls", "false is refused if there are tools.", SWITCH, True),
        Field("chat_template_kwargs", "Further variables of the template.", {"type": "object"}),
        Field("reasoning_effort", "A variable of some templates.", TEXT),
        Field("add_generation_prompt", "Begin an answer behind the messages.", SWITCH, True),
        Field("continue_final_message", "Go on with the last message.", SWITCH, False),
        *around_fields(NEUTRAL),
    )
    example = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    return FieldTable("Answer a conversation.", fields, example)


def _message() -> Schema:
    part = object_of({"type": {"const": "text"}, "text": TEXT}, "type", "text")
    content: Schema = {"anyOf": [TEXT, {"type": "array", "items": part, "minItems": 1}]}
    arguments: Schema = {
        "anyOf": [{"type": "object"}, NULL, TEXT],
        "description": "An object, or a string that holds one as JSON.",
    }
    function = object_of({"name": TEXT, "arguments": arguments}, "name")
    calls: Schema = {"type": "array", "items": object_of({"function": function}, "function")}
    old: Schema = {"function_call": NULL, "audio": NULL}
    others = [role for role in ROLES if role != "assistant"]
    spoken = object_of({"role": {"enum": others}, "content": content} | old, "role", "content")
    answered = object_of(
        {"role": {"const": "assistant"}, "content": allow_null(content)}
        | {"tool_calls": allow_null(calls)}
        | old,
        "role",
    )
    has_content = {"properties": {"content": content}, "required": ["content"]}
    has_calls = {
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
        "required": ["tool_calls"],
    }
    return {"anyOf": [spoken, answered | {"anyOf": [has_content, has_calls]}]}


def _tool() -> Schema:
    function = {"name": SOME_TEXT, "description": {}, "parameters": {}, "strict": {}}
    return object_of(
        {"type": {"const": "function"}, "function": object_of(function, "name")}, "type", "function"
    )

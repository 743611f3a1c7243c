"""The fields that `/v1/responses` has and chat has not, or calls otherwise."""

from __future__ import annotations

from typing import Any

from fminfer.contract.fields import (
    SOME_TEXT,
    SWITCH_KIND,
    TEXT,
    TEXT_KIND,
    Field,
    Kind,
    Schema,
    check_type,
    make_enum_kind,
    make_full_object_schema,
    make_integer_kind,
    make_list_schema,
    make_object_kind,
    make_object_schema,
    make_strings_kind,
    make_unchecked_kind,
)

LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for them
# Nothing is encrypted: the text of a thought stands in its item.
_INCLUDABLE = make_enum_kind(LOGPROBS, "reasoning.encrypted_content")


def _parse_format(name: str, value: Any, most: int) -> dict[str, Any]:
    """Return the format as chat's `response_format`, which has the schema one level below."""
    form = check_type(name, value, dict, "an object or null")
    if form.get("type") == "json_schema":
        schema = {key: each for key, each in form.items() if key != "type"}
        form = {"type": "json_schema", "json_schema": schema}
    return form


def _parse_include(name: str, value: Any, most: int) -> tuple[str, ...]:
    names: tuple[str, ...] = _STRINGS.parse(name, value, most)
    return tuple(_INCLUDABLE.parse(name, each, most) for each in names)


_STRINGS = make_strings_kind(allows_one=False)
_FORMAT: Schema = {
    "anyOf": [
        make_object_schema({"type": {"enum": ["text", "json_object"]}}, "type"),
        make_object_schema(
            {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "type",
            "schema",
        ),
    ]
}
_AUTO = make_enum_kind("auto")
_CONTENT: Schema = {"anyOf": [TEXT, make_list_schema({"type": "object"})]}
_ITEM: Schema = {
    "anyOf": [
        make_object_schema(
            {"type": {"enum": ["message", None]}, "role": TEXT, "content": _CONTENT},
            "role",
        ),
        make_full_object_schema(
            type={"const": "function_call"}, call_id=TEXT, name=TEXT, arguments=TEXT
        ),
        make_full_object_schema(
            type={"const": "function_call_output"}, call_id=TEXT, output=_CONTENT
        ),
        make_full_object_schema(type={"const": "reasoning"}),
    ]
}
_INPUT: Schema = {"anyOf": [TEXT, make_list_schema(_ITEM) | {"minItems": 1}]}
_TOOL = make_object_schema(
    {"type": {"const": "function"}, "name": SOME_TEXT}, "type", "name"
)
RESPONSE_FIELDS = (
    Field(
        "input",
        make_unchecked_kind(_INPUT, "a string, a list of items"),
        "A text, or messages, calls, their outputs and reasoning, in order.",
        is_required=True,
    ),
    Field("instructions", TEXT_KIND, "A system message before the input."),
    Field(
        "tools",
        make_unchecked_kind(make_list_schema(_TOOL), "functions"),
        "What the model may call, in the flat form of this endpoint.",
    ),
    Field(
        "text",
        make_object_kind(
            {
                "format": Kind(_parse_format, _FORMAT),
                "verbosity": make_enum_kind("medium"),
            }
        ),
        "`format` asks for JSON: `text`, `json_object`, or `json_schema` with a schema.",
    ),
    Field(
        "reasoning",
        make_object_kind(
            {
                "effort": TEXT_KIND,
                "summary": _AUTO,
                "generate_summary": _AUTO,
                "context": _AUTO,
                "mode": make_enum_kind("standard"),
            }
        ),
        "`effort` is a variable of the template. No summary is made: with `auto` or without, "
        "the output has the whole thought.",
    ),
    Field(
        "max_output_tokens",
        make_integer_kind(0),
        "Tokens to draw at most, thoughts and calls among them. Default: the rest of the "
        "context, as in chat.",
        "context",
    ),
    Field(
        "include",
        Kind(
            _parse_include,
            make_list_schema(_INCLUDABLE.make_schema(0)),
            _INCLUDABLE.values_text,
        ),
        f"`{LOGPROBS}` tells the logprob of each token. The other one changes nothing.",
    ),
    Field(
        "top_logprobs",
        make_integer_kind(0),
        f"Alternatives of each token that are told; refused unless `include` has `{LOGPROBS}`.",
        "logprobs",
        default=0,
    ),
    Field(
        "stream_options",
        make_object_kind({"include_obfuscation": SWITCH_KIND}),
        "`include_obfuscation` changes nothing. In a file only {} passes.",
        fate="served",
        neutral=({},),
    ),
)

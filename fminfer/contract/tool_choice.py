"""Parses `tool_choice`: which tools an answer may call, and whether it must call one.

Forms of the Responses API, which name a function without an object around it, pass as well.
What is held by a grammar gets the same limits as `response_format`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fminfer.contract.constraint import parse_json_schema
from fminfer.contract.fields import (
    SOME_TEXT,
    Kind,
    Schema,
    check_type,
    describe_value,
    make_enum_kind,
    make_full_object_schema,
    make_list_schema,
    out_of_range_error,
    wrong_type_error,
)
from fminfer.core.errors import RequestError

# No tools; calls where the model wants them; one or more calls and nothing else; one call.
CallMode = Literal["none", "auto", "required", "one"]
MAX_TOOLS_BYTES = 256 << 10  # of all names and schemas that a grammar holds
_MODE = make_enum_kind("auto", "none", "required")
_LISTED_MODE = make_enum_kind("auto", "required")
_FUNCTION = make_full_object_schema(name=SOME_TEXT)
_NAMED: Schema = {
    "anyOf": [
        make_full_object_schema(type={"const": "function"}, function=_FUNCTION),
        make_full_object_schema(type={"const": "function"}, name=SOME_TEXT),
    ]
}
_ALLOWED = make_full_object_schema(
    mode=_LISTED_MODE.make_schema(0),
    tools=make_list_schema(_NAMED) | {"minItems": 1},
)
_OBJECT_EXAMPLE = (
    '"auto", "none", "required", {"type": "function", "function": {"name": …}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}'
)


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """Which of a chat's tools an answer may call, and whether it must."""

    mode: CallMode = "auto"
    # the only functions that may be called; none: all of the request's tools
    names: tuple[str, ...] = ()

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "one")


@dataclass(slots=True, frozen=True)
class HeldCalls:
    """Calls that a grammar holds: each function's name, and its arguments' schema in JSON."""

    functions: tuple[tuple[str, str], ...]
    is_forced: bool  # a call must come
    is_single: bool  # at most one call
    is_named: bool  # the request names the one function


def _parse_tool_choice(name: str, value: Any, most: int) -> ToolChoice:
    if not isinstance(value, dict):
        return ToolChoice(_MODE.parse(name, value, most))
    kind = value.get("type")
    if kind == "function":
        return ToolChoice("one", (_parse_named_function(name, value),))
    if kind == "allowed_tools":
        return _parse_allowed_tools(name, value, most)
    raise out_of_range_error(name, value, _OBJECT_EXAMPLE)


def _parse_named_function(name: str, value: Any) -> str:
    """Return the name in `{"type": "function", …}`, of chats or of the Responses API."""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise wrong_type_error(
            name, value, 'such as {"type": "function", "function": {"name": …}}'
        )
    function = check_type(
        f"{name}.function", value.get("function", value), dict, "an object"
    )
    return check_type(f"{name}.function.name", function.get("name"), str, "a string")


def _parse_allowed_tools(name: str, value: dict[str, Any], most: int) -> ToolChoice:
    inner = value
    if "allowed_tools" in value:
        name = f"{name}.allowed_tools"
        inner = check_type(name, value["allowed_tools"], dict, "an object")
    mode = _LISTED_MODE.parse(f"{name}.mode", inner.get("mode"), most)
    tools = check_type(f"{name}.tools", inner.get("tools"), list, "a list of functions")
    if not tools:
        raise RequestError(
            "out_of_range",
            f'{name}.tools is an empty list; name a function, or set tool_choice to "none"',
            f"{name}.tools",
        )
    names = (
        _parse_named_function(f"{name}.tools[{place}]", tool)
        for place, tool in enumerate(tools)
    )
    return ToolChoice(mode, tuple(dict.fromkeys(names)))


TOOL_CHOICE = Kind(
    _parse_tool_choice,
    {
        "anyOf": [
            _MODE.make_schema(0),
            *_NAMED["anyOf"],
            make_full_object_schema(
                type={"const": "allowed_tools"}, allowed_tools=_ALLOWED
            ),
            make_full_object_schema(
                type={"const": "allowed_tools"}, **_ALLOWED["properties"]
            ),
        ]
    },
    f"{_MODE.values_text}, a function, `allowed_tools`",
)


def make_held_calls(
    choice: ToolChoice, tools: list[dict[str, Any]], *, is_single: bool
) -> HeldCalls | None:
    """Return what a grammar must hold of a chat's calls; None: nothing.

    Raises:
        RequestError: the choice and the tools do not fit, or a schema has what none may have.
    """
    functions = [tool["function"] for tool in tools]
    known = Counter(function["name"] for function in functions)
    is_strict = any(function.get("strict") for function in functions)
    if not (choice.is_forced or choice.names or is_strict):
        return None
    _check_names(choice, known)
    names = frozenset(choice.names)
    held = tuple(
        (function["name"], _make_arguments_schema(function, place, choice))
        for place, function in enumerate(functions)
        if not names or function["name"] in names
    )
    num_bytes = sum(len(name) + len(schema) for name, schema in held)
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestError(
            "out_of_range",
            f"tools that are held to their schemas have {num_bytes:,} bytes; at most "
            f"{MAX_TOOLS_BYTES:,} may be. Give fewer, or shorter schemas",
            "tools",
        )
    is_named = choice.mode == "one"
    return HeldCalls(held, choice.is_forced, is_single or is_named, is_named)


def _check_names(choice: ToolChoice, known: Counter[str]) -> None:
    if not known:
        raise RequestError(
            "out_of_range",
            "tool_choice asks for a call, and there are no tools. Give tools, or set it "
            'to "none"',
            "tool_choice",
        )
    for name, num_tools in known.items():
        if num_tools > 1:
            raise RequestError(
                "out_of_range",
                f"tools has several functions with the name {describe_value(name)}. Keep one",
                "tools",
            )
    for name in choice.names:
        if name not in known:
            shown_names = ", ".join(map(describe_value, [*known][:10]))
            raise RequestError(
                "out_of_range",
                f"tool_choice names {describe_value(name)}; the tools are {shown_names}. Name "
                "one of them, or give that tool",
                "tool_choice",
            )


def _make_arguments_schema(
    function: Mapping[str, Any], place: int, choice: ToolChoice
) -> str:
    """Return the schema of a function's arguments, which are an object.

    A call that the model need not make is held to the schema of a strict tool alone.
    """
    parameters = function.get("parameters")
    if not (choice.is_forced or function.get("strict")) or parameters in (None, True):
        return '{"type":"object"}'
    name = f"tools[{place}].function.parameters"
    check_type(name, parameters, dict, "a JSON Schema of an object")
    kind = parameters.get("type", "object")
    if kind not in ("object", ["object"]):
        raise out_of_range_error(f"{name}.type", kind, '"object", as arguments are')
    return parse_json_schema(name, parameters | {"type": "object"}).text

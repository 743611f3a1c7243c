"""What `tool_choice` may be, and which calls a grammar must then hold."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from fminfer.contract.chat import parse_chat
from fminfer.contract.field_table import FIELDS
from fminfer.contract.tool_choice import HeldCalls
from fminfer.core.errors import RequestError

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


def make_tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | more}


TOOLS = [make_tool("look"), make_tool("go")]
NAMED = {"type": "function", "function": {"name": "go"}}
FLAT = {"type": "function", "name": "go"}
GO = ("go", json.dumps(SCHEMA, separators=(",", ":")))
OBJECT = '{"type":"object"}'  # of a function that says no more
LOOK = ("look", GO[1])


def held(**fields: Any) -> HeldCalls | None:
    return parse_chat(
        {"messages": HELLO, "tools": TOOLS} | fields, max_logprobs=5
    ).held_calls


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        held(**fields)
    return caught.value


def allow(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize(
    ("choice", "functions", "is_forced", "is_named"),
    [
        ("required", (LOOK, GO), True, False),
        (NAMED, (GO,), True, True),
        (FLAT, (GO,), True, True),
        (allow(NAMED, mode="required"), (GO,), True, False),
        (allow(FLAT, NAMED), (("go", OBJECT),), False, False),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [FLAT]},
            (GO,),
            True,
            False,
        ),
    ],
)
def test_calls_that_are_held(
    choice: Any, functions: Any, is_forced: bool, is_named: bool
) -> None:
    calls = held(tool_choice=choice)
    assert calls == HeldCalls(functions, is_forced, is_named, is_named)
    single = held(tool_choice=choice, parallel_tool_calls=False)
    assert single is not None and single.is_single
    assert (
        parse_chat(
            {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}, max_logprobs=5
        ).tools
        == TOOLS
    ), "the prompt is that of all tools"


def test_nothing_is_held_without_a_wish() -> None:
    for fields in (
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": None},
    ):
        assert held(**fields) is held(**fields, parallel_tool_calls=False) is None
    assert held(tools=None) is held(tools=None, tool_choice="none") is None
    strict = [TOOLS[0], make_tool("go", strict=True)]
    assert held(tools=strict, tool_choice="none") is None


def test_strict_tools_alone_are_held_to_their_schemas() -> None:
    calls = held(tools=[TOOLS[0], make_tool("go", strict=True)])
    assert calls == HeldCalls((("look", OBJECT), GO), False, False, False)
    for nothing in (None, True, {}):
        tool = make_tool("go", parameters=nothing)
        calls = held(tools=[tool], tool_choice="required")
        assert calls is not None and calls.functions == (("go", OBJECT),)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tool_choice": 5}, "tool_choice", '"auto", "none", "required"'),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "Give tools"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice", "Give tools"),
        ({"tool_choice": allow(NAMED), "tools": [TOOLS[0]]}, "tool_choice", '"go"'),
        (
            {"tool_choice": {"type": "function"}},
            "tool_choice.function.name",
            "a string",
        ),
        ({"tool_choice": allow()}, "tool_choice.allowed_tools.tools", '"none"'),
        (
            {"tool_choice": allow(NAMED, mode="any")},
            "tool_choice.allowed_tools.mode",
            '"auto"',
        ),
        ({"tool_choice": allow("go")}, "tool_choice.allowed_tools.tools[0]", "such as"),
        ({"tool_choice": "required", "tools": [TOOLS[0]] * 2}, "tools", "Keep one"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "Keep one of them",
        ),
        (
            {"tool_choice": "required", "ignore_eos": True},
            "ignore_eos",
            "Remove ignore_eos",
        ),
        (
            {"tool_choice": "required", "tools": [make_tool("f", parameters="x")]},
            "tools[0].function.parameters",
            "a JSON Schema",
        ),
        (
            {"tools": [make_tool("f", strict=True, parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
            '"object"',
        ),
    ],
)
def test_wrong_choices_are_refused(
    fields: dict[str, Any], param: str, told: str
) -> None:
    error = refused(**fields)
    assert error.param == param and told in error.message


def test_schemas_have_the_limits_of_other_constraints() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    error = refused(tools=[make_tool("f", parameters=deep)], tool_choice="required")
    assert "deep" in error.message
    long = {"properties": {"a": {"enum": ["x" * 200_000]}}}
    tools = [make_tool(name, parameters=long) for name in ("f", "g")]
    assert "bytes" in refused(tools=tools, tool_choice="required").message
    assert held(tools=tools) is None


def test_the_schema_of_the_field_allows_what_is_read() -> None:
    schema = FIELDS["chat"]["tool_choice"].make_schema()
    for choice in (None, "auto", "required", NAMED, FLAT, allow(NAMED), allow(FLAT)):
        jsonschema.validate(choice, schema)
    for wrong in ("any", {"type": "function"}, allow(), {"type": "allowed_tools"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)

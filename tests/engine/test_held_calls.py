"""Calls that a grammar holds, over a scripted model: thoughts before them, streams, ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fminfer.engine.engine_core import Delta
from fminfer.runtime.team.team_process import StreamPosition
from tests.engine.thinking_bench import ThinkingBench
from tests.streams import check_stream, join_calls

HERMES = ">{# tools <tool_call> #}"
THINKING = ">{# tools <tool_call> <think> </think> #}"
OPENING = "{# tools <tool_call> </think> #}><think>"
HARMONY = ">{# tools <|channel|>commentary <|channel|>analysis<|message|> <|end|> #}"
PLACE = {"type": "string", "enum": ["map", "sky"]}
LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": PLACE, "times": {"type": "integer", "maximum": 99}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
STOP = {
    "name": "stop",
    "parameters": LOOK["parameters"] | {"properties": {"at": PLACE}},
}
TOOLS = [{"type": "function", "function": each} for each in (LOOK, STOP)]
NAMED = {"type": "function", "function": {"name": "look"}}
CALL = b'<tool_call>\n{"name": "look", "arguments": {"at": "map", "times": 12}}\n</tool_call>'
OTHER = CALL.replace(b"look", b"stop").replace(b', "times": 12', b"")
TO_LOOK = b"<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


def answer(script: bytes, template: str = HERMES, **fields: Any) -> dict[str, Any]:
    """Return the only choice of a chat with tools."""
    bench = ThinkingBench(script, template, context=600)
    (choice,) = bench.choices(tools=TOOLS, **fields)
    return choice


def test_a_call_may_follow_a_thought_that_a_budget_ends() -> None:
    """gpt-oss got the header of an answer, and could call nothing."""
    thought = b"<|channel|>analysis<|message|>aa<|end|><|start|>assistant"
    for script in (TO_LOOK + b'{"at": "map"}\0', b"<|channel|>final<|message|>Yes\0"):
        choice = answer(thought + script, HARMONY, thinking_token_budget=2)
        assert choice["reasoning_truncated"]
        message = choice["message"]
        assert message["reasoning_content"] == "aa"
        if script.startswith(TO_LOOK):
            assert list_calls(choice) == [("look", {"at": "map"})]
        else:
            assert message["content"] == "Yes" and "tool_calls" not in message


def list_calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def stream(script: bytes, **fields: Any) -> list[Delta]:
    bench = ThinkingBench(script, HERMES, context=600)
    events = bench.stream_events(tools=TOOLS, **fields)
    return [each for each in events if isinstance(each, Delta)]


@pytest.mark.parametrize(
    ("template", "script"),
    [
        (THINKING, b"<think>I look.</think>\n\n" + CALL),
        (THINKING, CALL),
        (OPENING, b"I look.</think>\n\n" + CALL),
        (HARMONY, TO_LOOK + b'{"at": "map", "times": 12}'),
        (
            HARMONY,
            b"<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
            + TO_LOOK
            + b'{"at": "map", "times": 12}',
        ),
    ],
)
def test_a_forced_call_comes_behind_the_thought(template: str, script: bytes) -> None:
    for choice in ("required", NAMED):
        found = answer(script + b"\0", template, tool_choice=choice)
        assert list_calls(found) == [("look", {"at": "map", "times": 12})]
        assert found["message"]["content"] is None
        thought = "I look." if b"I look." in script else None
        assert found["message"]["reasoning_content"] == thought
        reason = "stop" if choice is NAMED else "tool_calls"
        assert found["finish_reason"] == reason


@pytest.mark.parametrize("budget", [-1, 3])
def test_a_forced_call_has_no_other_header(budget: int) -> None:
    """Harmony's header of an answer is not put before that of a call."""
    thought = "<|channel|>analysis<|message|>" + ("a<|end|>" if budget < 0 else "aaa")
    final = "<|start|>assistant<|channel|>final<|message|>Yes"
    script = thought + final * (budget < 0) + "a" * 99
    fields = {"thinking_token_budget": budget, "max_tokens": 250}
    found = answer(
        script.encode(),
        HARMONY,
        tool_choice=NAMED,
        return_token_ids=True,
        **fields,
    )
    written = bytes(found["token_ids"]).decode(errors="replace")
    _, _, behind = written.partition("<|end|>")
    assert behind.removeprefix("<|start|>assistant").startswith("<|channel|>commentary")
    assert "final" not in behind


def test_what_the_model_would_say_instead_is_not_drawn() -> None:
    found = answer(b"I would rather not.\0" + CALL, tool_choice=NAMED)
    ((name, arguments),) = list_calls(found)
    assert name == "look" and arguments["at"] in PLACE["enum"]
    assert found["message"]["content"] is None
    found = answer(CALL + b" And so on.\0", tool_choice="required", max_tokens=300)
    assert len(list_calls(found)) >= 1 and "And" not in str(found["message"]["content"])


def test_one_call_or_several() -> None:
    two = CALL + b"\n" + OTHER + b"\0"
    several = [("look", {"at": "map", "times": 12}), ("stop", {"at": "map"})]
    assert list_calls(answer(two, tool_choice="required")) == several
    for fields in ({"parallel_tool_calls": False}, {"tool_choice": NAMED}):
        found = answer(two, **{"tool_choice": "required"} | fields)
        assert list_calls(found) == several[:1] and found["message"]["content"] is None


def test_allowed_and_strict_tools_are_held_in_free_text() -> None:
    only_stop = {"type": "function", "function": {"name": "stop"}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [only_stop]}
    found = answer(b"I see. " + OTHER + b"\nDone.\0", tool_choice=allowed)
    assert list_calls(found) == [("stop", {"at": "map"})]
    assert found["message"]["content"] == "I see.Done."
    found = answer(CALL + b"\0", tool_choice=allowed, parallel_tool_calls=False)
    assert {name for name, _ in list_calls(found)} == {"stop"}
    assert answer(b"No.\0", tool_choice=allowed)["message"]["content"] == "No."
    wrong = CALL.replace(b"map", b"sea") + b"\0"
    assert list_calls(answer(wrong)) == [("look", {"at": "sea", "times": 12})]
    strict = [{"type": "function", "function": LOOK | {"strict": True}}]
    bench = ThinkingBench(wrong, HERMES, context=600)
    (found,) = bench.choices(tools=strict, parallel_tool_calls=False)
    assert list_calls(found)[0][1]["at"] in PLACE["enum"]


def test_arguments_come_as_they_are_drawn() -> None:
    script = CALL + b"\n" + OTHER + b"\0"
    deltas = stream(script, tool_choice="required")
    pieces = [call for delta in deltas for call in delta.tool_calls]
    assert len(pieces) > 10 and pieces[0]["function"]["arguments"] == "{"
    calls = join_calls(pieces)
    assert [call["function"]["name"] for call in calls] == ["look", "stop"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"at": "map", "times": 12}
    plain = [call for delta in stream(script) for call in delta.tool_calls]
    assert len(plain) == 2, "without a grammar, calls come whole"
    assert [call["id"] for call in join_calls(pieces)] == [call["id"] for call in calls]


def test_a_stream_that_begins_anew_repeats_no_piece() -> None:
    """The new pipeline's pieces may be other ones: two of them are put together here."""
    fields = {"tool_choice": "required", "logprobs": True}
    bench = ThinkingBench(CALL + b"\n" + OTHER + b"\0", HERMES, context=600)
    events = bench.stream_events(tools=TOOLS, **fields)
    deltas = [each for each in events if isinstance(each, Delta)]
    for cut in range(0, len(deltas), 7):
        position = StreamPosition()
        sent = [position.cut_repeated(delta) for delta in deltas[:cut]]
        position.begin_anew()
        sent += [position.cut_repeated(delta) for delta in deltas]
        check_stream([*(each for each in sent if each is not None), events[-1]], 0)


def test_a_cut_call_says_why_it_ended() -> None:
    size = len(CALL) - 30
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}):
        found = answer(CALL + b"\0", max_tokens=size, **fields)
        (call,) = found["message"]["tool_calls"]
        assert found["finish_reason"] == "length"
        assert call["function"]["arguments"] in '{"at": "map", "times": 12}'
        assert (
            stream(CALL + b"\0", max_tokens=size, **fields)[-1].finish_reason
            == "length"
        )
    found = answer(CALL + b"\0", stop="12", tool_choice="required")
    assert found["finish_reason"] == "stop", "a stop string ended it, and it is broken"
    for size in (5, 25, len(CALL) + 25):  # within a call's head: no content, either
        for choice in ("required", NAMED):
            found = answer(2 * CALL + b"\0", max_tokens=size, tool_choice=choice)
            assert found["message"]["content"] is None
            assert len(list_calls(found)) == (size > len(CALL))
            if choice == "required":
                assert found["finish_reason"] == "length"
                stream(2 * CALL + b"\0", max_tokens=size, tool_choice=choice)


@pytest.mark.parametrize("parser", ["auto", "none"])
def test_a_model_whose_form_is_unknown_refuses_by_name(parser: str) -> None:
    template = HERMES if parser == "none" else ">{# tools #}"
    bench = ThinkingBench(b"a\0", template, tool_call_parser=parser)
    strict = [{"type": "function", "function": LOOK | {"strict": True}}]
    for fields, param in (
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": strict}, "tools"),
    ):
        error = bench.error(**fields)
        assert error.param == param and error.code == "unsupported_parameter"
        assert "--tool-call-parser" in error.message


def test_a_schema_that_cannot_be_had_is_refused_by_its_functions_name() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "odd", "parameters": odd}},
    ]
    error = ThinkingBench(b"a\0", HERMES).error(tools=tools, tool_choice="required")
    assert (
        error.param == "tools" and '"odd"' in error.message and "not" in error.message
    )
    assert "it has" in error.message and "start:" not in error.message

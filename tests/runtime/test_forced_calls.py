"""Calls of a whole engine that a grammar holds: a model of random texts makes valid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fminfer
from tests.conftest import IS_ALL
from tests.server.reciting import save_reciting
from tests.text.call_writers import WRITERS

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}:"
WAY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "start": {"type": "string", "enum": ["porch", "den"]},
        "steps": {"type": "integer", "minimum": 1, "maximum": 99},
        "note": {"type": "string", "maxLength": 5},
        "is_fast": {"type": "boolean"},
        "stops": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "end": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["start", "steps"],
    "additionalProperties": False,
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"find_way": WAY, "list_rooms": NO_ARGUMENTS}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "find_way"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
CHAT |= {"n": 4, "max_tokens": 200}
SOME_FORMS = ("hermes", "pythonic", "qwen3_coder", "openai", "phi4_mini_json")
# The special tokens of the model, which spell marks of some forms.
MARKS = ("tool_call", "/tool_call", "channel", "message", "constrain", "start")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = dict.fromkeys(MARKS, "")
    return save_reciting(tmp_path_factory.mktemp("random"), texts, TEMPLATE)


def answer(
    engine: fminfer.Engine, *requests: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    """Return the choices of some chats."""
    records = sorted(
        engine.run([CHAT | each for each in requests]), key=lambda r: r.line.number
    )
    assert not [record.error for record in records if record.error]
    return [record.to_dict()["result"]["choices"] for record in records]


def check_calls(choice: dict[str, Any]) -> list[str]:
    """Check that a message is of valid calls alone, if it is whole; return their names."""
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    is_whole = choice["finish_reason"] != "length"
    assert not is_whole or (calls and choice["message"]["content"] is None)
    for call in calls if is_whole else calls[:-1]:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    return [call["name"] for call in calls]


@pytest.mark.parametrize("form", WRITERS if IS_ALL else SOME_FORMS)
def test_a_random_model_makes_valid_calls(form: Any, folder: Path) -> None:
    requests = (
        {"tool_choice": "required", "seed": 1},
        {"tool_choice": "required", "parallel_tool_calls": False, "seed": 2},
        {"tool_choice": NAMED, "seed": 3},
    )
    with fminfer.Engine(str(folder), dtype="float32", tool_call_parser=form) as engine:
        several, single, named = answer(engine, *requests)
    reasons = {"tool_calls", "length"}
    assert {name for each in several for name in check_calls(each)} == {*SCHEMAS}
    assert {each["finish_reason"] for each in (*several, *single)} <= reasons
    for each in single:
        assert len(check_calls(each)) == 1 or each["finish_reason"] == "length"
    for each in named:
        assert check_calls(each) == ["find_way"] or each["finish_reason"] == "length"
    assert {each["finish_reason"] for each in named} <= {"stop", "length"}
    assert any(each["finish_reason"] == "stop" for each in named)

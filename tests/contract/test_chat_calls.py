"""Tool calls of earlier turns, as they are read."""

from __future__ import annotations

import json

import pytest

from fminfer.contract.chat_messages import parse_messages
from fminfer.core.errors import RequestError


def read(call: dict[str, object]) -> dict[str, object]:
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    found: dict[str, object] = message["tool_calls"][0]
    return found


def test_names_stay_in_their_order() -> None:
    """A template that writes a whole call wrote its type first, unlike transformers."""
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": {"b": 1}},
    }
    assert json.dumps(read(call)) == json.dumps(call)
    assert read({"function": {"name": "f"}, "type": None})["type"] == "function"
    assert read({"function": {"name": "f"}})["type"] == "function"


def test_arguments_stay_as_they_were_sent() -> None:
    """Some templates write them as the client did, and others as an object."""
    for sent in ('{"id":  12345678901234567890123}', {"id": 1}, "{}"):
        function = {"name": "f", "arguments": sent}
        assert read({"function": function})["function"] == function
    for empty in ("", None, {}):
        assert read({"function": {"name": "f", "arguments": empty}})["function"] == {
            "name": "f",
            "arguments": {},
        }
    for broken in ('{"a": NaN}', '{"a": 1', "[" * 100_000, "[]", "Paris"):
        function = {"name": "f", "arguments": broken}
        assert read({"function": function})["function"] == function
    for wrong in ([], 0, True):
        with pytest.raises(RequestError, match="as the model wrote it"):
            read({"function": {"name": "f", "arguments": wrong}})

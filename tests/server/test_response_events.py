"""The events of a streamed response, from what an engine returns."""

from __future__ import annotations

from typing import Any

from fminfer.contract.request import RequestParams
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.server.http_errors import HttpError
from fminfer.server.response_events import ResponseShape

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def make_shape() -> ResponseShape:
    prepared = PreparedRequest(RequestParams(), [], kind="chat")
    return ResponseShape({"input": "a"}, prepared, "demo")


def delta(text: str = "", reason: Any = None, **fields: Any) -> Delta:
    return Delta(1, 0, text, [], finish_reason=reason, **fields)


def finish(reason: str, **message: Any) -> Finished:
    choice = {"index": 0, "message": {"content": None, **message}, "logprobs": None}
    return Finished(1, [choice | {"finish_reason": reason}], USAGE, {}, "chat")


def stream(*events: Event) -> list[dict[str, Any]]:
    """Return the events of a stream, one of the engine's at a time."""
    shape = make_shape()
    made = [each for event in events for each in shape.make_chunks([event])]
    numbers = [each.pop("sequence_number") for each in made]
    assert numbers == [*range(len(made))]
    return made


def call(name: str, arguments: str, place: int) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "index": place,
        "id": f"call_{place}",
        "type": "function",
        "function": function,
    }


def test_a_thought_a_message_and_calls_in_pieces() -> None:
    more = {"index": 0, "function": {"arguments": '"b"}'}}
    events = stream(
        delta(reasoning="I "),
        delta(reasoning="think"),
        delta("So"),
        delta(" it is", tool_calls=[call("f", '{"a": ', 0)]),
        delta(tool_calls=[more]),
        delta(reason="tool_calls", tool_calls=[call("g", "{}", 1)]),
        finish(
            "tool_calls",
            reasoning_content="I think",
            content="So it is",
            tool_calls=[call("f", '{"a": "b"}', 0), call("g", "{}", 1)],
        ),
    )
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    thought, message, first, second = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert message["content"][0]["text"] == "So it is"
    assert (first["name"], first["arguments"]) == ("f", '{"a": "b"}')
    assert (second["name"], second["arguments"]) == ("g", "{}")
    usage = events[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    added = [
        each["item"]["status"]
        for each in events
        if "added" in each["type"] and "item" in each
    ]
    assert added == ["in_progress"] * 4


def test_text_behind_a_call_goes_on_with_the_message() -> None:
    """Events name places in the output, so that the answer has its items in that order."""
    events = stream(
        delta(tool_calls=[call("f", "{}", 0)]),
        delta("and"),
        delta(tool_calls=[call("g", "{}", 1)]),
        delta(" more", reason="length"),
        finish(
            "length",
            content="and more",
            tool_calls=[call("f", "{}", 0), call("g", "{}", 1)],
        ),
    )
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "function_call",
        "message",
        "function_call",
    ]
    assert output[1]["content"][0]["text"] == "and more"
    assert [item["status"] for item in output] == [
        "completed",
        "incomplete",
        "completed",
    ]
    assert events[-1]["type"] == "response.incomplete"


def test_the_rest_of_a_call_belongs_to_it_whatever_comes_with_it() -> None:
    more = {"index": 0, "function": {"arguments": "}"}}
    events = stream(
        delta(tool_calls=[call("f", "{", 0)]),
        delta("and", tool_calls=[more, call("g", "{}", 1)]),
        delta(reason="tool_calls"),
        finish(
            "tool_calls",
            content="and",
            tool_calls=[call("f", "{}", 0), call("g", "{}", 1)],
        ),
    )
    done = [each for each in events if each["type"].endswith("output_item.done")]
    texts = {
        each["item"]["id"]: each["item"].get("arguments")
        or each["item"]["content"][0]["text"]
        for each in done
    }
    assert [*texts.values()] == ["{}", "and", "{}"]
    for item_id, text in texts.items():
        pieces = [
            each["delta"]
            for each in events
            if each["type"].endswith(".delta") and each["item_id"] == item_id
        ]
        assert "".join(pieces) == text


def test_logprobs_come_with_the_next_text_or_with_the_messages_end() -> None:
    entries = [{"token": name, "logprob": -1.0} for name in ("t", "a", "b")]
    parts = [{"content": [entry], "refusal": None} for entry in entries]
    end = finish("stop", content="a", reasoning_content="t")
    end.choices[0]["logprobs"] = {"content": entries, "refusal": None}
    events = stream(
        delta(reasoning="t", logprobs=parts[0]),
        delta("a", logprobs=parts[1]),
        delta(reason="stop", logprobs=parts[2]),
        end,
    )
    told = [
        each["logprobs"]
        for each in events
        if each["type"].endswith("text.delta") and "logprobs" in each
    ]
    assert told == [entries[:2]]
    (done,) = [each for each in events if each["type"].endswith("output_text.done")]
    assert done["logprobs"] == entries
    assert events[-1]["response"]["output"][1]["content"][0]["logprobs"] == entries


def test_an_answer_without_text_is_an_empty_message() -> None:
    events = stream(delta(reason="stop"), finish("stop", content=""))
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert not any(each["type"].endswith("delta") for each in events)


def test_signs_of_life_and_errors_have_numbers_of_their_own() -> None:
    shape = make_shape()
    begun = list(shape.make_chunks([]))
    assert [each["type"] for each in begun] == [
        "response.created",
        "response.in_progress",
    ]
    (alive,) = shape.make_chunks([])
    assert (alive["type"], alive["sequence_number"]) == ("response.in_progress", 2)
    error = shape.make_error(HttpError(503, "it ends", code="shutting_down"))
    assert error == {
        "type": "error",
        "sequence_number": 3,
        "code": "shutting_down",
        "message": "it ends",
        "param": None,
    }

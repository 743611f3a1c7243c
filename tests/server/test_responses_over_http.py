"""/v1/responses by openai-python: whole, streamed, with tools, and those of a file."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.answers import answer_file, rounded
from tests.server.reciting import save_reciting
from tests.server.running import Running
from tests.server.server_needs import needs_server
from tests.server.test_tools_over_http import TEMPLATE, TEXTS
from tests.server.test_tools_over_http import TOOLS as CHAT_TOOLS

pytestmark = needs_server(model="folder")

URL = "/v1/responses"
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
# A tool whose arguments end soon, whatever a model writes.
WAY: Any = {
    "type": "function",
    "name": "find_way",
    "parameters": {
        "type": "object",
        "properties": {"start": {"enum": ["porch", "den"]}},
        "required": ["start"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {
    "input": "one",
    "tools": [WAY, TOOLS[1]],
    "temperature": 0,
    "max_output_tokens": 200,
}
REQUESTS: list[dict[str, Any]] = [
    {"input": "one", "tools": TOOLS, "temperature": 0},
    {"input": "two", "tools": TOOLS, "seed": 4, "instructions": "Look it up"},
    {"input": [{"role": "user", "content": "told"}], "seed": 3, **LOGPROBS},
    {"input": "two", "tools": TOOLS, "max_output_tokens": 12, "seed": 3},
    {"input": "two", "tools": TOOLS, "parallel_tool_calls": False, "seed": 4},
    {"input": "one", "tools": TOOLS, "tool_choice": "none", "temperature": 0},
    {"input": "told", "temperature": 0, "max_output_tokens": 0},
    FORCED | {"tool_choice": {"type": "function", "name": "find_way"}},
    FORCED
    | {
        "parallel_tool_calls": False,
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "find_way"}],
        },
    },
]
THOUGHT = "Which way is it?"
SAID = "Go to the north."
# The text of the message that it begins stands behind the thought.
THINKING = """
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}
{{ message.content }}
{%- endfor -%}
<|thinks|>"""
OF_ONE_RESPONSE = ("id", "created_at", "model")


class Way(BaseModel):
    start: Literal["porch", "den"]
    end: Literal["attic", "hall"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_reciting(tmp_path_factory.mktemp("reciting"), TEXTS, TEMPLATE))


@pytest.fixture(scope="module")
def file_answers(folder: str) -> list[dict[str, Any]]:
    return answer_file(
        [(URL, body) for body in REQUESTS], model=folder, dtype="float32"
    )


def comparable(response: dict[str, Any]) -> Any:
    """Return a response without what is its alone: ids, times, what was cached."""
    kept = {key: each for key, each in response.items() if key not in OF_ONE_RESPONSE}
    kept["usage"] = {**kept["usage"], "input_tokens_details": None}
    kept["output"] = [{**item, "id": item["type"]} for item in kept["output"]]
    return rounded(kept)


def read_events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which says its name twice."""
    events = []
    for text in body.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    return events


@pytest.mark.parametrize("place", range(len(REQUESTS)))
def test_whole_streamed_and_in_a_file_it_is_the_same(
    server: Running, file_answers: list[dict[str, Any]], place: int
) -> None:
    whole = server.post(URL, REQUESTS[place]).json
    events = read_events(server.post(URL, REQUESTS[place] | {"stream": True}).body)
    assert comparable(whole) == comparable(file_answers[place])
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert comparable(last["response"]) == comparable(whole)
    # What the events tell piece by piece is what the last one has whole.
    done = [event for event in events if event["type"] == "response.output_item.done"]
    items = {event["output_index"]: event["item"] for event in done}
    assert [items[index] for index in sorted(items)] == last["response"]["output"]
    for event in done:
        item_id = event["item"]["id"]
        pieces = [
            each["delta"]
            for each in events
            if each["type"].endswith(".delta") and each["item_id"] == item_id
        ]
        item = event["item"]
        text = item.get("arguments") or item.get("content", [{}])[0].get("text", "")
        assert "".join(pieces) == text


def test_what_comes_back_of_the_request(file_answers: list[dict[str, Any]]) -> None:
    calls, both, text, cut, one, none, empty, named, allowed = file_answers
    assert [item["type"] for item in calls["output"]] == ["function_call"]
    assert calls["tools"] == TOOLS and calls["temperature"] == 0
    kinds = ["message", "function_call", "function_call"]
    assert [item["type"] for item in both["output"]] == kinds
    assert both["instructions"] == "Look it up"
    part = text["output"][0]["content"][0]
    assert part["text"] == TEXTS["talk"]
    assert "".join(e["token"] for e in part["logprobs"][:-1]) in part["text"]
    assert all(len(entry["top_logprobs"]) == 1 for entry in part["logprobs"])
    assert cut["status"] == cut["output"][-1]["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["usage"]["output_tokens"] == cut["max_output_tokens"] == 12
    assert [item["type"] for item in one["output"]] == kinds[:2]
    assert none["output"][0]["content"][0]["text"] == TEXTS["talk"]
    assert empty["output"][0]["content"][0]["text"] == ""
    for forced in (named, allowed):
        (call,) = forced["output"]
        assert json.loads(call["arguments"])["start"] in ("porch", "den")
    assert allowed["tool_choice"] == REQUESTS[8]["tool_choice"]
    assert {each["store"] for each in file_answers} == {False}


def test_a_round_trip_with_a_call(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "one"}]
    first = client.responses.create(model="demo", input=asked, tools=TOOLS, store=True)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "find_way"
    assert json.loads(call.arguments) == {"start": "porch", "end": "den"}
    output: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "north, east",
    }
    history = [*asked, *first.output, output]
    second = client.responses.create(model="demo", input=history, tools=TOOLS)
    assert second.output_text == TEXTS["told"]
    assert second.status == "completed" and second.usage is not None


def test_the_clients_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="two", tools=TOOLS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    texts = [each for each in events if each.type == "response.output_text.delta"]
    assert len(texts) > 1 and texts[-1].snapshot == "I look it up."
    assert response.output_text == "I look it up."
    assert [item.type for item in response.output[1:]] == ["function_call"] * 2


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = {"thinks": f"<think>{THOUGHT}</think>{SAID}"}
    return str(save_reciting(tmp_path_factory.mktemp("thinker"), texts, THINKING))


@needs_server(model="thinker")
def test_a_thought_is_an_item_that_goes_back(
    client: openai.OpenAI, server: Running
) -> None:
    asked: Any = {"model": "demo", "input": "Which way?", "temperature": 0}
    whole = client.responses.create(**asked)
    thought, _ = whole.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text.strip() == THOUGHT
    assert whole.output_text == SAID and whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0

    events = list(client.responses.create(**asked, stream=True))
    pieces = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert len(pieces) > 1 and "".join(pieces).strip() == THOUGHT
    assert events[-1].type == "response.completed"
    kinds = [item.type for item in events[-1].response.output]
    assert kinds == ["reasoning", "message"]

    history = [{"role": "user", "content": "Which way?"}, *whole.output]
    again = client.responses.create(model="demo", input=history, temperature=0)
    assert again.output_text == SAID
    messages = [
        {"role": "user", "content": "Which way?"},
        {
            "role": "assistant",
            "content": SAID,
            "reasoning_content": thought.content[0].text,
        },
    ]
    chat = client.chat.completions.create(
        model="demo",
        messages=messages,
        temperature=0,  # type: ignore[arg-type]
    )
    assert chat.usage is not None and again.usage is not None
    assert again.usage.input_tokens == chat.usage.prompt_tokens

    cut = client.responses.create(**asked, max_output_tokens=3)
    (thought,) = cut.output
    assert cut.status == thought.status == "incomplete"
    body = {**asked, "thinking_token_budget": 2}
    short = server.post(URL, body).json
    assert short["reasoning_truncated"] is True
    hidden = server.post(URL, {**asked, "include_reasoning": False}).json
    assert [item["type"] for item in hidden["output"]] == ["message"]


@needs_server()
def test_parse_returns_an_object(client: openai.OpenAI) -> None:
    """The demo model writes what the schema of the class allows."""
    response = client.responses.parse(
        model="demo",
        input="Which way?",
        text_format=Way,
        temperature=0,
        extra_body={"guided_whitespace_pattern": " ?"},
    )
    assert isinstance(response.output_parsed, Way)
    assert response.text is not None and response.status == "completed"
    labelled = client.responses.create(
        model="demo",
        input="Which way?",
        extra_body={
            "structured_outputs": {"choice": ["north", "south"], "probabilities": True}
        },
    )
    assert labelled.output_text in ("north", "south")
    extra: Any = labelled.model_extra
    assert set(extra["label_probabilities"]) == {"north", "south"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": "a", "max_output_tokens": 10_000}, "max_output_tokens"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
    ({"input": "a", "stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_wrong_fields_are_refused_as_in_a_file(
    server: Running, folder: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(URL, body)
    assert answer.status == 400 and answer.error["param"] == param
    if param != "stream_options":
        (error,) = answer_file([(URL, body)], model=folder, dtype="float32")
        assert error["error"] == answer.error


@pytest.mark.parametrize("body", [{"input": "one", "max_output_tokens": 9000}, {}])
def test_an_error_that_comes_before_a_stream_has_a_status(
    server: Running, body: dict[str, Any]
) -> None:
    assert server.post(URL, body | {"stream": True}).status == 400

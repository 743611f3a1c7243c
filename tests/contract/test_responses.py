"""Requests to /v1/responses as chats, and choices of chats as output items."""

from __future__ import annotations

from typing import Any

import pytest

from fminfer.contract.chat import parse_chat
from fminfer.contract.response_items import make_output, parse_input
from fminfer.contract.responses import (
    convert_result,
    make_result,
    parse_response,
    rename_error,
)
from fminfer.core.errors import RequestError

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
}
CALL = {
    "id": "call_12",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1}'},
}
ENTRY = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}


def parse(**fields: Any) -> dict[str, Any]:
    """Return the fields of the chat that a request means."""
    return parse_response(fields, max_logprobs=5).fields


def error_of(**fields: Any) -> RequestError:
    """Return a request's error, as an engine's intake raises it."""
    try:
        response = parse_response(fields, max_logprobs=5, is_strict=True)
    except RequestError as error:
        return error
    with pytest.raises(RequestError) as caught:
        parse_chat(response.fields, max_logprobs=5)
    return rename_error(caught.value, response.names)


def text_parts(kind: str, *texts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def test_a_text_is_what_the_user_says() -> None:
    messages, _ = parse_input("Hello", None)
    assert messages == [{"role": "user", "content": "Hello"}]
    messages, names = parse_input("Hello", "Be brief")
    assert messages[0] == {"role": "system", "content": "Be brief"}
    assert names == {"messages[0]": "instructions", "messages[1]": "input"}


def test_what_an_answer_had_goes_back_as_one_message() -> None:
    choice = {
        "message": {
            "content": "Let me see",
            "reasoning_content": "Which way?",
            "tool_calls": [CALL, CALL | {"id": "call_13"}],
        },
        "finish_reason": "tool_calls",
        "logprobs": {"content": [ENTRY], "refusal": None},
    }
    output = make_output(choice, "ab")
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in output] == kinds
    ids = ["rs_ab", "msg_ab", "fc_12", "fc_13"]
    assert [item["id"] for item in output] == ids
    result = {"type": "function_call_output", "call_id": "call_12", "output": "3"}
    question = {"type": "message", "role": "user", "content": "Go on"}
    messages, _ = parse_input([question, *output, result, *output[1:2]], None)
    assert messages == [
        {"role": "user", "content": "Go on"},
        {
            "role": "assistant",
            "reasoning_content": "Which way?",
            "content": [{"type": "text", "text": "Let me see"}],
            "tool_calls": [CALL, CALL | {"id": "call_13"}],
        },
        {"role": "tool", "tool_call_id": "call_12", "content": "3"},
        {"role": "assistant", "content": text_parts("text", "Let me see")},
    ]


def test_text_behind_a_call_goes_back_with_it() -> None:
    """Two messages of the assistant, without the call's output between, are refused by many
    templates."""
    call = make_output(
        {"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "stop"},
        "ab",
    )
    said = {"role": "assistant", "content": "a"}
    result = {"type": "function_call_output", "call_id": "call_12", "output": "3"}
    messages, names = parse_input([*call, said, *call, said, result], None)
    one = {"role": "assistant", "tool_calls": [CALL, CALL], "content": "a"}
    tool = {"role": "tool", "tool_call_id": "call_12", "content": "3"}
    assert messages == [one, said, tool]
    assert names["messages[0]"] == "input[0]"
    assert names["messages[0].content"] == "input[1].content"
    assert names["messages[1]"] == "input[3]"
    assert "messages[1].content" not in names


@pytest.mark.parametrize(
    ("content", "arguments", "statuses"),
    [
        ("a", "{}", ["incomplete", "completed"]),
        ("a", '{"b": ', ["completed", "incomplete"]),
        (None, '{"b": ', ["incomplete"]),
        (None, "{}", ["incomplete"]),
    ],
)
def test_what_was_cut_is_incomplete(
    content: str | None, arguments: str, statuses: list[str]
) -> None:
    function = CALL["function"] | {"arguments": arguments}
    message = {"content": content, "tool_calls": [CALL | {"function": function}]}
    output = make_output({"message": message, "finish_reason": "length"}, "ab")
    assert [item["status"] for item in output] == statuses


@pytest.mark.parametrize("output", [{}, {"output": None}, {"output": 5}])
def test_an_output_of_a_call_is_a_text_or_parts(output: dict[str, Any]) -> None:
    item = {"type": "function_call_output", "call_id": "call_12"} | output
    with pytest.raises(RequestError, match=r"input\[0\].output"):
        parse_input([item], None)


def test_two_messages_of_the_assistant_stay_two() -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": text_parts("summary_text", "b", "c")}
    messages, _ = parse_input([said, said, thought, thought, said], None)
    assert messages == [
        said,
        said,
        {"role": "assistant", "reasoning_content": "bcbc", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("message", "reason", "kinds", "status"),
    [
        ({"content": "a"}, "stop", ["message"], "completed"),
        ({"content": "a"}, "length", ["message"], "incomplete"),
        ({"content": ""}, "stop", ["message"], "completed"),
        ({"content": None, "tool_calls": [CALL]}, "tool_calls", ["call"], "completed"),
        ({"content": None, "reasoning_content": "x"}, "length", ["r"], "incomplete"),
    ],
)
def test_a_response_is_read_back_as_the_choice_it_was_made_of(
    message: dict[str, Any], reason: str, kinds: list[str], status: str
) -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "refusal": None, **message},
        "logprobs": {"content": [ENTRY], "refusal": None},
        "finish_reason": reason,
        "label_mass": 0.5,
    }
    if kinds != ["message"]:  # logprobs are of a message's text
        choice["logprobs"] = None
    result = make_result(choice, USAGE, "ab")
    assert result["status"] == status and len(result["output"]) == len(kinds)
    assert result["output"][-1]["status"] == status
    assert (result["incomplete_details"] is None) is (status == "completed")
    assert result["usage"]["total_tokens"] == 12
    found = convert_result(result)
    expected = {key: each for key, each in choice.items() if key != "message"}
    (read,) = found["choices"]
    assert {key: read[key] for key in expected} == expected
    assert {key: read["message"].get(key) for key in message} == message
    assert found["usage"]["prompt_tokens"] == 7
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_other_results_are_left_as_they_are() -> None:
    for result in ({"choices": [], "usage": {}}, {"data": [1], "usage": {}}):
        assert convert_result(result) is result


def test_fields_by_their_names_in_chat() -> None:
    schema = {"type": "object"}
    chat = parse(
        input="a",
        max_output_tokens=5,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        seed=3,
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        tool_choice="auto",
        store=True,
        metadata={"a": "b"},
        truncation="disabled",
        background=False,
    )
    assert chat["max_tokens"] == 5 and chat["seed"] == 3
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": schema}
    assert chat["reasoning_effort"] == "low"
    assert chat["logprobs"] is True and chat["top_logprobs"] == 2
    assert chat["tool_choice"] == "auto"
    function = {"name": "f", "parameters": schema, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    parse_chat(chat, max_logprobs=5)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0]",
    ),
    (
        {"input": [{"role": "user", "content": text_parts("input_text", 3)}]},  # type: ignore[arg-type]
        "input[0].content[0].text",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    (
        {
            "input": [
                {"role": "assistant", "content": "a", "tool_calls": "x"},
                {"type": "function_call"}
                | dict.fromkeys(("call_id", "name", "arguments"), "f"),
            ]
        },
        "input[0].tool_calls",
    ),
    (
        {
            "input": [
                {"type": "reasoning", "content": text_parts("reasoning_text", "b")},
                {"role": "assistant", "content": "a", "reasoning_content": 5},
            ]
        },
        "input[1].reasoning_content",
    ),
    (
        {
            "instructions": "x",
            "input": [
                {"role": "user", "content": "a"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image"}],
                },
            ],
        },
        "input[1].output[0]",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]},
        "input[0].encrypted_content",
    ),
    (
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]},
        "input[0].content[0].text",
    ),
    ({"input": "a", "instructions": ["b"]}, "instructions"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"input": "a", "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"input": "a", "include": ["file_search_call.results"]}, "include"),
    ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
    ({"input": "a", "max_output_tokens": -1}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 1, "min_tokens": 2}, "min_tokens"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "max_tool_calls": 3}, "max_tool_calls"),
    ({"input": "a", "n": 2}, "n"),
    ({"input": "a", "messages": []}, "messages"),
    ({"input": "a", "max_tokens": 5}, "max_tokens"),
    ({"input": "a", "response_format": {"type": "text"}}, "response_format"),
    ({"input": "a", "strange": 1}, "strange"),
    (
        {
            "input": "a",
            "text": {"format": {"type": "json_object"}},
            "structured_outputs": {"choice": ["a"]},
        },
        "structured_outputs",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_errors_name_the_fields_of_the_request(
    fields: dict[str, Any], param: str
) -> None:
    error = error_of(**fields)
    assert error.param == param, error.message
    if param not in fields:  # what is refused by its name in chat is named so
        for name in ("messages[", "max_tokens", "response_format", ".function."):
            assert name not in error.message

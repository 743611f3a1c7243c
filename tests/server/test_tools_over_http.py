"""Tools, by openai-python: calls whole and in parts, their answers, and those of a file."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.answers import answer_file, join_chat, rounded
from tests.server.reciting import save_reciting
from tests.server.server_needs import needs_server

pytestmark = needs_server(model="folder")

CALL = '{"name": "find_way", "arguments": {"start": "porch", "end": "den"}}'
OTHER = '{"name": "list_rooms", "arguments": {}}'
TEXTS = {
    "one": f"<tool_call>\n{CALL}\n</tool_call>",
    "two": f"I look it up.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
    "told": "Go north, then to the east.",
    "talk": "I have no tools, so I say <tool_call> and no more.",
}
# The last user's message names the text; an answer of a tool, or no tools at all, another one.
TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
{%- endfor -%}
{%- endfor -%}
{%- for tool in tools or [] -%}<|tool|>{{ tool.function | tojson }}{%- endfor -%}
{%- if messages[-1].role == "tool" -%}<|told|>
{%- elif not tools -%}<|talk|>
{%- else -%}<|{{ messages[-1].content }}|>
{%- endif -%}
"""
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "find_way",
            "description": "Tell the way between two rooms",
            "parameters": {
                "type": "object",
                "properties": {"start": {"type": "string"}, "end": {"type": "string"}},
                "required": ["start", "end"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "list_rooms", "parameters": {"type": "object"}},
    },
]
ARGUMENTS = "tool_calls.function.arguments.delta"  # a type of event
NAMED: Any = {"type": "function", "function": {"name": "find_way"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}
ALLOWED_ROOMS: Any = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "list_rooms"}],
}
CHATS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "one"}],
        "tools": TOOLS,
        "logprobs": True,
        "seed": 3,
    },
    {
        "messages": [{"role": "user", "content": "two"}],
        "tools": TOOLS,
        "n": 2,
        "seed": 4,
    },
    {
        "messages": [{"role": "user", "content": "one"}],
        "tools": TOOLS,
        "tool_choice": "none",
    },
    {
        "messages": [{"role": "user", "content": "two"}],
        "tools": TOOLS,
        "max_tokens": 12,
        "seed": 3,
    },
    {
        **{
            "messages": [{"role": "user", "content": "two"}],
            "tools": TOOLS,
            "logprobs": True,
        },
        **{"parallel_tool_calls": False, "seed": 4},
    },
    {
        "messages": [{"role": "user", "content": "one"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 3,
    },
    {
        "messages": [{"role": "user", "content": "one"}],
        "tools": TOOLS,
        "tool_choice": NAMED,
        "max_tokens": 70,
        "seed": 3,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_reciting(tmp_path_factory.mktemp("reciting"), TEXTS, TEMPLATE))


@pytest.fixture(scope="module")
def file_answers(folder: str) -> list[dict[str, Any]]:
    url = "/v1/chat/completions"
    return answer_file([(url, body) for body in CHATS], model=folder, dtype="float32")


def shown(choices: list[dict[str, Any]]) -> Any:
    """Return choices without the fields that only the client's classes have."""
    for choice in choices:
        message = choice["message"]
        for name in ("annotations", "audio", "function_call", "tool_calls"):
            if message.get(name) is None:
                message.pop(name, None)
    return rounded(choices)


@pytest.mark.parametrize("place", range(len(CHATS)))
def test_calls_are_those_of_a_file(
    client: openai.OpenAI, file_answers: list[dict[str, Any]], place: int
) -> None:
    expected = rounded(file_answers[place]["choices"])
    whole = client.chat.completions.create(model="demo", **CHATS[place]).model_dump()
    assert shown(whole["choices"]) == expected
    stream = client.chat.completions.create(model="demo", stream=True, **CHATS[place])
    chunks = [chunk.model_dump() for chunk in stream]
    joined = join_chat([choice for chunk in chunks for choice in chunk["choices"]])
    assert shown(joined) == expected


def test_calls_and_what_is_said_before_them(client: openai.OpenAI) -> None:
    first, second = client.chat.completions.create(model="demo", **CHATS[1]).choices
    assert first.finish_reason == second.finish_reason == "tool_calls"
    assert first.message.content == second.message.content == "I look it up."
    calls = [*(first.message.tool_calls or []), *(second.message.tool_calls or [])]
    functions = [call.function for call in calls if call.type == "function"]
    assert [function.name for function in functions] == ["find_way", "list_rooms"] * 2
    assert json.loads(functions[0].arguments) == {"start": "porch", "end": "den"}
    assert len({call.id for call in calls}) == 4
    alone = client.chat.completions.create(model="demo", **CHATS[0]).choices[0]
    assert alone.message.content is None and len(alone.message.tool_calls or []) == 1


def test_one_call_is_kept_if_no_more_are_wanted(client: openai.OpenAI) -> None:
    (both,) = client.chat.completions.create(
        model="demo", **CHATS[1] | {"n": 1}
    ).choices
    (one,) = client.chat.completions.create(model="demo", **CHATS[4]).choices
    assert (one.finish_reason, one.message.content) == ("tool_calls", "I look it up.")
    assert one.message.tool_calls == (both.message.tool_calls or [])[:1]


def test_ids_of_calls_repeat_by_their_seed(client: openai.OpenAI) -> None:
    def ids(**fields: Any) -> list[str]:
        found = client.chat.completions.create(model="demo", **CHATS[0] | fields)
        return [call.id for call in found.choices[0].message.tool_calls or []]

    assert ids() == ids() and ids(seed=None) != ids(seed=None)


def test_calls_that_are_not_there(client: openai.OpenAI) -> None:
    """Without tools the tag is text; a call that was cut is text, too."""
    without = client.chat.completions.create(model="demo", **CHATS[2]).choices[0]
    assert (without.message.content, without.finish_reason) == (TEXTS["talk"], "stop")
    cut = client.chat.completions.create(model="demo", **CHATS[3]).choices[0]
    assert cut.finish_reason == "length" and not cut.message.tool_calls
    assert cut.message.content is not None and TEXTS["two"].startswith(
        cut.message.content
    )


def test_a_stream_sends_text_at_once_and_each_call_whole(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo", stream=True, **CHATS[1] | {"n": 1}
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert len([delta for delta in deltas if delta.content]) > 2
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert all(call.id and call.function and call.function.name for call in calls)


def test_a_round_trip(client: openai.OpenAI) -> None:
    """A call's message goes back as it came, with the tool's answer."""
    asked: Any = [{"role": "user", "content": "one"}]
    with client.chat.completions.stream(
        model="demo", messages=asked, tools=TOOLS
    ) as stream:
        names = [
            event.name
            for event in stream
            if event.type == "tool_calls.function.arguments.done"
        ]
        message = stream.get_final_completion().choices[0].message
    assert names == ["find_way"]
    (call,) = message.tool_calls or []
    assert call.function.parsed_arguments is None  # parsed where the tool is strict
    told: Any = {"role": "tool", "tool_call_id": call.id, "content": "north, east"}
    history = [*asked, message, told]
    answer = client.chat.completions.create(model="demo", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == TEXTS["told"]
    assert answer.choices[0].finish_reason == "stop"


def test_forced_calls_stream_their_arguments(client: openai.OpenAI) -> None:
    """openai-python joins the pieces of a call to the call that is answered whole."""
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        fields = CHATS[0] | {"tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(model="demo", **fields).choices[0]
        with client.chat.completions.stream(model="demo", **fields) as stream:
            deltas = [each for each in stream if each.type == ARGUMENTS]
            joined = stream.get_final_completion().choices[0]
        assert joined.finish_reason == whole.finish_reason == reason
        (call,) = whole.message.tool_calls or []
        (joined_call,) = joined.message.tool_calls or []
        assert call.type == "function" and joined_call.id == call.id
        assert len(deltas) > 5
        texts = [each.arguments_delta for each in deltas]
        assert "".join(texts) == call.function.arguments
        json.loads(call.function.arguments)


def test_a_call_that_the_model_would_not_make_is_forced(client: openai.OpenAI) -> None:
    for text, choice in (("told", NAMED), ("talk", ALLOWED)):
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": text}],
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
        ).choices[0]
        (call,) = answer.message.tool_calls or []
        assert call.type == "function" and call.function.name == "find_way"
        assert answer.message.content is None


def test_strict_tools_are_held_where_the_model_calls(client: openai.OpenAI) -> None:
    """The model would call with other arguments, which its schema does not allow."""
    wrong: Any = {"type": "object", "properties": {"start": {"enum": ["attic"]}}}
    wrong |= {"required": ["start"], "additionalProperties": False}
    tool = {"name": "find_way", "strict": True, "parameters": wrong}
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "one"}],
        tools=[{"type": "function", "function": tool}],
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"start": "attic"}


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    """The model would call find_way; the template still has both."""
    fields = CHATS[0] | {"tool_choice": ALLOWED_ROOMS, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(model="demo", **fields).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "list_rooms"

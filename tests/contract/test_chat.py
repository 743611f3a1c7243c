"""The fields of a chat request: what passes, what is refused, and with which words."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fminfer.contract.chat import ChatRequest, overwrite_fields, parse_chat
from fminfer.contract.endpoints import choose_endpoint
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.fields import INT64
from fminfer.contract.request import DEFAULTS
from fminfer.core.errors import ErrorCode, RequestError

HELLO = {"role": "user", "content": "Hello"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}


def parse(*messages: object, is_strict: bool = False, **fields: Any) -> ChatRequest:
    asked = {"messages": list(messages or [HELLO])} | fields
    return parse_chat(asked, max_logprobs=20, is_strict=is_strict)


def refused(*messages: object, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*messages, **fields)
    assert caught.value.code in get_args(ErrorCode)
    return caught.value


def test_defaults() -> None:
    chat = parse()
    assert chat.messages == [HELLO] and chat.tools == [] and chat.template_args == {}
    assert chat.adds_generation_prompt and not chat.continues_final_message
    assert chat.fills_context and chat.params.max_tokens == INT64 - 1
    assert chat.params.temperature == 1 and chat.params.logprobs is None
    assert not chat.params.add_special_tokens, "the template writes them"
    assert not chat.warnings


def test_max_tokens_has_two_names() -> None:
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5.0}):
        chat = parse(**fields)
        assert chat.params.max_tokens == 5 and not chat.fills_context
    assert parse(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    assert (
        "they mean the same" in refused(max_tokens=5, max_completion_tokens=6).message
    )


def test_sampling_params_are_those_of_completions() -> None:
    fields = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "n": 2, "stop": ["x"]}
    fields |= {"repetition_penalty": 1.1, "logit_bias": {"5": 1}, "stop_token_ids": [4]}
    fields |= {
        "allowed_token_ids": [5, 6],
        "bad_words": ["y"],
        "truncate_prompt_tokens": 7,
    }
    fields |= {
        "ignore_eos": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    params = parse(max_tokens=9, min_tokens=3, **fields).params
    assert (params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 3, 0.1, 7)
    assert (params.n, params.best_of, params.stop, params.min_tokens) == (
        2,
        2,
        ("x",),
        3,
    )
    assert (
        params.logit_bias == ((5, 1.0),)
        and params.ignore_eos
        and params.return_token_ids
    )
    assert (params.allowed_token_ids, params.bad_words) == ((5, 6), ("y",))
    assert (params.truncate_prompt_tokens, params.truncation_side) == (7, "left")
    assert refused(temperature=3).param == "temperature"
    assert "min_tokens" in refused(max_tokens=1, min_tokens=2).message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": None}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).params.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"logprobs": 5}, "logprobs", '"logprobs": true, "top_logprobs": 5'),
        ({"logprobs": "yes"}, "logprobs", "true, false or null"),
        ({"top_logprobs": 2}, "top_logprobs", '"logprobs": true'),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"prompt": "x"}, "prompt", "messages"),
        ({"echo": True}, "echo", "/v1/completions"),
        ({"suffix": "x"}, "suffix", "remove suffix"),
        ({"best_of": 2}, "best_of", "/v1/completions"),
        ({"stream": True}, "stream", "remove stream"),
        ({"functions": [{}]}, "functions", "tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities", "Answers are text"),
        ({"audio": {"voice": "x"}}, "audio", "Answers are text"),
        ({"tool_choice": "any"}, "tool_choice", 'one of "auto", "none", "required"'),
        (
            {"tools": [TOOL], "parallel_tool_calls": 0},
            "parallel_tool_calls",
            "true, false or null",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--chat-template FILE"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "sets messages",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
        ({"documents": [{}]}, "documents", "chat_template_kwargs"),
        ({"add_special_tokens": True}, "add_special_tokens", "template"),
        ({"reasoning_effort": 3}, "reasoning_effort", "a string"),
        ({"tools": {}}, "tools", "a list"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            'is "web_search"; only tools of type "function"',
        ),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "not empty",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "both true",
        ),
    ],
)
def test_wishes_that_an_answer_would_ignore(
    fields: dict[str, Any], param: str, hint: str
) -> None:
    error = refused(**fields)
    assert error.param == param and hint in error.message, error.message
    assert error.type == "invalid_request_error"


def test_fields_that_change_no_answer_pass() -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "store": True,
        "metadata": {},
        "service_tier": "auto",
    }
    fields |= {
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "model": "m",
        "echo": False,
    }
    fields |= {
        "response_format": {"type": "text"},
        "stream": False,
        "modalities": ["text"],
    }
    fields |= {
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "functions": None,
    }
    assert not parse(**fields).warnings
    assert not parse(parallel_tool_calls=False).warnings, (
        "without tools it asks for nothing"
    )


def test_unknown_names_are_warned_of() -> None:
    (warning,) = parse(max_completion_token=5).warnings
    assert "did you mean max_completion_tokens" in str(warning)
    assert refused(is_strict=True, verbosity="low").param == "verbosity"
    assert (
        refused(is_strict=True, max_completion_token=5).param == "max_completion_token"
    )


def test_tool_choice_none_keeps_tools_from_the_template() -> None:
    assert parse(tools=[TOOL]).tools == [TOOL]
    assert parse(tools=[TOOL], tool_choice="none").tools == []
    assert (
        parse(tools=[TOOL], tool_choice="none", parallel_tool_calls=False).tools == []
    )


def test_a_message_is_begun_or_continued() -> None:
    chat = parse(
        HELLO, {"role": "assistant", "content": "Hi"}, continue_final_message=True
    )
    assert chat.continues_final_message and not chat.adds_generation_prompt
    assert not parse(add_generation_prompt=False).adds_generation_prompt


def test_template_args() -> None:
    chat = parse(
        chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"
    )
    assert chat.template_args == {"enable_thinking": False, "reasoning_effort": "low"}
    assert parse(reasoning_effort="").template_args == {"reasoning_effort": ""}, (
        "it is no null"
    )
    assert parse(reasoning_effort=None).template_args == {}


def test_messages_stay_as_they_were_sent_without_nulls() -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": [1]}'},
    }
    plain = {"id": "d", "function": {"name": "g", "arguments": {}}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    # whose rows have a column for images
    table = [part | {"image": None} for part in parts]
    found = parse(
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "user", "content": table},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, plain],
            "refusal": None,
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "tool_calls": [], "audio": None},
    ).messages
    assert found[0] == {"role": "developer", "content": "d", "name": "n"}
    assert found[1] == {"role": "user", "content": parts}
    assert "content" not in found[2] and "refusal" not in found[2]
    assert found[2]["tool_calls"][0] == call
    assert found[2]["tool_calls"][1]["type"] == "function"
    assert found[3] == {"role": "tool", "content": "1", "tool_call_id": "c"}
    assert found[4] == {"role": "assistant", "content": ""}
    assert call["function"]["arguments"] == '{"a": [1]}', (
        "the caller's own stays as it was"
    )


def test_the_past_is_taken_as_it_was() -> None:
    """An empty answer, a refusal or an older form of a call ended in 400 for all later turns."""
    call = {"name": "f", "arguments": "{}"}
    refusal = {"type": "refusal", "refusal": "no"}
    for past, content in (
        *(({"content": empty}, "") for empty in (None, [], "")),
        ({}, ""),
        ({"content": [refusal]}, [{"type": "text", "text": "no"}]),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [], "audio": {"id": "a"}, "refusal": False}, ""),
    ):
        (found,) = parse({"role": "assistant"} | past).messages
        assert found["content"] == content
    for role in ("tool", "function"):
        for empty in ({}, {"content": None}, {"content": []}):
            (found,) = parse({"role": role, "tool_call_id": "c"} | empty).messages
            assert (found["role"], found["content"]) == ("tool", "")
    found = parse({"role": "assistant", "content": "a", "refusal": "b"}).messages[0]
    assert (found["content"], found["refusal"]) == ("a", "b"), (
        "the template may read both"
    )
    asked, answer = parse(
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
    ).messages
    (written,) = asked["tool_calls"]
    assert (
        written["function"] == call
        and "function_call" not in asked
        and "content" not in asked
    )
    assert answer == {
        **{"role": "tool", "name": "f", "content": "1", "tool_call_id": written["id"]}
    }


CALLS = "messages[0].tool_calls"


@pytest.mark.parametrize(
    ("message", "param", "hint"),
    [
        ("Hello", "messages[0]", '{"role": "user"'),
        ({"content": "x"}, "messages[0].role", "absent"),
        ({"role": "bot", "content": "x"}, "messages[0].role", "developer"),
        ({"role": "user"}, "messages[0].content", "absent"),
        ({"role": "user", "content": None}, "messages[0].content", "null"),
        ({"role": "system"}, "messages[0].content", "absent"),
        ({"role": "user", "content": 5}, "messages[0].content", "a string or a list"),
        ({"role": "user", "content": []}, "messages[0].content", "empty list"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0]",
            "only text is read",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "messages[0].content[0]",
            "only text is read",
        ),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]", "an object"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content[0].text",
            "a string",
        ),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
            "messages[0].content[0]",
            "only text is read",
        ),
        (
            {"role": "user", "content": "", "audio": {"id": "a"}},
            "messages[0].audio",
            "content",
        ),
        (
            {"role": "user", "content": "", "function_call": {}},
            "messages[0].function_call",
            "tool_calls",
        ),
        (
            {"role": "assistant", "function_call": {}},
            "messages[0].function_call",
            "name",
        ),
        (
            {"role": "assistant", "function_call": "f"},
            "messages[0].function_call",
            "function",
        ),
        ({"role": "assistant", "tool_calls": 5}, CALLS, "a list"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, f"{CALLS}[0]", "function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
            f"{CALLS}[0].function.name",
            "a string",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": [1]}}],
            },
            f"{CALLS}[0].function.arguments",
            "a string",
        ),
    ],
)
def test_wrong_messages_are_named_by_their_place(
    message: object, param: str, hint: str
) -> None:
    error = refused(message)
    assert error.param == param and hint in error.message, error.message


@pytest.mark.parametrize("messages", [[], None, "Hello", {}])
def test_messages_that_are_none(messages: object) -> None:
    assert refused(messages=messages).param == "messages"


def test_which_endpoint_a_request_is_for() -> None:
    for fields in ({"messages": []}, {"messages": [], "prompt": None}):
        assert choose_endpoint(fields) == "chat"
    for fields in (
        {"prompt": "x"},
        {"messages": [], "prompt": "x"},
        {"messages": None},
    ):
        assert choose_endpoint(fields) == "completions"
    asked = {
        "input": "responses",
        "query": "rerank",
        "text_1": "score",
        "queries": "score",
    }
    for name, endpoint in asked.items():
        assert choose_endpoint({name: "x", "documents": ["y"]}) == endpoint


def test_shapes_of_chat_lines() -> None:
    chat = b'{"messages": [{"role": "user", "content": "Hello"}]}'
    head = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": '
    )
    for line, shape, says in (
        (chat, "bare", None),
        (chat[:-1] + b', "custom_id": "a"}', "bare", None),
        (b'{"request": ' + chat + b', "messages": 1}', "wrapped", None),
        (head + chat + b"}", "batch", "chat"),
        (head.replace(b"/chat", b"") + chat + b"}", "batch", "completions"),
    ):
        envelope = parse_envelope(Line(0, 1, line))
        assert (envelope.shape, envelope.endpoint, envelope.error) == (
            shape,
            says,
            None,
        )
        assert envelope.fields["messages"] == [HELLO]


def test_arguments_of_the_command_line_take_the_place_of_chats_own() -> None:
    fields = {
        "messages": [HELLO],
        "max_completion_tokens": 5,
        "logprobs": False,
        "temperature": 1,
    }
    found = overwrite_fields(fields, {"max_tokens": 3, "temperature": 0, "logprobs": 2})
    params = parse_chat(found, max_logprobs=5).params
    assert (params.max_tokens, params.temperature, params.logprobs) == (3, 0, 2)
    assert overwrite_fields(fields, {}) == fields


def test_defaults_of_a_model() -> None:
    from dataclasses import replace

    defaults = replace(DEFAULTS, temperature=0.6, top_p=0.9, top_k=20)
    asked = {"messages": [HELLO], "top_p": None, "top_k": 5}
    chat = parse_chat(asked, max_logprobs=5, defaults=defaults, max_new_tokens=64)
    params = chat.params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 5)
    assert params.max_tokens == 64 and chat.fills_context


@pytest.mark.parametrize(
    "key", ["images", "image_url", "video", "attachments", "file_ids"]
)
def test_media_of_messages_are_refused(key: str) -> None:
    """Ollama's `images` of a message went to the template, which dropped them."""
    for role in ("user", "assistant"):
        error = refused(HELLO, {"role": role, "content": "What is this?", key: ["x"]})
        assert (error.code, error.param) == (
            "unsupported_parameter",
            f"messages[1].{key}",
        )
    part = {"type": "text", "text": "What is this?", key: "x"}
    error = refused({"role": "user", "content": [part]})
    assert error.param == f"messages[0].content[0].{key}"
    for nothing in (None, [], ""):
        assert parse(HELLO | {key: nothing}).messages[0]["content"] == "Hello"


@pytest.mark.parametrize("key", ["prefix", "partial"])
def test_a_beginning_is_continued_by_our_own_field(key: str) -> None:
    """Mistral's, DeepSeek's and Kimi's `prefix` and `partial` got a new answer."""
    begun = {"role": "assistant", "content": "It is", key: True}
    error = refused(HELLO, begun)
    assert error.param == f"messages[1].{key}"
    for told in ('"continue_final_message": true', '"add_generation_prompt": false'):
        assert told in error.message
    parse(HELLO, begun, continue_final_message=True, add_generation_prompt=False)
    parse(HELLO, begun | {key: False})
    parse(HELLO, begun, HELLO)  # the past is taken as it was


def test_an_object_of_tool_choice_that_is_unknown() -> None:
    """It was said to force a call."""
    for kind in ("auto", "none", "any", "custom", None):
        error = refused(tool_choice={"type": kind}, tools=[TOOL])
        assert (
            error.param == "tool_choice"
            and '"auto", "none", "required"' in error.message
        )


def test_other_services_requests_are_told_what_their_fields_are_called() -> None:
    for fields in ({"contents": [{"parts": []}]}, {"message": "x", "chat_history": []}):
        with pytest.raises(
            RequestError, match=f"{next(iter(fields))} is no field.*messages"
        ):
            parse_chat(fields, max_logprobs=5)

"""What servers call fields: each is sent by its name, or its line is an error."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from fminfer.client.dialects import (
    ALL,
    DIALECTS,
    KNOWN_FIELDS,
    RENAMED,
    TEXT_ONLY,
    Dialect,
)
from fminfer.client.remote_intake import RemoteIntake
from fminfer.client.remote_options import DialectName
from fminfer.client.remote_request import RemoteRequest
from fminfer.contract.endpoints import DRAWING_ENDPOINTS, Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.core.config import Constraint, EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.intake import IncomingRequest

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look"}}
TEXTS: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": "Hello"},
    "chat": {"messages": MESSAGES},
    "embeddings": {"input": "Hello"},
    "score": {"text_1": "one", "text_2": "two"},
    "rerank": {"query": "one", "documents": ["two", "three"]},
    "classify": {"input": "Hello"},
}
# A wish for each field, and what it is beside.
WISHES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "max_tokens": 7,
    "stop": ["a"],
    "seed": 3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "n": 2,
    "best_of": 3,
    "logprobs": 2,
    "logit_bias": {"5": 1.0},
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "ignore_eos": True,
    "min_tokens": 1,
    "stop_token_ids": [4],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 9,
    "truncation_side": "right",
    "allowed_token_ids": [1, 2],
    "bad_words": ["b"],
    "return_token_ids": True,
    "echo": True,
    "add_special_tokens": False,
    "decoder_prompt": "so",
    "top_logprobs": 2,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "add_generation_prompt": False,
    "thinking_token_budget": 5,
    "include_reasoning": False,
    "encoding_format": "base64",
    "dimensions": 8,
    "normalize": True,
    "use_activation": False,
    "queries": "one",
}
BESIDE: dict[str, dict[str, Any]] = {
    "truncation_side": {"truncate_prompt_tokens": 9},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "continue_final_message": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "So"}]
    },
    "queries": {"text_1": None, "text_2": None, "documents": "two"},
}
CASES = [
    (dialect, endpoint, name)
    for dialect in DIALECTS.values()
    for endpoint, fields in KNOWN_FIELDS.items()
    if dialect.has_endpoint(endpoint)
    for name in fields
    if name != "prompt_name" and (name, endpoint) != ("documents", "score")
]


def prepare(
    name: DialectName,
    fields: dict[str, Any],
    endpoint: Endpoint | None = None,
    config: EngineConfig | None = None,
    *,
    is_openai: bool = True,
) -> RemoteRequest:
    """Return a line's request; raise its error."""
    intake = RemoteIntake(config or EngineConfig(), DIALECTS[name])
    request = intake.parse(fields, endpoint=endpoint)
    (prepared,) = intake.prepare_all([IncomingRequest(request, 0, is_openai)])
    if isinstance(prepared, Exception):
        raise prepared
    assert isinstance(prepared, RemoteRequest)
    return prepared


def send(
    name: DialectName, fields: dict[str, Any], endpoint: Endpoint | None = None
) -> dict[str, Any]:
    """Return the fields that are sent."""
    return dict(orjson.loads(prepare(name, fields, endpoint).body))


@pytest.mark.parametrize(
    ("dialect", "endpoint", "name"),
    CASES,
    ids=lambda each: each.name if isinstance(each, Dialect) else each,
)
def test_each_field_is_sent_by_its_name_or_an_error(
    dialect: Dialect, endpoint: Endpoint, name: str
) -> None:
    wish = WISHES.get(name, TEXTS[endpoint].get(name))
    if (endpoint, name) == ("chat", "logprobs"):
        wish = True
    if name == "truncation_side" and endpoint not in DRAWING_ENDPOINTS:
        wish = "left"
    fields = TEXTS[endpoint] | BESIDE.get(name, {}) | {name: wish}
    theirs = dialect.find_name(endpoint, name)
    if theirs is None:
        with pytest.raises(RequestError) as error:
            send(dialect.name, fields, endpoint)
        assert error.value.code == "unsupported_parameter"
        if name not in BESIDE:
            assert error.value.param == name
            assert name in error.value.message and dialect.title in error.value.message
        return
    sent = send(dialect.name, fields, endpoint)
    assert sent[theirs] == wish
    assert name == theirs or name not in sent


def test_the_table_names_fields_of_the_contract_that_are_acted_on() -> None:
    for endpoint, fields in KNOWN_FIELDS.items():
        for name, names in fields.items():
            assert FIELDS[endpoint][name].fate == "acted on", (endpoint, name)
            assert {*names} <= {*ALL} and "fminfer" in names
    assert all(
        name in KNOWN_FIELDS[e] for (_, e), row in RENAMED.items() for name in row
    )
    assert {dialect for dialect, _ in TEXT_ONLY} <= {*ALL}


@pytest.mark.parametrize("name", ALL)
def test_all_neutral_values_pass(name: DialectName) -> None:
    """A neutral value of a field without a name was an error: `logprobs: false` at Ollama."""
    neutral = {
        "top_k": -1,
        "min_p": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logprobs": False,
        "n": 1,
        "stop": "",
        "logit_bias": {},
        "bad_words": [],
        "ignore_eos": False,
        "min_tokens": 0,
        "seed": None,
        "user": "somebody",
        "unknown": 1,
    }
    bare = {"prompt": "Hello", "max_tokens": 4}
    assert send(name, bare | neutral | {"echo": 0, "best_of": 1}) == send(name, bare)
    chat = {"messages": MESSAGES}
    further = {
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "parallel_tool_calls": True,
        "thinking_token_budget": -1,
        "include_reasoning": True,
        "chat_template_kwargs": {},
        "response_format": {"type": "text"},
    }
    assert send(name, chat | neutral | further) == send(name, chat)
    sent = send(name, {"input": "a", "encoding_format": "float"})
    assert sent == {"input": "a"}


def test_bodies_of_each_dialect() -> None:
    line = {"prompt": "Hello", "logprobs": True, "stop": "\n", "top_k": 5}
    whole = {"temperature": 1, "top_p": 1}
    common = {"prompt": "Hello", "max_tokens": 16, "logprobs": 1, "stop": ["\n"]}
    assert send("fminfer", line) == whole | common | {"top_k": 5}
    plain = whole | {"min_p": 0, "repetition_penalty": 1, "top_k": 5}
    assert send("vllm", line) == plain | common
    assert send("sglang", line) == plain | common
    assert send("llama-server", line) == whole | common | {
        "top_k": 5,
        "min_p": 0,
        "repeat_penalty": 1,
        "repeat_last_n": 16_384,
    }
    del line["logprobs"], line["top_k"], common["logprobs"]
    assert send("ollama", line) == whole | common
    assert send("openai", line) == common
    assert send("sglang", line)["top_k"] == -1


def test_chats_without_max_tokens_get_none_and_completions_ours() -> None:
    for name in ALL:
        assert "max_tokens" in send(name, {"prompt": "Hello"})
        assert "tokens" not in " ".join(send(name, {"messages": MESSAGES}))
    chat = {"messages": MESSAGES, "max_completion_tokens": 5}
    assert send("openai", chat) == {"messages": MESSAGES, "max_completion_tokens": 5}
    assert send("vllm", chat)["max_tokens"] == 5


def test_greedy_by_top_p_is_temperature_0() -> None:
    sent = send("vllm", {"prompt": "a", "top_p": 0})
    assert (sent["temperature"], sent["top_p"]) == (0, 1)


def test_values_that_a_server_reads_otherwise() -> None:
    """llama-server drew a token for max_tokens 0, and told no logprobs for logprobs 0."""
    with pytest.raises(RequestError, match="max_tokens is 0"):
        send("llama-server", {"prompt": "a", "max_tokens": 0})
    assert send("vllm", {"prompt": "a", "max_tokens": 0})["max_tokens"] == 0
    assert send("llama-server", {"prompt": "a", "logprobs": 0})["logprobs"] == 1
    assert send("vllm", {"prompt": "a", "logprobs": 0})["logprobs"] == 0
    chat = {"messages": MESSAGES, "logprobs": True}
    assert send("llama-server", chat)["top_logprobs"] == 1
    named = {"type": "function", "function": {"name": "look"}}
    chat = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": named}
    assert send("vllm", chat)["tool_choice"] == named
    flat = {"type": "function", "name": "look"}
    assert send("vllm", chat | {"tool_choice": flat})["tool_choice"] == named
    with pytest.raises(RequestError, match="tool_choice"):
        send("llama-server", chat)
    with pytest.raises(RequestError, match="prompt is"):
        send("ollama", {"prompt": ["a", "b"]})


def test_a_message_that_goes_on_is_said_to_vllm_in_both_fields() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "So"}]
    chat = {"messages": messages, "continue_final_message": True}
    assert send("vllm", chat)["add_generation_prompt"] is False
    assert "add_generation_prompt" not in send("sglang", chat)


def test_constraints() -> None:
    choice = {"prompt": "a", "guided_choice": ["a.b", 'é"\n😀']}
    assert send("fminfer", choice)["guided_choice"] == choice["guided_choice"]
    outputs = send("vllm", choice)["structured_outputs"]
    assert outputs == {"choice": choice["guided_choice"]}
    pattern = send("sglang", choice)["regex"]
    assert all(re.fullmatch(pattern, text) for text in choice["guided_choice"])
    assert not re.fullmatch(pattern, "acb")
    assert send("llama-server", choice)["grammar"] == (
        r'root ::= "a\U0000002Eb" | "é\U00000022\U0000000A\U0001F600"'
    )
    schema = {"type": "object"}
    chat = {"messages": MESSAGES, "structured_outputs": {"json": schema}}
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    others: tuple[DialectName, ...] = ("ollama", "openai")
    for name in ("sglang", *others):
        assert send(name, chat)["response_format"] == named
    assert send("llama-server", chat)["json_schema"] == schema
    completion = {"prompt": "a", "guided_json": schema}
    assert send("sglang", completion)["json_schema"] == '{"type":"object"}'
    for name in others:
        for line in (completion, choice, {"messages": MESSAGES, "guided_regex": "a"}):
            with pytest.raises(RequestError, match="has no name"):
                send(name, line)


def test_a_response_format_is_sent_as_it_is() -> None:
    """`strict` was left out, without which OpenAI holds an answer to nothing."""
    named = {"name": "a", "schema": {"type": "object"}, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    for name in ALL:
        chat = {"messages": MESSAGES, "response_format": form}
        assert send(name, chat)["response_format"] == form
    body = {"input": "Hello", "text": {"format": {"type": "json_schema", **named}}}
    assert send("openai", body, "responses")["response_format"] == form


def test_what_no_other_server_has() -> None:
    labels = {"choice": ["a", "b"], "probabilities": True}
    line = {"prompt": "a", "structured_outputs": labels}
    sent = send("fminfer", line)
    assert sent == line | {"temperature": 0, "top_p": 1}  # and no max_tokens
    spaced = {"json": {"type": "object"}, "whitespace_pattern": " ?"}
    for wish in (labels, spaced):
        for name in ALL[1:]:
            with pytest.raises(RequestError, match="structured_outputs"):
                send(name, line | {"structured_outputs": wish})
    none = Constraint("json", "{}", "none")
    written = DIALECTS["vllm"].write_constraint(none, "chat")
    assert written == {
        "structured_outputs": {"json": {}, "disable_any_whitespace": True}
    }


def test_an_endpoint_that_a_server_lacks() -> None:
    with pytest.raises(RequestError, match="OpenAI's API has no /v1/rerank"):
        send("openai", TEXTS["rerank"])

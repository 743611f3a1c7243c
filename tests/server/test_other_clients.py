"""LiteLLM and instructor: clients that stand on openai-python, or speak as it does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import instructor
import openai
import pydantic
import pytest
from instructor.core import InstructorRetryException

from tests.server.answers import answer_file, rounded
from tests.server.reciting import save_reciting
from tests.server.running import Running, until
from tests.server.server_needs import needs_server
from tests.server.test_chat_over_http import CHATS
from tests.server.test_completions import QUESTION, REQUESTS

pytestmark = needs_server(engine={"max_rows": 8}, api_keys=("k1",))

CHAT = CHATS[2]
COMPLETION = REQUESTS[2]  # both with a seed and several choices


@pytest.fixture
def to_server(server: Running) -> dict[str, Any]:
    """Arguments of LiteLLM's functions that name the server."""
    return {
        "api_base": f"{server.url}/v1",
        "api_key": "k1",
        "num_retries": 0,
        "max_retries": 0,
    }


@pytest.fixture(scope="module")
def file_answers() -> list[dict[str, Any]]:
    lines = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
    return answer_file(lines, dtype="float32")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chat(
    litellm: Any,
    to_server: dict[str, Any],
    file_answers: list[dict[str, Any]],
    provider: str,
) -> None:
    found = litellm.completion(f"{provider}/demo", **CHAT, **to_server).model_dump()
    expected = file_answers[0]
    for choice, other in zip(found["choices"], expected["choices"], strict=True):
        assert choice["message"]["content"] == other["message"]["content"]
        assert choice["finish_reason"] == other["finish_reason"]
        logprobs = rounded(choice["logprobs"]["content"])
        assert logprobs == rounded(other["logprobs"]["content"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == expected["usage"][name]


def test_litellm_chat_streamed_with_asyncio(
    litellm: Any, to_server: dict[str, Any], file_answers: list[dict[str, Any]]
) -> None:
    async def ask() -> list[Any]:
        wish = {"stream": True, "stream_options": {"include_usage": True}}
        stream: Any = await litellm.acompletion(
            "openai/demo", **CHAT, **wish, **to_server
        )
        return [chunk async for chunk in stream]

    chunks = asyncio.run(ask())
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [
        choice["message"]["content"] for choice in file_answers[0]["choices"]
    ]
    expected = file_answers[0]["usage"]["completion_tokens"]
    assert chunks[-1].usage.completion_tokens == expected


@pytest.mark.parametrize("provider", ["text-completion-openai", "openai"])
def test_litellm_completions(
    litellm: Any,
    to_server: dict[str, Any],
    file_answers: list[dict[str, Any]],
    provider: str,
) -> None:
    expected = [choice["text"] for choice in file_answers[1]["choices"]]
    model = f"{provider}/demo"
    whole: Any = litellm.text_completion(model=model, **COMPLETION, **to_server)
    assert [choice.text for choice in whole.choices] == expected
    texts = [""] * len(expected)
    stream: Any = litellm.text_completion(
        model=model, stream=True, **COMPLETION, **to_server
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text or ""
    assert texts == expected


def test_litellm_reads_past_signs_of_life(
    litellm: Any,
    server: Running,
    to_server: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = litellm.completion("openai/demo", **CHAT, **to_server)
    monkeypatch.setattr("fminfer.server.replies.KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(server.engine, "step", lambda: [])
    timer = threading.Timer(0.9, monkeypatch.undo)
    timer.start()
    chunks = list(litellm.completion("openai/demo", **CHAT, **to_server, stream=True))
    timer.join()
    built = litellm.stream_chunk_builder(chunks)
    for found, expected in zip(built.choices, whole.choices, strict=True):
        assert found.message.content == expected.message.content
        assert found.message.role == "assistant"
        assert found.finish_reason == expected.finish_reason


def test_litellms_errors(
    litellm: Any, server: Running, to_server: dict[str, Any]
) -> None:
    """Its classes are chosen by status, and by words that it looks for in messages."""

    def ask(content: str = "a", **fields: Any) -> None:
        talk = [{"role": "user", "content": content}]
        litellm.completion("openai/demo", messages=talk, **to_server | fields)

    with pytest.raises(litellm.ContextWindowExceededError, match="1024 tokens"):
        ask("a " * 3000)
    with pytest.raises(litellm.AuthenticationError):
        ask(api_key="k2")
    with pytest.raises(litellm.BadRequestError, match="n is 0"):
        ask(n=0)


def test_litellm_leaves_a_stream(
    litellm: Any, server: Running, to_server: dict[str, Any]
) -> None:
    fields = {
        "prompt": QUESTION,
        "max_tokens": 900,
        "logit_bias": {"0": -100},
        "stream": True,
    }
    stream: Any = litellm.text_completion(model="openai/demo", **fields, **to_server)
    next(iter(stream))
    assert server.engine.state.num_running == 1
    stream.completion_stream.close()
    until(server.is_idle, "all is free")


class Person(pydantic.BaseModel):
    """What a text tells of somebody."""

    name: str
    age: int = pydantic.Field(ge=0, le=150)
    rooms: list[str] = []


ANN = {"name": "Ann", "age": 34, "rooms": ["den", "attic"]}
TEXTS = {
    "ann": 'Here it is:\n```json\n{"name": "Ann", "age": 34, "rooms": ["den", "attic"]}\n```\n',
    "wrong": '```json\n{"name": "Bob", "age": "many"}\n```',
    "fixed": 'Sorry.\n```json\n{"name": "Bob the 2nd", "age": 151}\n```',
    "right": 'Then so:\n```json\n{"name": "Bob III", "age": 15}\n```',
}
TEMPLATE = """
{%- set told = messages[-1].content -%}
{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{%- endfor -%}
{%- if "less than or equal to 150" in told -%}<|right|>
{%- elif "valid integer" in told -%}<|fixed|>
{%- elif "json codeblock" not in told -%}{{ raise_exception("instructor asks for a codeblock") }}
{%- elif "Ann" in told -%}<|ann|>
{%- else -%}<|wrong|>
{%- endif -%}
"""


RECITES = needs_server(model="reciting_model")


@pytest.fixture(scope="module")
def reciting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reciting(tmp_path_factory.mktemp("reciting"), TEXTS, TEMPLATE)


@pytest.fixture
def reader(client: openai.OpenAI) -> Any:
    return instructor.from_openai(client, mode=instructor.Mode.MD_JSON)


def asked(content: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "response_model": Person,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
    }


@RECITES
def test_instructor_reads_json_in_markdown(reader: Any) -> None:
    found, raw = reader.create_with_completion(**asked("Ann is 34."))
    assert found.model_dump() == ANN
    assert (
        raw.choices[0].message.content == TEXTS["ann"] and raw.usage.total_tokens > 100
    )


@RECITES
def test_instructor_asks_again_until_it_is_valid(reader: Any) -> None:
    found = reader.create(**asked("Bob is old."), max_retries=2)
    assert found.model_dump() == {"name": "Bob III", "age": 15, "rooms": []}
    with pytest.raises(InstructorRetryException, match="less than or equal"):
        reader.create(**asked("Bob is old."), max_retries=1)


@RECITES
def test_instructor_reads_parts_of_a_stream(reader: Any) -> None:
    parts = list(reader.create_partial(**asked("Ann is 34.")))
    assert len(parts) > 3 and parts[0].age is None
    assert parts[-1].model_dump() == ANN


@RECITES
def test_instructor_with_asyncio(server: Running) -> None:
    async def ask() -> Person:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none"
        ) as client:
            reader: Any = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
            found: Person = await reader.create(**asked("Ann is 34."))
            return found

    assert asyncio.run(ask()).age == 34

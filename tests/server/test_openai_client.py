"""openai-python, with and without asyncio: its answers are those of a file."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.answers import answer_file, assert_equal, join, join_chat
from tests.server.running import Running
from tests.server.test_chat_over_http import CHATS
from tests.server.test_completions import REQUESTS

URLS = {"/v1/completions": REQUESTS, "/v1/chat/completions": CHATS}
CASES = [
    (url, place) for url, requests in URLS.items() for place in range(len(requests))
]
SHORT: Any = {"temperature": 0, "max_tokens": 6}
EXTENSIONS = (  # what the client has no argument for
    "ignore_eos",
    "min_tokens",
    "top_k",
    "return_token_ids",
    "continue_final_message",
    "add_generation_prompt",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
)


@pytest.fixture(scope="module")
def file_answers() -> dict[tuple[str, int], dict[str, Any]]:
    """What the requests have as answers in a Batch file."""
    bodies = answer_file(
        [(url, URLS[url][place]) for url, place in CASES], dtype="float32"
    )
    return dict(zip(CASES, bodies, strict=True))


def arguments(case: tuple[str, int]) -> dict[str, Any]:
    """Return a request as arguments of the client's method."""
    url, place = case
    body = URLS[url][place]
    kept = {name: value for name, value in body.items() if name not in EXTENSIONS}
    extra = {name: value for name, value in body.items() if name in EXTENSIONS}
    return {"model": "demo", "extra_body": extra, **kept}


def method(client: Any, case: tuple[str, int]) -> Any:
    is_chat = case[0].endswith("chat/completions")
    return client.chat.completions.create if is_chat else client.completions.create


def joined(case: tuple[str, int], chunks: list[Any]) -> dict[str, Any]:
    """Join a stream's chunks; the last one has the usage."""
    *chunks, last = [chunk.model_dump() for chunk in chunks]
    assert last["choices"] == []
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    join_all = join_chat if case[0].endswith("chat/completions") else join
    return {"choices": join_all(parts), "usage": last["usage"]}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare a typed answer; its classes fill in fields that were not sent."""
    filled = ("annotations", "audio", "function_call", "tool_calls")
    for choice in found["choices"]:
        for name in filled:
            assert choice.get("message", {}).pop(name, None) is None
    assert_equal(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_a_file(
    client: openai.OpenAI,
    file_answers: dict[tuple[str, int], dict[str, Any]],
    case: tuple[str, int],
) -> None:
    found = method(client, case)(**arguments(case)).model_dump()
    assert found["model"] == "demo"
    assert_same(found, file_answers[case])


@pytest.mark.parametrize("case", CASES)
def test_streams_are_those_of_a_file(
    client: openai.OpenAI,
    file_answers: dict[tuple[str, int], dict[str, Any]],
    case: tuple[str, int],
) -> None:
    wish = {"stream": True, "stream_options": {"include_usage": True}}
    with method(client, case)(**arguments(case), **wish) as stream:
        assert_same(joined(case, list(stream)), file_answers[case])


def test_answers_are_of_the_clients_types(server: Running) -> None:
    """The client checks types only if it is told to; otherwise a wrong one surprises
    the program.

    OpenAI sends two nulls that its types leave out: an echo's first logprob, and the
    reason in all but the last chunk of a completion.
    """
    url = f"{server.url}/v1"
    with openai.OpenAI(
        base_url=url, api_key="none", _strict_response_validation=True
    ) as client:
        for case in CASES:
            if not URLS[case[0]][case[1]].get("echo"):
                assert method(client, case)(**arguments(case)).choices
            if case[0].endswith("chat/completions"):
                wish = {"stream": True, "stream_options": {"include_usage": True}}
                assert list(method(client, case)(**arguments(case), **wish))[-1].usage
        assert client.models.retrieve(client.models.list().data[0].id).object == "model"


@pytest.mark.parametrize(
    "kept",
    [
        {"refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"tool_calls": []},
        {"tool_calls": None, "name": "guide", "reasoning_content": "north?"},
        {
            "content": [
                {"type": "text", "text": "east", "cache_control": {"type": "ephemeral"}}
            ]
        },
    ],
)
def test_what_programs_keep_in_a_message(
    client: openai.OpenAI, kept: dict[str, Any]
) -> None:
    """They send answers back with fields of the client's classes, or of other servers."""
    user = {"role": "user", "content": "den?"}
    said = {"role": "assistant", "content": "east"}

    def ask(said: Any) -> str | None:
        talk: Any = [user, said, user]
        answer = client.chat.completions.create(model="demo", messages=talk, **SHORT)
        return answer.choices[0].message.content

    assert ask(said | kept) == ask(said)


def test_many_at_once_with_asyncio(
    server: Running, file_answers: dict[tuple[str, int], dict[str, Any]]
) -> None:
    async def ask_all() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none"
        ) as client:

            async def ask(
                case: tuple[str, int],
            ) -> tuple[dict[str, Any], dict[str, Any]]:
                whole = await method(client, case)(**arguments(case))
                wish = {"stream": True, "stream_options": {"include_usage": True}}
                stream = await method(client, case)(**arguments(case), **wish)
                return whole.model_dump(), joined(
                    case, [chunk async for chunk in stream]
                )

            return await asyncio.gather(*map(ask, CASES))

    for case, answers in zip(CASES, asyncio.run(ask_all()), strict=True):
        for found in answers:
            assert_same(found, file_answers[case])


def test_the_stream_helper_for_chat(
    client: openai.OpenAI, file_answers: dict[tuple[str, int], dict[str, Any]]
) -> None:
    case = ("/v1/chat/completions", 2)
    with client.chat.completions.stream(**arguments(case)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().model_dump()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(
        kinds
    )
    for choice, expected in zip(
        final["choices"], file_answers[case]["choices"], strict=True
    ):
        assert choice["message"]["content"] == expected["message"]["content"]
        assert len(choice["logprobs"]["content"]) == len(
            expected["logprobs"]["content"]
        )
        assert choice["finish_reason"] == expected["finish_reason"]


def test_models(client: openai.OpenAI, server: Running) -> None:
    (listed,) = client.models.list()
    found = client.models.retrieve(listed.id)
    assert found == listed and found.id == server.engine.model_name
    assert found.model_extra is not None and found.model_extra["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt/5")
    assert caught.value.code == "model_not_found"
    assert (
        f"there is no model gpt/5; this server has {server.engine.model_name}"
        in str(caught.value)
    )


def test_a_requests_id_comes_back(client: openai.OpenAI) -> None:
    short = {"model": "demo", "prompt": "a", "max_tokens": 1}
    own = {"x-request-id": "mine-1"}
    raw = client.completions.with_raw_response.create(**short, extra_headers=own)
    assert (
        raw.headers["x-request-id"] == "mine-1" and raw.parse()._request_id == "mine-1"
    )
    found = {client.completions.create(**short)._request_id for _ in range(2)}
    assert len(found) == 2 and None not in found

"""openai-python, with and without asyncio: completions, chat, errors, clients that leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import fminfer
from fminfer.server.http_errors import HttpError
from tests.server.answers import answer_file, assert_equal, join, join_chat
from tests.server.running import Running, running, until
from tests.server.test_chat_over_http import CHATS
from tests.server.test_completions import QUESTION, REQUESTS

URLS = {"/v1/completions": REQUESTS, "/v1/chat/completions": CHATS}
CASES = [(url, place) for url, requests in URLS.items() for place in range(len(requests))]
EXTENSIONS = (  # what the client has no argument for
    *("ignore_eos", "min_tokens", "top_k", "return_token_ids"),
    *("continue_final_message", "add_generation_prompt"),
)
LONG = {"prompt": QUESTION, "max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(engine: fminfer.Engine) -> Iterator[Running]:
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def strict_engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", max_rows=2, check_model=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def file_answers() -> dict[tuple[str, int], dict[str, Any]]:
    """What the requests have as answers in a Batch file."""
    bodies = answer_file([(url, URLS[url][place]) for url, place in CASES], dtype="float32")
    return dict(zip(CASES, bodies, strict=True))


def connect(server: Running, **options: Any) -> openai.OpenAI:
    options = {"api_key": "none", "max_retries": 0} | options
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


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


def test_many_at_once_with_asyncio(
    server: Running, file_answers: dict[tuple[str, int], dict[str, Any]]
) -> None:
    async def ask_all() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask(case: tuple[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
                whole = await method(client, case)(**arguments(case))
                wish = {"stream": True, "stream_options": {"include_usage": True}}
                stream = await method(client, case)(**arguments(case), **wish)
                return whole.model_dump(), joined(case, [chunk async for chunk in stream])

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
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    for choice, expected in zip(final["choices"], file_answers[case]["choices"], strict=True):
        assert choice["message"]["content"] == expected["message"]["content"]
        assert len(choice["logprobs"]["content"]) == len(expected["logprobs"]["content"])
        assert choice["finish_reason"] == expected["finish_reason"]


def test_models(client: openai.OpenAI, engine: fminfer.Engine) -> None:
    (listed,) = client.models.list()
    found = client.models.retrieve(listed.id)
    assert found == listed and found.id == engine.model_name
    assert found.model_extra is not None and found.model_extra["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt/5")
    assert caught.value.code == "model_not_found"
    assert f"there is no model gpt/5; this server has {engine.model_name}" in str(caught.value)


def test_a_requests_id_comes_back(client: openai.OpenAI) -> None:
    short = {"model": "demo", "prompt": "a", "max_tokens": 1}
    own = {"x-request-id": "mine-1"}
    raw = client.completions.with_raw_response.create(**short, extra_headers=own)
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse()._request_id == "mine-1"
    found = {client.completions.create(**short)._request_id for _ in range(2)}
    assert len(found) == 2 and None not in found


def test_wrong_requests_are_bad_requests(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", n=0)
    error = caught.value
    assert (error.status_code, error.code, error.param) == (400, "out_of_range", "n")
    assert error.type == "invalid_request_error" and error.request_id
    assert isinstance(error.body, dict) and "from 1 to 128" in error.body["message"]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        talk: Any = [{"role": "user", "content": "a " * 3000}]
        client.chat.completions.create(model="demo", messages=talk, stream=True)
    with pytest.raises(openai.NotFoundError, match="there is no /v1/embeddings"):
        client.embeddings.create(model="demo", input="a")


def test_keys_and_models_that_a_server_does_not_have(strict_engine: fminfer.Engine) -> None:
    short: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    options: dict[str, Any] = {"api_keys": ("k1",), "served_model_names": ("rooms",)}
    with running(strict_engine, **options) as server:
        with connect(server, api_key="k2") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model="rooms", **short)
        with connect(server, api_key="k1") as client:
            assert client.completions.create(model="rooms", **short).model == "rooms"
            with pytest.raises(openai.NotFoundError, match="this server has rooms") as caught:
                client.completions.create(model="gpt-4o", **short)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_full_queue_is_a_rate_limit_that_clients_wait_for(strict_engine: fminfer.Engine) -> None:
    long = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "n": 2}
    with running(strict_engine, queue_size=1) as server:
        connections = [server.start_post("/v1/completions", long)]
        until(lambda: strict_engine.num_running == 2, "all rows are taken")
        connections.append(server.start_post("/v1/completions", long))
        until(lambda: server.thread.service.dispatcher.num_waiting == 1, "one waits")
        with connect(server) as client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=strict_engine.model_name, prompt="a")
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        _close_later(server, connections)
        with connect(server, max_retries=3) as client:
            found = client.completions.create(model=strict_engine.model_name, prompt="a")
        assert found.choices
        until(server.is_idle, "all is free")


def _close_later(server: Running, connections: list[socket.socket]) -> None:
    def close_all() -> None:
        for connection in connections:
            connection.close()

    server.thread.loop.call_soon_threadsafe(server.thread.loop.call_later, 0.3, close_all)


def test_a_server_that_ends_is_a_503(strict_engine: fminfer.Engine) -> None:
    with running(strict_engine) as server, connect(server) as client:
        server.thread.service.dispatcher.close(HttpError(503, "the server is shutting down"))
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(model=strict_engine.model_name, prompt="a")
        assert caught.value.status_code == 503 and caught.value.type == "server_error"


def test_an_error_in_the_middle_of_a_stream(server: Running, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="demo", stream=True, **LONG)
    next(iter(stream))
    error = HttpError(500, "a rank died", code="internal_error")
    dispatcher = server.thread.service.dispatcher
    server.thread.loop.call_soon_threadsafe(
        lambda: [reply.push(error) for reply in dispatcher.replies]
    )
    with pytest.raises(openai.APIError, match="a rank died"):
        list(stream)
    until(server.is_idle, "all is free")


def test_clients_that_leave_free_their_rows(server: Running, client: openai.OpenAI) -> None:
    with client.completions.create(model="demo", stream=True, **LONG) as stream:
        assert next(iter(stream)).choices
        assert server.engine.num_running == 1
    until(server.is_idle, "the closed stream is free")
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="demo", timeout=0.2, n=8, **LONG)
    until(server.is_idle, "what took too long is free")

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asking = asyncio.create_task(client.completions.create(model="demo", n=8, **LONG))
            while not server.engine.num_running:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    until(server.is_idle, "the cancelled task is free")

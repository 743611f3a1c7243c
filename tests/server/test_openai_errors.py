"""openai-python and what goes wrong: its exceptions, and clients that leave."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import openai
import pytest

import fminfer
from fminfer.server.http_errors import HttpError
from tests.server.running import Running, running, until
from tests.server.server_needs import needs_server
from tests.server.test_completions import QUESTION

STRICT = needs_server(engine={"max_rows": 2, "check_model": True})

LONG = {"prompt": QUESTION, "max_tokens": 900, "extra_body": {"ignore_eos": True}}


def connect(server: Running, **options: Any) -> openai.OpenAI:
    options = {"api_key": "none", "max_retries": 0} | options
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def test_wrong_requests_are_bad_requests(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", n=0)
    error = caught.value
    assert (error.status_code, error.code, error.param) == (400, "out_of_range", "n")
    assert error.type == "invalid_request_error" and error.request_id
    assert isinstance(error.body, dict) and "from 1 to 128" in error.body["message"]
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is 1024 tokens"
    ):
        talk: Any = [{"role": "user", "content": "a " * 3000}]
        client.chat.completions.create(model="demo", messages=talk, stream=True)
    with pytest.raises(
        openai.BadRequestError, match="needs a model that gives embeddings"
    ):
        client.embeddings.create(model="demo", input="a")


@STRICT
def test_keys_and_models_that_a_server_does_not_have(
    engine: fminfer.Engine,
) -> None:
    short: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    options: dict[str, Any] = {"api_keys": ("k1",), "served_model_names": ("rooms",)}
    with running(engine, **options) as server:
        with (
            connect(server, api_key="k2") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.completions.create(model="rooms", **short)
        with connect(server, api_key="k1") as client:
            assert client.completions.create(model="rooms", **short).model == "rooms"
            with pytest.raises(
                openai.NotFoundError, match="this server has rooms"
            ) as caught:
                client.completions.create(model="gpt-4o", **short)
            assert (caught.value.code, caught.value.param) == (
                "model_not_found",
                "model",
            )


@STRICT
def test_a_full_queue_is_a_rate_limit_that_clients_wait_for(
    engine: fminfer.Engine,
) -> None:
    long = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "n": 2}
    with running(engine, queue_size=1) as server:
        connections = [server.start_post("/v1/completions", long)]
        until(lambda: engine.state.num_running == 2, "all rows are taken")
        connections.append(server.start_post("/v1/completions", long))
        until(lambda: server.thread.service.dispatcher.num_waiting == 1, "one waits")
        with connect(server) as client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=engine.model_name, prompt="a")
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        _close_later(server, connections)
        with connect(server, max_retries=3) as client:
            found = client.completions.create(model=engine.model_name, prompt="a")
        assert found.choices
        until(server.is_idle, "all is free")


def _close_later(server: Running, connections: list[socket.socket]) -> None:
    def close_all() -> None:
        for connection in connections:
            connection.close()

    server.thread.loop.call_soon_threadsafe(
        server.thread.loop.call_later, 0.3, close_all
    )


@STRICT
def test_a_server_that_ends_is_a_503(engine: fminfer.Engine) -> None:
    with running(engine) as server, connect(server) as client:
        server.thread.service.dispatcher.close(
            HttpError(503, "the server is shutting down")
        )
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(model=engine.model_name, prompt="a")
        assert caught.value.status_code == 503 and caught.value.type == "server_error"


def test_an_error_in_the_middle_of_a_stream(
    server: Running, client: openai.OpenAI
) -> None:
    stream = client.completions.create(model="demo", stream=True, **LONG)
    next(iter(stream))
    error = HttpError(500, "a rank died", code="internal_error")
    dispatcher = server.thread.service.dispatcher
    server.thread.loop.call_soon_threadsafe(
        lambda: [reply.push(error) for reply in dispatcher.replies.values()]
    )
    with pytest.raises(openai.APIError, match="a rank died"):
        list(stream)
    until(server.is_idle, "all is free")


def test_clients_that_leave_free_their_rows(
    server: Running, client: openai.OpenAI
) -> None:
    with client.completions.create(model="demo", stream=True, **LONG) as stream:
        assert next(iter(stream)).choices
        assert server.engine.state.num_running == 1
    until(server.is_idle, "the closed stream is free")
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="demo", timeout=0.2, n=8, **LONG)
    until(server.is_idle, "what took too long is free")

    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none"
        ) as client:
            asking = asyncio.create_task(
                client.completions.create(model="demo", n=8, **LONG)
            )
            while not server.engine.state.num_running:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    until(server.is_idle, "the cancelled task is free")

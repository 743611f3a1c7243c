"""Waiting for events: how long, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import weakref
from typing import Any

import pytest
from starlette.types import Message

import fminfer
from fminfer.engine.engine_core import Delta
from fminfer.engine.sequence import Prepared
from fminfer.server.http_errors import HttpError
from fminfer.server.replies import EventStream, Reply
from tests.server.running import Answer, running

WAIT_S = 0.2


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    engine = fminfer.Engine(dtype="float32")
    prepared = engine.prepare({"prompt": [5], "max_tokens": 1})
    engine.close()
    return prepared


def test_signs_of_life_come_only_while_nothing_else_does(prepared: Prepared) -> None:
    """A wait ends without an event at the second beat that saw none, and else with its events."""
    reply, delta = Reply(0, 0.0, prepared, lambda _: None), Delta(0, 0, "a", [1])

    async def wait() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        beating = asyncio.create_task(reply.beat(WAIT_S))
        started_s, found = loop.time(), []
        loop.call_later(1.5 * WAIT_S, reply.push, delta)
        for _ in range(4):
            events = await reply.take()
            found.append(((loop.time() - started_s) / WAIT_S, len(events)))
        beating.cancel()
        loop.call_later(1.5 * WAIT_S, reply.push, delta)
        assert await reply.take(), "nothing but an event ends it"
        return found

    expected = [(1, 0), (1.5, 1), (3, 0), (4, 0)]
    found = asyncio.run(asyncio.wait_for(wait(), 10))
    assert [num for _, num in found] == [num for _, num in expected]
    for (took, _), (least, _) in zip(found, expected, strict=True):
        assert took >= least - 0.05


def test_a_closed_one_is_forgotten_at_once(prepared: Prepared) -> None:
    """Its timer would hold the prompt for as long as a keep-alive takes."""

    async def use() -> bool:
        reply = Reply(0, 0.0, prepared, lambda _: None)
        reply.push(Delta(0, 0, "a", [1]))
        reply.push(HttpError(500, "it ends"))
        stream = EventStream(reply, lambda events: [])

        async def receive() -> Message:
            await asyncio.sleep(60)
            return {}

        async def send(message: Message) -> None:
            pass

        await stream({"type": "http"}, receive, send)
        seen = weakref.ref(reply)
        del reply, stream
        gc.collect()
        return seen() is None

    assert asyncio.run(asyncio.wait_for(use(), 10))


@pytest.mark.parametrize(
    ("path", "fields", "first", "later"),
    [
        ("/v1/completions", {"prompt": [5]}, {"text": ""}, {"text": ""}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            {"delta": {"role": "assistant", "content": ""}},
            {"delta": {}},
        ),
    ],
)
def test_signs_of_life_come_while_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    first: dict[str, Any],
    later: dict[str, Any],
) -> None:
    """They are chunks with nothing new.

    Clients in Go ended at the empty events that were sent. vLLM's benchmark joined a comment to the
    events behind it.
    """
    monkeypatch.setattr("fminfer.server.replies.KEEP_ALIVE_S", WAIT_S)
    engine = fminfer.Engine(dtype="float32")
    with running(engine) as server:
        monkeypatch.setattr(engine, "step", lambda: [])
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        connection.request("POST", path, json.dumps(fields | {"max_tokens": 1, "stream": True}))
        response = connection.getresponse()
        signs = [response.read1() for _ in range(3)]
        monkeypatch.undo()
        rest = response.read()
        connection.close()
    engine.close()

    body = b"".join(signs) + rest
    chunks = Answer(200, {}, body).events
    assert all(lines.startswith(b"data: ") for lines in body.split(b"\n\n")[:-1])
    empty = {"logprobs": None, "finish_reason": None}
    choices = [chunk["choices"][0] for chunk in chunks]
    for place in range(3):
        said = {name: value for name, value in choices[place].items() if name not in empty}
        assert choices[place] == said | empty and said.pop("index") == 0
        assert said == (first if place == 0 else later)
    assert choices[-1]["finish_reason"] == "length"
    roles = [choice.get("delta", {}).get("role") for choice in choices]
    assert roles.count("assistant") == ("delta" in first)

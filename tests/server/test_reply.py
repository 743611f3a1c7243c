"""Waiting for events: how long, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import weakref

import pytest
from starlette.types import Message

import fminfer
from fminfer.engine.engine_core import Delta
from fminfer.engine.sequence import Prepared
from fminfer.server.http_errors import HttpError
from fminfer.server.replies import EventStream, Reply
from tests.server.running import running

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


def test_signs_of_life_come_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are blank lines: vLLM's benchmark strips each piece that it reads, and joins the rest.

    A comment then took in all events behind it: whatever waited 10 s was said to have failed.
    """
    monkeypatch.setattr("fminfer.server.replies.KEEP_ALIVE_S", WAIT_S)
    engine = fminfer.Engine(dtype="float32")
    with running(engine) as server:
        monkeypatch.setattr(engine, "step", lambda: [])
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        body = json.dumps({"prompt": [5], "max_tokens": 1, "stream": True})
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        assert [response.read1().strip() for _ in range(3)] == [b""] * 3
        monkeypatch.undo()
        events = [event for event in response.read().split(b"\n\n") if event]
        connection.close()
    engine.close()
    assert all(event.startswith(b"data: ") for event in events) and events[-1] == b"data: [DONE]"

"""Waiting for events: how long, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import weakref

import pytest

import fminfer
from fminfer.engine.engine_core import Delta
from fminfer.engine.sequence import Prepared
from fminfer.server.reply import Reply
from tests.server.running import running

WAIT_S = 0.2


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    engine = fminfer.Engine(dtype="float32")
    prepared = engine.prepare({"prompt": [5], "max_tokens": 1})
    engine.close()
    return prepared


def test_each_wait_has_its_whole_time(prepared: Prepared) -> None:
    """One timer serves all of them: an event in between puts the end off, and never brings it."""
    reply, delta = Reply(0, 0.0, prepared), Delta(0, 0, "a", [1])

    async def wait() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        found = []
        loop.call_later(0.75 * WAIT_S, reply.push, delta)
        for timeout_s in (WAIT_S, WAIT_S, WAIT_S, WAIT_S / 4):
            started_s = loop.time()
            events = await reply.take(timeout_s)
            found.append((loop.time() - started_s, len(events)))
        loop.call_later(1.5 * WAIT_S, reply.push, delta)
        started_s = loop.time()
        await reply.take()  # for as long as it takes, whatever an earlier wait had
        found.append((loop.time() - started_s, 1))
        return found

    expected = [(0.75, 1), (1, 0), (1, 0), (0.25, 0), (1.5, 1)]
    found = asyncio.run(asyncio.wait_for(wait(), 10))
    assert [num for _, num in found] == [num for _, num in expected]
    for (took_s, _), (least, _) in zip(found, expected, strict=True):
        assert took_s >= least * WAIT_S - 0.01


def test_a_shorter_wait_does_not_last_as_an_earlier_one(prepared: Prepared) -> None:
    reply = Reply(0, 0.0, prepared)

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(reply.push, Delta(0, 0, "a", [1]))
        assert await reply.take(60)
        assert await reply.take(0.05) == []

    asyncio.run(asyncio.wait_for(wait(), 5))


def test_a_closed_one_is_forgotten_at_once(prepared: Prepared) -> None:
    """Its timer would hold the prompt for as long as a keep-alive takes."""

    async def use() -> bool:
        reply = Reply(0, 0.0, prepared)
        asyncio.get_running_loop().call_soon(reply.push, Delta(0, 0, "a", [1]))
        assert await reply.take(60)
        reply.close()
        seen = weakref.ref(reply)
        del reply
        gc.collect()
        return seen() is None

    assert asyncio.run(use())


def test_signs_of_life_come_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are blank lines: vLLM's benchmark strips each piece that it reads, and joins the rest.

    A comment then took in all events behind it: whatever waited 10 s was said to have failed.
    """
    monkeypatch.setattr("fminfer.server.event_stream.KEEP_ALIVE_S", WAIT_S)
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

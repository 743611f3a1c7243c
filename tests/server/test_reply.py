"""Waiting for events: how long, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.types import Message

import fminfer
from fminfer.engine.engine_core import Delta, Event
from fminfer.engine.sequence import PreparedRequest
from fminfer.server.http_errors import HttpError
from fminfer.server.replies import EventStream, Reply, StreamShape
from tests.server.running import Answer, running

WAIT_S = 0.2


@pytest.fixture(scope="module")
def prepared() -> PreparedRequest:
    engine = fminfer.Engine(dtype="float32")
    prepared = engine.prepare({"prompt": [5], "max_tokens": 1})
    engine.close()
    return prepared


def test_signs_of_life_come_only_while_nothing_else_does(
    prepared: PreparedRequest,
) -> None:
    """A wait ends without an event at the second beat that saw none, and else with its
    events."""
    reply = Reply(0, 0.0, prepared, lambda _: None)
    delta = Delta(0, 0, "a", [1])

    async def wait() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        beating = asyncio.create_task(reply.wake_when_silent(WAIT_S))
        started_s = loop.time()
        found = []
        loop.call_later(1.5 * WAIT_S, reply.push, delta)
        for _ in range(4):
            events = await reply.wait_for_events()
            found.append(((loop.time() - started_s) / WAIT_S, len(events)))
        beating.cancel()
        loop.call_later(1.5 * WAIT_S, reply.push, delta)
        assert await reply.wait_for_events(), "nothing but an event ends it"
        return found

    expected = [(1, 0), (1.5, 1), (3, 0), (4, 0)]
    found = asyncio.run(asyncio.wait_for(wait(), 10))
    assert [num for _, num in found] == [num for _, num in expected]
    for (took, _), (least, _) in zip(found, expected, strict=True):
        assert took >= least - 0.05


class SilentShape(StreamShape):
    def make_chunks(self, events: list[Event]) -> Iterator[object]:
        yield from ()


def test_a_closed_one_is_forgotten_at_once(prepared: PreparedRequest) -> None:
    """Its timer would hold the prompt for as long as a keep-alive takes."""

    async def use() -> bool:
        reply = Reply(0, 0.0, prepared, lambda _: None)
        reply.push(Delta(0, 0, "a", [1]))
        reply.push(HttpError(500, "it ends"))
        stream = EventStream(reply, SilentShape())

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

    Clients in Go ended at the empty events that were sent. vLLM's benchmark joined a
    comment to the events behind it.
    """
    monkeypatch.setattr("fminfer.server.replies.KEEP_ALIVE_S", WAIT_S)
    engine = fminfer.Engine(dtype="float32")
    with running(engine) as server:
        monkeypatch.setattr(engine, "step", lambda: [])
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        connection.request(
            "POST", path, json.dumps(fields | {"max_tokens": 1, "stream": True})
        )
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
        said = {
            name: value for name, value in choices[place].items() if name not in empty
        }
        assert choices[place] == said | empty and said.pop("index") == 0
        assert said == (first if place == 0 else later)
    assert choices[-1]["finish_reason"] == "length"
    roles = [choice.get("delta", {}).get("role") for choice in choices]
    assert roles.count("assistant") == ("delta" in first)


@pytest.mark.parametrize("kind", ["chat", "helper for chat", "completions"])
def test_signs_of_life_change_no_answer_of_openais_client(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The role comes once, the usage last, and the joined text is the answer's."""
    monkeypatch.setattr("fminfer.server.replies.KEEP_ALIVE_S", WAIT_S)
    engine = fminfer.Engine(dtype="float32")
    messages = [{"role": "user", "content": "How do you go from the den to the porch?"}]
    chat: dict[str, Any] = {
        "model": "demo",
        "messages": messages,
        "max_tokens": 4,
        "temperature": 0,
    }
    plain: dict[str, Any] = {
        "model": "demo",
        "prompt": "Question: How",
        "max_tokens": 4,
        "seed": 3,
    }
    usage = {"include_usage": True}

    with (
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        say: Any = (
            client.completions if kind == "completions" else client.chat.completions
        )
        asked = plain if kind == "completions" else chat
        whole = say.create(**asked)
        monkeypatch.setattr(engine, "step", lambda: [])
        timer = threading.Timer(4 * WAIT_S, monkeypatch.undo)
        timer.start()
        if kind == "helper for chat":
            with say.stream(**asked, stream_options=usage) as stream:
                num_chunks = sum(event.type == "chunk" for event in stream)
                found = stream.get_final_completion()
            assert found.choices[0].message.content == whole.choices[0].message.content
            assert (
                found.choices[0].message.role == "assistant" and found.usage is not None
            )
            assert found.usage.total_tokens == whole.usage.total_tokens
        else:
            chunks = list(say.create(**asked, stream=True, stream_options=usage))
            num_chunks = len(chunks)
            *said, last = chunks
            choices = [chunk.choices[0] for chunk in said]
            parts = [
                c.text if kind == "completions" else c.delta.content or ""
                for c in choices
            ]
            answer = whole.choices[0]
            text = answer.text if kind == "completions" else answer.message.content
            assert (
                "".join(parts) == text
                and choices[-1].finish_reason == answer.finish_reason
            )
            assert last.usage.total_tokens == whole.usage.total_tokens
        timer.join()
    engine.close()
    assert num_chunks > whole.usage.completion_tokens + 1, "there were signs of life"

"""What one request needs is done where others do not wait for it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fminfer.server import request_bodies
from fminfer.server.dispatcher import Dispatcher
from fminfer.server.request_bodies import SMALL_BYTES, BodyReader


def test_a_request_is_added_while_a_large_one_is() -> None:
    """The event loop adds small ones: it stood still while a thread added 16,384 prompts."""
    has_begun = threading.Event()
    may_end = threading.Event()
    added: list[int] = []

    def add(prepared: Any, *, is_streamed: bool, request_id: int) -> None:
        if request_id == 1:
            has_begun.set()
            assert may_end.wait(10)
        added.append(request_id)

    stats = SimpleNamespace(num_begun=0, num_begun_behind=0)
    engine: Any = SimpleNamespace(
        add=add, cancel=added.remove, stats=stats, runs=SimpleNamespace(cache=None)
    )
    dispatcher = Dispatcher(engine, 0, metrics=None)  # type: ignore[arg-type]
    dispatcher.replies |= {1: None, 2: None}  # type: ignore[dict-item]
    large = threading.Thread(
        target=dispatcher._add_to_engine, args=(None, 1), kwargs={"is_streamed": False}
    )
    small = threading.Thread(
        target=dispatcher._add_to_engine, args=(None, 2), kwargs={"is_streamed": False}
    )
    large.start()
    assert has_begun.wait(10)
    small.start()
    small.join(5)
    is_waiting = small.is_alive()
    may_end.set()
    large.join()
    assert not is_waiting
    assert added == [2, 1]


@pytest.mark.parametrize(("size", "is_beside"), [(10, False), (SMALL_BYTES + 1, True)])
def test_a_large_body_is_parsed_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, size: int, is_beside: bool
) -> None:
    places = list[int]()

    def load(raw: bytes, what: str) -> dict[str, Any]:
        places.append(threading.get_ident())
        return {"size": len(raw)}

    async def stream() -> Any:
        yield b"x" * size

    monkeypatch.setattr(request_bodies, "parse_object", load)
    request: Any = SimpleNamespace(headers={}, scope={"state": {}}, stream=stream)
    found = asyncio.run(BodyReader(1 << 20).read(request))
    assert found == {"size": size}
    assert [place != threading.get_ident() for place in places] == [is_beside]

"""Runs over a `RemoteCore`, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fminfer.client.remote_core import RemoteCore
from fminfer.client.remote_options import RemoteOptions
from fminfer.client.remote_request import RemoteRequest
from fminfer.client.server_finding import find_servers
from fminfer.core.errors import RequestError
from fminfer.engine.engine_core import Failed, Finished
from tests.client.remote_requests import make_request


@contextmanager
def open_core(urls: str, key: str = "", **settings: Any) -> Iterator[RemoteCore]:
    """Yield a core over servers, with options by their names."""
    options = RemoteOptions(engine=urls, **settings)
    notes: list[str] = []
    servers = find_servers(options, None, key, notes.append)
    core = RemoteCore(servers, options, key, print_note=notes.append)
    try:
        yield core
    finally:
        core.close()


def step_all(core: RemoteCore, limit_s: float = 120.0) -> dict[int, Any]:
    """Return each request's text, or its error, once there is no work."""
    results: dict[int, str | RequestError] = {}
    end_s = time.monotonic() + limit_s
    while core.has_work:
        assert time.monotonic() < end_s, "it does not end"
        for event in core.step():
            assert event.request_id not in results, "two answers"
            if isinstance(event, Finished):
                entry = event.choices[0]
                message = entry.get("message", entry)
                results[event.request_id] = message.get("content", entry.get("text"))
            elif isinstance(event, Failed):
                results[event.request_id] = event.error
    core.check_books()
    return results


def answer(core: RemoteCore, *requests: str | RemoteRequest) -> list[Any]:
    """Return the text or the error of each request, in order."""
    ids = [
        core.add(make_request(each) if isinstance(each, str) else each)
        for each in requests
    ]
    results = step_all(core)
    return [results[number] for number in ids]

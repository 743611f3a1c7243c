"""A server of this process, and the small client that tests call it with."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fminfer.runtime.engine_api import Engine
from fminfer.server.batch_service import BatchService
from fminfer.server.batches.stored_batches import ServerState
from fminfer.server.connections import open_socket
from fminfer.server.http import HttpThread
from fminfer.server.settings import ServerSettings

WAIT_S = 20.0


@dataclass(slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which has OpenAI's fields and no others."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON values of an event stream, without the last [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        kept = [line for line in lines[:-1] if not line.startswith(":")]
        assert all(line.startswith("data: ") for line in kept)
        return [json.loads(line.removeprefix("data: ")) for line in kept]


@dataclass(slots=True)
class Running:
    """A server that listens on this machine."""

    engine: Engine
    thread: HttpThread
    fault: BaseException | None = None  # that ended the engine's thread

    @property
    def url(self) -> str:
        return self.thread.url

    @property
    def batches(self) -> BatchService:
        """What serves files and batches."""
        assert self.thread.batches is not None, "it was started with a state folder"
        return self.thread.batches

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return (
            "127.0.0.1" if parts.hostname == "0.0.0.0" else parts.hostname,
            parts.port,
        )

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send a request, and return the whole response."""
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_S)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> Answer:
        return self.call("POST", path, body, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.call("GET", path, None, headers)

    def send_raw(self, data: bytes) -> socket.socket:
        """Send bytes, and return the connection."""
        connection = socket.create_connection(self.address, WAIT_S)
        connection.sendall(data)
        return connection

    def start_post(self, path: str, body: Any) -> socket.socket:
        """Send a request whose response is not read."""
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        return self.send_raw(head.encode() + raw)

    def is_idle(self) -> bool:
        """Tell whether no request is open, and none holds anything."""
        engine = self.engine
        dispatcher = self.thread.service.dispatcher
        is_free = not (
            engine.has_work or engine.state.num_running or engine.num_waiting
        )
        return is_free and dispatcher.num_open == 0 and engine.state.kv_usage == 0


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, f"waited {WAIT_S} s until {what}"
        time.sleep(0.01)


@contextmanager
def running(
    engine: Engine,
    *,
    state: Path | None = None,
    fingerprint: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serve an engine on a free port.

    Args:
        state: the folder of files and batches.
        fingerprint: of the model and its settings.
    """
    options = ServerSettings(**{"port": 0, "is_quiet": True, "state": state} | settings)
    kept = None if state is None else ServerState(state, fingerprint or {})
    server = Running(engine, HttpThread(engine, options, open_socket(options), kept))

    def answer() -> None:
        try:
            server.thread.service.dispatcher.run()
        except BaseException as error:
            server.fault = error

    server.thread.start()
    stepping = threading.Thread(target=answer)
    stepping.start()
    try:
        yield server
    finally:
        server.thread.end()
        stepping.join(WAIT_S)
        assert not stepping.is_alive()

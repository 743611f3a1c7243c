"""Who may call, how much at once, and how a server ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import PipelineError, UsageError
from fminfer.server.dispatcher import TOKENIZERS
from fminfer.server.http import open_socket
from fminfer.server.http_errors import shutting_down
from fminfer.server.settings import ServerSettings
from tests.server.running import WAIT_S, Running, running, until

LONG = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True}
SHORT = {"prompt": [5] * 20, "max_tokens": 2}
KEY = {"Authorization": "Bearer k2"}
GUARDED = (
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")),
    *(("POST", path) for path in ("/detokenize", "/generation", "/")),
    *(("GET", path) for path in ("/v1/models", "/run/a", "/run_gpt/a", "/stats", "/metrics")),
    ("GET", "/version"),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", max_rows=4)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:  # an engine of its own: one thread steps each
    engine = fminfer.Engine(dtype="float32", max_rows=4)
    with running(engine, api_keys=("k1", "k2"), allowed_origins=("https://a.example",)) as server:
        yield server
    engine.close()


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_routes_that_compute_or_tell_need_a_key(locked: Running, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer k3"}, {"Authorization": "k1"}):
        answer = locked.call(method, path, {}, headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"
    assert locked.call(method, path, SHORT, KEY).status != 401


def test_health_and_the_page_need_no_key(locked: Running) -> None:
    for path in ("/health", "/", "/docs", "/openapi.json", "/page/page.js"):
        assert locked.get(path).status == 200


def test_pages_of_other_origins_cannot_call_unless_they_may(
    locked: Running, engine: fminfer.Engine
) -> None:
    foreign, own = "https://b.example", f"http://{locked.address[0]}:{locked.address[1]}"
    for origin, status in ((foreign, 403), ("https://a.example", 200), (own, 200)):
        answer = locked.post("/v1/completions", SHORT, KEY | {"Origin": origin})
        assert answer.status == status
        has_leave = "access-control-allow-origin" in answer.headers
        assert has_leave == (origin == "https://a.example")
    picture = KEY | {"Sec-Fetch-Site": "cross-site"}  # as <img src> of another site asks for it
    assert locked.get("/run/a", picture).status == 403
    assert locked.get("/", picture).status == 200
    assert locked.get("/run/a", KEY | {"Sec-Fetch-Site": "same-origin"}).status == 200
    assert locked.post("/v1/completions", SHORT, KEY | {"Origin": "http://["}).status == 403
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert locked.call("OPTIONS", "/v1/completions", None, asked).status == 200
    with running(engine) as server:
        assert server.post("/v1/completions", SHORT, {"Origin": foreign}).status == 403
        assert "access-control-allow-origin" not in server.get("/health").headers


def test_a_request_keeps_its_id(locked: Running) -> None:
    assert locked.get("/health", {"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {
        locked.get("/health", {"x-request-id": wrong}).headers["x-request-id"]
        for wrong in ("", "a b", "x" * 200)
    }
    assert len(made) == 3 and all(len(each) == 32 for each in made)
    assert locked.get("/nothing", KEY).headers["x-request-id"]


def test_a_full_queue_says_when_to_come_back(engine: fminfer.Engine) -> None:
    with running(engine, queue_size=3) as server:
        connections = []
        for num_rows in range(1, 5):  # one by one: more than three must not wait
            connections.append(server.start_post("/v1/completions", LONG))
            until(lambda n=num_rows: engine.num_running == n, "it has a row")  # type: ignore[misc]
        connections += [server.start_post("/v1/completions", LONG) for _ in range(3)]
        until(lambda: server.thread.service.dispatcher.num_waiting == 3, "three wait")
        answer = server.post("/v1/completions", SHORT)
        assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.error["type"] == "rate_limit_error"
        for connection in connections:
            connection.close()
        until(server.is_idle, "all is free")
        assert server.post("/v1/completions", SHORT).status == 200


TEXTS = (("/tokenize", {"prompt": "den"}), ("/detokenize", {"tokens": [5]}))


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_tokenizing_waits_in_the_queue_too(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Any number of long texts was tokenized at once, and none was refused."""
    prepare, goes_on, begun = engine.prepare, threading.Event(), []

    def prepare_late(*args: Any, **options: Any) -> Any:
        begun.append(args)
        assert goes_on.wait(WAIT_S)
        return prepare(*args, **options)

    monkeypatch.setattr(engine, "prepare", prepare_late)
    with running(engine, queue_size=TOKENIZERS + 1) as server, ThreadPoolExecutor() as asking:
        dispatcher = server.thread.service.dispatcher
        asked = [asking.submit(server.post, path, body) for _ in range(TOKENIZERS + 1)]
        until(lambda: dispatcher.num_waiting == TOKENIZERS + 1, "all are there")
        answer = server.post(path, body)
        num_at_once = len(begun)
        goes_on.set()
        assert [each.result().status for each in asked] == [200] * len(asked)
        assert server.post(path, body).status == 200
    assert num_at_once == TOKENIZERS
    assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.error["code"] == "queue_full"


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_a_server_that_ends_tokenizes_nothing(
    engine: fminfer.Engine, path: str, body: dict[str, Any]
) -> None:
    with running(engine) as server:
        server.thread.loop.call_soon_threadsafe(
            server.thread.service.dispatcher.close, shutting_down()
        )
        answer = server.post(path, body)
    assert answer.status == 503 and answer.error["code"] == "shutting_down"
    assert answer.headers["retry-after"] == "10"


def test_a_body_beyond_the_limit_is_refused(engine: fminfer.Engine) -> None:
    with running(engine, max_body_bytes=1000) as server:
        answer = server.post("/v1/completions", b"x" * 2_000_000)
        assert answer.status == 413 and "--max-body-size" in answer.error["message"]
        assert server.post("/v1/completions", SHORT).status == 200


def test_routes_and_methods_that_are_not_there(engine: fminfer.Engine) -> None:
    with running(engine) as server:
        assert server.call("HEAD", "/health").status == 200
        assert server.get("/v1/models/").status == 404
        assert server.post("/", {"inputs": "a", "parameters": 0}).error["param"] == "parameters"
        answer = server.get("/v1/engines")
        assert answer.status == 404 and "/docs" in answer.error["message"]
        answer = server.get("/v1/completions")
        assert answer.status == 405 and answer.headers["allow"] == "POST"
        assert "use POST" in answer.error["message"]
        assert server.get("/run/a?max_seq_length=x").error["param"] == "max_seq_length"


def test_open_requests_end_in_the_grace(engine: fminfer.Engine) -> None:
    """Those that can end do; others are told that the server ends."""
    with running(engine) as server:
        short = {"prompt": [5], "max_tokens": 60, "ignore_eos": True}
        found = []

        def ask() -> None:
            found.append(server.post("/v1/completions", short))

        asking = threading.Thread(target=ask)
        stream = server.start_post("/v1/completions", LONG | {"stream": True, "n": 2})
        asking.start()
        until(lambda: engine.num_running == 3, "both run")
        server.thread.drain(0.5)
        asking.join()
        assert found[0].status == 200
        received = b""
        while piece := stream.recv(65536):
            received += piece
        assert b"shutting down" in received and received.rstrip().endswith(b"0")
        with pytest.raises(ConnectionError):
            server.get("/health")
    assert not engine.has_work


def test_an_idle_server_ends_at_once(engine: fminfer.Engine) -> None:
    with running(engine) as server:
        idle = socket.create_connection(server.address)
        started_s = time.monotonic()
        server.thread.drain(30)
        until(lambda: not server.thread.is_alive, "it has ended")
        assert time.monotonic() - started_s < 3
        idle.close()


def test_a_failed_engine_turns_health_red_and_ends_the_server(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine) as server:
        stream = server.start_post("/v1/completions", LONG | {"stream": True})
        waiting = server.start_post("/v1/completions", LONG)
        until(lambda: engine.num_running == 2, "both run")

        def fail() -> None:
            raise PipelineError("rank 1 died")

        monkeypatch.setattr(engine, "step", fail)
        for connection in (stream, waiting):
            received = b""
            while piece := connection.recv(65536):
                received += piece
            assert b"rank 1 died" in received
        until(lambda: server.fault is not None, "the engine's thread has ended")
        assert isinstance(server.fault, PipelineError)
        until(lambda: not server.thread.is_alive, "the server has ended")
    monkeypatch.undo()
    engine.cancel(0)
    while engine.has_work:
        engine.step()


def test_a_connection_that_sends_nothing_is_closed(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fminfer.server.connections.HEAD_S", 0.2)
    monkeypatch.setattr("fminfer.server.request_bodies.READ_S", 0.2)
    with running(engine) as server:
        for sent in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            connection = server.send_raw(sent)
            assert connection.recv(100) == b""
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        received = server.send_raw(half).recv(100)
        assert received.startswith(b"HTTP/1.1 408")


def test_an_address_in_use_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="--port"):
        open_socket(ServerSettings(port=taken.getsockname()[1]))

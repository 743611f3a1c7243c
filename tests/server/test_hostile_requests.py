"""Requests that are meant to harm: they cost nobody else anything, and the log stays
readable."""

from __future__ import annotations

import http.client
import json
import logging
import resource
import socket
import threading
import time
from heapq import nsmallest
from typing import Any

import pytest

import fminfer
from fminfer.runtime.bars import say
from fminfer.server.connections import find_max_connections, raise_file_limit
from tests.server.running import Running, running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(
    engine={"max_rows": 4}, is_fresh=True, log_level="warning", is_quiet=False
)

SHORT = {"prompt": [5] * 20, "max_tokens": 2, "ignore_eos": True}
SURROGATE = "\ud800"


def test_an_unknown_name_cannot_break_or_forge_the_log(
    server: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half a surrogate pair in the name of an unknown field was a 500, and ended a whole run."""
    name = f"\x1b[31mred\nReady\t{SURROGATE}"
    assert server.post("/v1/completions", SHORT | {name: 1}).status == 200
    told = capfd.readouterr().err
    assert r"\x1b[31mred\nReady\t\ud800" in told and told.count("\n") == 1


def test_the_log_ends_its_list_of_unknown_names_aloud(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Behind 300 names it fell silent for ever, as if nobody sent further ones."""
    engine = fminfer.Engine(dtype="float32")
    with running(engine, log_level="warning", is_quiet=False) as server:
        server.post(
            "/v1/completions", SHORT | {f"a{number}": 1 for number in range(299)}
        )
        for name in ("b1", "b1", "b2", "b3"):
            server.post("/v1/completions", SHORT | {name: 1})
    engine.close()
    first, *told = capfd.readouterr().err.splitlines()
    assert "a298" in first
    kind = "unknown parameters are kept and not acted on"
    assert [line.partition(kind)[2] for line in told] == [
        ": b1",
        ": others, which are not named",
    ]


def test_a_run_goes_on_behind_a_line_with_such_a_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = fminfer.Engine(dtype="float32")
    engine.intake.on_warning = say
    records = list(engine.run([SHORT | {f"a{SURROGATE}": 1}, SHORT]))
    engine.close()
    assert [record.error for record in records] == [None, None]
    assert r"a\ud800" in capfd.readouterr().err


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/generation"]
)
def test_a_name_of_the_model_that_is_too_long(server: Running, path: str) -> None:
    """Each chunk of a stream repeats it: one request of 4 MB made the server need 6 GB."""
    answer = server.post(path, {"prompt": "x", "messages": [], "model": "m" * 257})
    assert answer.status == 400 and answer.error["param"] == "model"
    assert "at most 256" in answer.error["message"]
    assert server.post("/v1/completions", SHORT | {"model": "m" * 256}).status == 200


def test_a_fault_is_told_once_and_its_answer_is_like_all_others(
    engine: fminfer.Engine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It lacked its x-request-id and what lets a page read it, and was told twice."""

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("\x1b[31mred")

    monkeypatch.setattr(engine, "prepare", fail)
    page = "https://a.example"
    with running(engine, allowed_origins=(page,), log_level="error") as server:
        answer = server.post(
            "/v1/completions", SHORT, {"x-request-id": "r7", "Origin": page}
        )
    assert answer.status == 500 and answer.error["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "r7"
    assert answer.headers["access-control-allow-origin"] == page
    told = capfd.readouterr().err
    assert told.count("Traceback") == 1 and "Request r7 failed" in told
    assert r"LookupError: \x1b[31mred" in told


@pytest.mark.parametrize("is_later", [False, True])
def test_a_broken_chunk_behind_a_refusal_is_no_fault(
    engine: fminfer.Engine, caplog: pytest.LogCaptureFixture, *, is_later: bool
) -> None:
    """Anybody could fill the log with tracebacks, also without the key."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n"
    )
    with running(engine, api_keys=("k",)) as server, caplog.at_level(logging.ERROR):
        connection = server.send_raw(
            head + b"5\r\nabcde\r\n" + (b"" if is_later else b"zz\r\n")
        )
        if is_later:
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")
            connection.sendall(b"zz\r\n")
        _read_all(connection)
        assert server.get("/health").status == 200
    assert not caplog.records


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ("GET / HTTP/1.1", "Missing mandatory Host: header"),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: a", "Found multiple Host: headers"),
        ("GET /\xe4 HTTP/1.1\r\nHost: a", "illegal request line"),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1", "bad Content-Length"),
        ("HEAD / HTTP/1.1", "Missing mandatory Host: header"),
        (
            "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nz",
            "illegal",
        ),
    ],
)
def test_what_is_no_http_is_told_why(server: Running, head: str, why: str) -> None:
    """It got a line of plain text, which said nothing, and clients of the API read JSON."""
    response = http.client.HTTPResponse(
        server.send_raw(f"{head}\r\n\r\n".encode("latin-1"))
    )
    response.begin()
    error = json.loads(response.read())["error"]
    assert response.status == 400 and why in error["message"]
    assert (
        error["type"] == "invalid_request_error"
        and response.headers["connection"] == "close"
    )


def test_bodies_that_never_end_do_not_fill_the_memory(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred clients that sent 15 MB each, and not the rest, held 1.5 GB for a minute."""
    monkeypatch.setattr("fminfer.server.request_bodies.MOST_AT_ONCE", 3)
    large = 2**20
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Length: %d\r\n\r\n" % large
    whole = json.dumps(SHORT).encode()
    whole += b" " * (large - len(whole))
    with running(engine, max_body_bytes=large) as server:
        slow = [server.send_raw(head + b" " * (large - 1)) for _ in range(2)]
        bodies = server.thread.service.bodies
        until(lambda: bodies._num_held > 1.8 * large, "the server has them")
        answer = server.post("/v1/completions", whole)
        assert answer.status == 429 and answer.error["code"] == "too_many_bodies"
        assert answer.headers["retry-after"] == "1"
        assert server.post("/v1/completions", SHORT).status == 200, (
            "small ones always pass"
        )
        for connection in slow:
            connection.close()
        until(lambda: bodies._num_held == 0, "they are forgotten")
        assert server.post("/v1/completions", whole).status == 200


def test_an_idle_connection_stays_open_as_long_as_is_said(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed after the time for a request's head, whatever --keep-alive said."""
    monkeypatch.setattr("fminfer.server.connections.HEAD_S", 0.2)
    with running(engine, keep_alive_s=60) as server:
        client = http.client.HTTPConnection(*server.address)
        for _ in range(2):
            client.request("GET", "/health")
            assert client.getresponse().read() == b'{"status":"ok"}'
            opened = client.sock
            time.sleep(0.5)
        assert client.sock is opened
        client.close()


def test_debug_tells_each_request(
    engine: fminfer.Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(engine, log_level="debug", is_quiet=False) as server:
        server.get("/nope%0a?a=%1b", {"x-request-id": "r8"})
    assert "127.0.0.1 GET /nope%0a 404 r8\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize"]
)
def test_no_prompt_stands_in_the_log(
    engine: fminfer.Engine, capfd: pytest.CaptureFixture[str], path: str
) -> None:
    marks = [
        {"prompt": "MARK", "max_tokens": 1},
        {"prompt": ["MARK", "MARK"], "max_tokens": "MARK", "temperature": "MARK"},
        {"messages": [{"role": "MARK", "content": "MARK"}], "seed": "MARK"},
        {
            "prompt": "MARK",
            "user": "MARK",
            "metadata": {"a": "MARK"},
            "strange": "MARK",
        },
        {"prompt": "MARK " * 9000},
        b'{"prompt": "MARK',
    ]
    with running(engine, log_level="debug", is_quiet=False) as server:
        for body in marks:
            server.post(path, body)
        server.get("/run/MARK")
        server.get("/run_x/MARK?seed=MARK")
        server.get("/run/MARK/run/x")
        server.get("/%72un/MARK")
        server.get("/health?text=MARK")
    told = capfd.readouterr().err
    assert "/health 200" in told and "MARK" not in told


def test_the_oldest_silent_connection_makes_room(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 connections that said nothing kept all others out."""
    monkeypatch.setattr("fminfer.server.connections.MOST_CONNECTIONS", 3)
    slow = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    with running(engine) as server:
        first = server.send_raw(slow)  # it has begun: silent ones go before it
        until(
            lambda: len(server.thread._server.server_state.connections) == 1,
            "it is open",
        )
        silent = [server.send_raw(b"") for _ in range(2)]
        assert server.get("/health").status == 200
        assert silent[0].recv(1) == b"", "the oldest"
        silent[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent[1].recv(1)
        first.sendall(b"}       ")
        assert first.recv(15).startswith(b"HTTP/1.1 400")


def test_many_connections_at_once_are_seldom_searched(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one over the limit searched all: 6,000 at once held others up for 5 s."""
    searched: list[int] = []

    def search(number: int, found: list[Any], **how: Any) -> list[Any]:
        searched.append(len(found))
        return nsmallest(number, found, **how)

    monkeypatch.setattr("fminfer.server.connections.MOST_CONNECTIONS", 192)
    monkeypatch.setattr("fminfer.server.connections.nsmallest", search)
    with running(engine) as server:
        server.thread.loop.call_soon_threadsafe(time.sleep, 0.3)
        opened = [server.send_raw(b"") for _ in range(256)]
        until(lambda: opened[0].recv(1) == b"", "the oldest is closed")
        assert server.get("/health").status == 200
    assert 0 < len(searched) < 32, "each search closes four"


def test_as_many_files_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 300), hard))
        assert find_max_connections() == 150
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nTransfer-Encoding: chunked",
            "and T",
        ),
        (b"GET /health HTTP/1.1\nHost: localhost\n", "LF"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n", "LF"),
        (
            b"GET /health HTTP/1.1\r\nHost: localhost\n\r\nGET /v1/models HTTP/1.1\r\n",
            "LF",
        ),
    ],
)
def test_what_parsers_read_differently_is_refused(
    server: Running, head: bytes, why: str
) -> None:
    """The connection went on, and what stood behind could be another request to a proxy."""
    received = _read_all(
        server.send_raw(head + b"\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
    )
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1 ") == 1
    assert why.encode() in received


def test_chunks_of_single_bytes_end(server: Running) -> None:
    """A megabyte of them took the event loop 13 s."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n"
    )
    received = _read_all(server.send_raw(head + b"1\r\n \r\n" * 4200))
    assert received.startswith(b"HTTP/1.1 400") and b"few bytes" in received
    body = json.dumps(SHORT).encode()
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    connection = server.send_raw(head + small + b"0\r\n\r\n")
    assert connection.recv(15).startswith(b"HTTP/1.1 200")


def test_a_request_of_many_prompts_does_not_fill_the_queue(
    engine: fminfer.Engine,
) -> None:
    """Others got status 429 as long as its prompts waited."""
    with running(engine, queue_size=3) as server:
        many = server.start_post("/v1/completions", SHORT | {"prompt": ["a"] * 400})
        until(lambda: engine.num_waiting > 100, "its prompts wait")
        assert server.post("/v1/completions", SHORT).status == 200
        assert engine.num_waiting > 100, "its prompts still wait"
        many.close()
        until(server.is_idle, "it is forgotten")


def test_prepared_requests_have_a_bound_in_bytes(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fminfer.server.dispatcher.MOST_BYTES", 1 << 20)
    long = SHORT | {"prompt": ["a"] * 200}
    with running(engine) as server:
        first = server.start_post("/v1/completions", long | {"max_tokens": 100})
        until(lambda: engine.num_waiting > 0, "its prompts wait")
        answer = server.post("/v1/completions", long)
        assert answer.status == 429 and answer.error["code"] == "too_many_prompts"
        assert server.post("/v1/completions", SHORT).status == 200, (
            "small ones always pass"
        )
        first.close()
        until(server.is_idle, "it is forgotten")
        assert server.post("/v1/completions", long).status == 200
        assert not server.thread.service.dispatcher._held_bytes


def test_a_long_value_in_a_short_list_holds_up_no_short_request(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    prepare = engine.prepare

    def prepare_and_note(*args: Any, **others: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(*args, **others)

    monkeypatch.setattr(engine, "prepare", prepare_and_note)
    with running(engine) as server:
        for prompt in ([5], ["a " * 40_000]):
            server.post("/v1/completions", SHORT | {"prompt": prompt})
        quick = server.thread.service.dispatcher._tokenizers._quick_pool._threads
        assert [each in quick for each in threads] == [True, False]


def _read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received

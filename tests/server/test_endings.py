"""How a server fails to start, and how it ends for clients that are not ready for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import FminferError, UsageError
from fminfer.server.connections import open_socket
from fminfer.server.settings import ServerSettings
from tests.forked import Forked
from tests.server.running import Answer, Running, running, until

CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUA1qLw3huqiE2Ys+UNubUMrEacg0wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNTIyMDIyNFoYDzIxMjYxMTAx
MjIwMjI0WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATB9obbBcgUaIkamd+ouY73x5sHGNAwvlumNqAMLBahuxp3+BQQe75C
iZvZDLVzIf+Di+UKExe1ynQyUZa92VMCo1MwUTAdBgNVHQ4EFgQUIlgpaWoJD3Ks
5wCgdfQHNMpddBUwHwYDVR0jBBgwFoAUIlgpaWoJD3Ks5wCgdfQHNMpddBUwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiEAhRdwKnGGnDmlLmQXWg8R
E8vbJKwJHgmLCyJaZLFFA7kCIFO0e94N/+Wsa+9FjFEyqxQext4vz/rVy72RRPDA
Y8Hs
-----END CERTIFICATE-----
"""
# Its key, with a password that nobody needs: the certificate is of localhost, and of no use.
LOCKED_KEY = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAj9U/03aBQrBQICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEChM7W0mYA7Rr1SV4C+r5rMEgZCm
INRErk6fIRiFUJe3ggUG+TiZ0uKxqp+FHxtpjuTsmxCPbz7XGmJAakrrCpQZkCn6
2PEwpRIPXoz3F3pf4YQqsl4TvUCJRnmG505xjOOBr62MJD8upk24/ppFirJX9DEm
mytK8NKq+lkrtEgiW1zYYlxSwZSAgEYFhEs2diiJXfF9K1OrDiRkpKbpNSLwx3g=
-----END ENCRYPTED PRIVATE KEY-----
"""
LONG = {
    "prompt": [5] * 20,
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 5,
}


@pytest.fixture
def tls(tmp_path: Path) -> ServerSettings:
    certificate = tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(LOCKED_KEY)
    return ServerSettings(port=0, ssl_certfile=certificate, ssl_keyfile=key)


def test_a_key_with_a_password_is_told_before_a_model_is_loaded(
    tls: ServerSettings,
) -> None:
    """OpenSSL asked for the password on the terminal, and nobody was there to answer."""
    with pytest.raises(UsageError, match="is encrypted"):
        open_socket(tls)


def test_what_is_no_key_is_told_before_a_model_is_loaded(tls: ServerSettings) -> None:
    assert tls.ssl_keyfile is not None
    tls.ssl_keyfile.write_text("junk\n")
    with pytest.raises(UsageError, match=r"key\.pem cannot be used.*PEM files"):
        open_socket(tls)


def test_a_server_that_cannot_start_says_why(
    engine: fminfer.Engine, tls: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to serve, and to have ended by itself for a reason that stood nowhere."""
    assert tls.ssl_keyfile is not None
    tls.ssl_keyfile.write_text("junk\n")
    monkeypatch.setattr(
        "fminfer.server.connections.check_certificate", lambda *files: None
    )
    with pytest.raises(FminferError, match=r"cannot start: .*SSL"):  # noqa: SIM117
        with running(
            engine, ssl_certfile=tls.ssl_certfile, ssl_keyfile=tls.ssl_keyfile
        ):
            pass


def test_clients_that_are_slow_are_left_without_a_traceback(
    engine: fminfer.Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that had not sent its body got a 500, and each of them cost a traceback."""
    monkeypatch.setattr("fminfer.server.http.LEAVE_S", 0.5)
    with running(engine) as server:
        half = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            b"100\r\n\r\n{"
        )
        sending = server.send_raw(half)
        reading = socket.socket()
        reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reading.connect(server.address)
        body = json.dumps(LONG | {"n": 64}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        reading.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: engine.state.num_running == 64, "it runs")
        time.sleep(0.3)
        server.thread.drain(0.2)
        until(lambda: not server.thread.is_alive(), "the server has ended")
        with suppress(ConnectionResetError):
            assert sending.recv(4096) == b"", "no answer"
        reading.close()
    assert not [record for record in caplog.records if record.exc_info]


SHORT = {"prompt": [5] * 20, "max_tokens": 20, "ignore_eos": True}


def ask(server: Running, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    """Send a request, and shut down the sending side."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
    client = server.send_raw(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    client.shutdown(socket.SHUT_WR)
    return client


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_only_listens_gets_its_answer(
    server: Running, *, is_streamed: bool
) -> None:
    """Whoever shut down the sending side behind a request was taken for gone."""
    client = ask(server, SHORT | {"stream": is_streamed})
    response = http.client.HTTPResponse(client)
    response.begin()  # which passes over 100 Continue
    assert response.status == 200 and response.headers["connection"] == "close"
    found = Answer(200, dict(response.headers), response.read())
    if is_streamed:
        assert found.events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert found.json["usage"]["completion_tokens"] == 20
    assert client.recv(1) == b"", "the server closes then"
    assert "keep-alive" not in response.headers


@pytest.mark.parametrize(
    "fields", [{}, {"n": 4}, {"stream": True}, {"n": 2, "best_of": 4}]
)
@pytest.mark.parametrize("is_halved", [False, True])
def test_a_client_that_leaves_is_noticed_soon(
    server: Running, fields: dict[str, Any], *, is_halved: bool
) -> None:
    """To a server, one that leaves looks like one that only listens."""
    if is_halved:
        client = ask(server, LONG | {"stream": False} | fields)
    else:
        client = server.start_post("/v1/completions", LONG | {"stream": False} | fields)
    until(lambda: server.engine.state.num_running > 0, "it runs")
    time.sleep(0.3 * is_halved)
    client.close()
    started_s = time.monotonic()
    until(server.is_idle, "all is free")
    assert time.monotonic() - started_s < 1.5


def test_a_client_that_leaves_before_its_request_is_whole_is_gone(
    server: Running,
) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    for sent in (b"", b"GET /v1", half):
        client = server.send_raw(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    client = ask(server, LONG | {"stream": False}, version="1.0")
    assert client.recv(100) == b"", "1.0 has no 100 Continue that would find out"
    until(server.is_idle, "all is free")


def test_answers_say_how_long_a_connection_stays_open(engine: fminfer.Engine) -> None:
    """It was 5 s, and unsaid: clients that came back after 5 s lost one in five requests."""
    assert ServerSettings().keep_alive_s == 75
    with running(engine, keep_alive_s=90.5) as server:
        for path, body in (
            ("/v1/completions", SHORT),
            ("/v1/completions", b"{"),
            ("/no", {}),
        ):
            assert server.post(path, body).headers["keep-alive"] == "timeout=90"
        stream = server.post("/v1/completions", SHORT | {"stream": True})
        assert stream.headers["keep-alive"] == "timeout=90"
        closing = server.get("/health", {"Connection": "Close"})
        assert "keep-alive" not in closing.headers
        old = server.send_raw(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"Keep-Alive" not in old.recv(4096)
        twice = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n"
        both = server.send_raw(twice + b"Connection: close\r\n\r\n")
        assert b"keep-alive" not in both.recv(4096).lower(), "it is closed"
    with running(engine, max_body_bytes=10) as server:
        refused = server.post("/v1/completions", b"x" * 11)
        assert (
            refused.headers["connection"] == "close"
            and "keep-alive" not in refused.headers
        )


@pytest.mark.parametrize("pipelines", [1, 2])
def test_an_idle_engine_hears_at_once_that_its_server_ends(
    pipelines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked five times a second."""
    monkeypatch.setattr("fminfer.server.dispatcher.IDLE_S", 60.0)
    engine = fminfer.Engine(device="cpu", data_group_size=pipelines)
    try:
        for _ in range(2):
            with running(engine) as server:
                assert server.post("/v1/completions", SHORT).status == 200
    finally:
        engine.close()


def test_pipelines_that_die_while_nothing_is_asked_end_the_server() -> None:
    """It went on, in good health, until somebody asked for something."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    server = Forked(
        ["serve", "--device", "cpu", "--port", "0", "--data-group-size", "2"], environ
    )
    try:
        until(
            lambda: "Ctrl-C" in server.said() or server.poll() is not None,
            "it has started",
        )
        children = (
            Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        )
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        _, err = server.communicate(timeout=60)
    finally:
        server.kill()
    assert server.returncode == 1 and "every pipeline has ended" in err

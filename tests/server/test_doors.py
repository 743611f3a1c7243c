"""Who may call, how much at once, and how a server ends."""

from __future__ import annotations

import gzip
import http.client
import re
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import PipelineError, UsageError
from fminfer.server.connections import open_socket
from fminfer.server.dispatcher import TOKENIZERS
from fminfer.server.http_errors import shutting_down_error
from fminfer.server.settings import ServerSettings
from tests.server.running import WAIT_S, Answer, Running, running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 4})
LOCKED = needs_server(
    engine={"max_rows": 4},
    api_keys=("k1", "k2"),
    allowed_origins=("https://a.example",),
)
KEYLESS = needs_server(engine={"max_rows": 4}, allowed_origins=("https://a.example",))
WITH_STATE = needs_server(engine={"max_rows": 4}, has_state=True)

LONG = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True}
WRONG_CHAT = (
    "/chat/completions",
    "/openai/v1/chat/completions",
    "/v1/v1/chat/completions",
    "/v1/chat/completions/chat/completions",
)
SHORT = {"prompt": [5] * 20, "max_tokens": 2}
KEY = {"Authorization": "Bearer k2"}
GUARDED = (
    *(
        ("POST", path)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")
    ),
    *(("POST", path) for path in ("/detokenize", "/generation", "/")),
    *(
        ("GET", path)
        for path in ("/v1/models", "/run/a", "/run_gpt/a", "/stats", "/metrics")
    ),
    ("GET", "/version"),
)


@LOCKED
@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_routes_that_compute_or_tell_need_a_key(
    server: Running, method: str, path: str
) -> None:
    for headers in ({}, {"Authorization": "Bearer k3"}, {"Authorization": "k1"}):
        answer = server.call(method, path, {}, headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"
    assert server.call(method, path, SHORT, KEY).status != 401


@LOCKED
def test_health_and_the_page_need_no_key(server: Running) -> None:
    for path in ("/health", "/", "/docs", "/openapi.json", "/page/page.js"):
        assert server.get(path).status == 200


@LOCKED
def test_pages_of_other_origins_cannot_call_unless_they_may(
    server: Running, engine: fminfer.Engine
) -> None:
    foreign = "https://b.example"
    own = f"http://{server.address[0]}:{server.address[1]}"
    for origin, status in ((foreign, 403), ("https://a.example", 200), (own, 200)):
        answer = server.post("/v1/completions", SHORT, KEY | {"Origin": origin})
        assert answer.status == status
        has_leave = "access-control-allow-origin" in answer.headers
        assert has_leave == (origin == "https://a.example")
    # as <img src> of another site asks for it
    picture = KEY | {"Sec-Fetch-Site": "cross-site"}
    assert server.get("/run/a", picture).status == 403
    assert server.get("/", picture).status == 200
    assert server.get("/run/a", KEY | {"Sec-Fetch-Site": "same-origin"}).status == 200
    assert (
        server.post("/v1/completions", SHORT, KEY | {"Origin": "http://["}).status
        == 403
    )
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert server.call("OPTIONS", "/v1/completions", None, asked).status == 200
    with running(engine) as other:
        assert other.post("/v1/completions", SHORT, {"Origin": foreign}).status == 403
        assert "access-control-allow-origin" not in other.get("/health").headers


@LOCKED
def test_a_named_pages_preflight_may_ask_for_this_machine(
    server: Running, engine: fminfer.Engine
) -> None:
    """Chrome asks so before a public page calls localhost, and was refused by a new default."""
    named = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    private = {"Access-Control-Request-Private-Network": "true"}
    answer = server.call("OPTIONS", "/v1/chat/completions", None, named | private)
    assert answer.status == 200
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    plain = server.call("OPTIONS", "/v1/files", None, named)
    assert (
        plain.status == 200
        and "access-control-allow-private-network" not in plain.headers
    )
    foreign = named | {"Origin": "https://b.example"}
    assert (
        server.call("OPTIONS", "/v1/completions", None, foreign | private).status == 400
    )
    with running(engine, allowed_origins=("*",)) as other:
        assert other.call("OPTIONS", "/v1/completions", None, named).status == 200
        refused = other.call("OPTIONS", "/v1/completions", None, named | private)
        assert refused.status == 400
        assert "access-control-allow-private-network" not in refused.headers


LOOPBACK = (
    "localhost",
    "LOCALHOST:{port}",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1:{port}",
    "127.9.8.7",
    "[::1]:{port}",
    "[0:0::1]",
    "[::ffff:127.0.0.1]:{port}",
    "[::FFFF:7f00:1]",
    "localhost:",
)
FOREIGN = (
    "evil.example:{port}",
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.evil",
    "localhost@evil.example",
    "evil@localhost",
    "localhost, evil.example",
    "",
    "0.0.0.0",
    "localhost:{port}:1",
    "localhost:x",
    "evil-localhost",
    "[::1",
    "[::2]",
    "::1",
    "localhost/",
    "[::1%25lo]",
    "[evil.example]",
    "localhost\\evil",
    "lócalhost",
    "192.168.0.1",
    "null",
    ".",
)


def ask_host(server: Running, host: str | None, head: str, *more: str) -> Answer:
    """Return the answer to a head whose Host is written by hand; None: without one."""
    host_line = [] if host is None else ["Host: " + host.format(port=server.address[1])]
    lines = [head, *host_line, *more, "", ""]
    connection = server.send_raw("\r\n".join(lines).encode("latin-1"))
    response = http.client.HTTPResponse(connection, method=head.split()[0])
    response.begin()
    answer = Answer(response.status, dict(response.headers), response.read())
    connection.close()
    return answer


@KEYLESS
@pytest.mark.parametrize("host", FOREIGN)
def test_a_page_whose_name_leads_here_cannot_call(server: Running, host: str) -> None:
    """Such a page (DNS rebinding) was taken for ours: its Origin was compared with its
    own Host."""
    own = (
        "Origin: http://evil.example",
        "Sec-Fetch-Site: same-origin",
        "X-Forwarded-Host: localhost",
    )
    answer = ask_host(server, host, "GET /v1/models HTTP/1.1", *own)
    assert answer.status == 403 and answer.error["code"] == "host_not_allowed"
    assert "--allow-host" in answer.error["message"] and answer.headers["x-request-id"]


@KEYLESS
@pytest.mark.parametrize("host", LOOPBACK)
def test_this_machine_may_call_by_each_of_its_names(server: Running, host: str) -> None:
    assert ask_host(server, host, "GET /v1/models HTTP/1.1").status == 200
    origin = "Origin: http://" + host.format(port=server.address[1])
    assert ask_host(server, host, "GET /v1/models HTTP/1.1", origin).status == 200


@KEYLESS
@pytest.mark.parametrize(
    "path", ["/", "/health", "/docs", "/page/page.js", "/openapi.json", "/no"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE", "BREW"])
def test_a_foreign_host_is_refused_on_every_route(
    server: Running, method: str, path: str
) -> None:
    """Preflights, too: their answer would let the page of an allowed origin call."""
    preflight = ("Origin: https://a.example", "Access-Control-Request-Method: POST")
    head = f"{method} {path} HTTP/1.1"
    answer = ask_host(server, "evil.example", head, *preflight, "Content-Length: 0")
    assert answer.status == 403 and "access-control-allow-origin" not in answer.headers
    assert (
        ask_host(server, "localhost", head, *preflight, "Content-Length: 0").status
        != 403
    )


@KEYLESS
def test_the_host_of_a_whole_address_counts_too(server: Running) -> None:
    for target, host, status in (
        ("http://evil.example/v1/models", "localhost", 403),
        ("HTTP://localhost@evil.example/health", "localhost", 403),
        ("http://localhost/v1/models", "evil.example", 403),
        ("http://localhost/v1/models", "localhost", 200),
    ):
        assert ask_host(server, host, f"GET {target} HTTP/1.1").status == status
    assert ask_host(server, None, "GET http://evil.example/ HTTP/1.0").status == 403
    assert ask_host(server, None, "GET /v1/models HTTP/1.0").status == 200, "no browser"


@KEYLESS
def test_each_of_two_requests_on_one_connection_names_its_host(
    server: Running,
) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: %s\r\n"
    two = (
        head % b"localhost"
        + b"\r\n"
        + head % b"evil.example"
        + b"Connection: close\r\n\r\n"
    )
    connection = server.send_raw(two)
    received = b""
    while piece := connection.recv(65536):
        received += piece
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"403"]


@KEYLESS
@pytest.mark.parametrize("path", ["/run/a", "/run_gpt/a", "/run/a/"])
def test_a_picture_on_a_page_elsewhere_computes_nothing(
    server: Running, path: str
) -> None:
    """Browsers name its site to https and localhost alone, not to [::ffff:127.0.0.1] or
    a LAN."""
    browser = (
        "User-Agent: Mozilla/5.0 (X11) Chrome/150.0",
        "Accept-Language: en-US,en;q=0.9",
    )
    powershell = ["User-Agent: Mozilla/5.0 (Windows NT; en-US) PowerShell/7.4"]
    for method in ("GET", "HEAD"):
        for headers, status in (
            (browser, 403),
            ((*browser, "Sec-Fetch-Site: cross-site"), 403),
            ((*browser, "Sec-Fetch-Site: none"), 200),  # its user has typed the address
            (powershell, 200),
        ):
            head = f"{method} {path} HTTP/1.1"
            answer = ask_host(server, "[::ffff:7f00:1]:{port}", head, *headers)
            assert answer.status == status, headers
    for path in ("/", "/stats"):
        assert (
            ask_host(server, "localhost", f"GET {path} HTTP/1.1", *browser).status
            == 200
        )


def test_a_page_without_an_origin_of_its_own_is_not_ours(
    engine: fminfer.Engine,
) -> None:
    """An empty Host was equal to the place of an Origin that has none."""
    with running(engine, host="0.0.0.0") as server:
        for origin in ("null", "file://", "data:x"):
            asked = ask_host(server, "", "GET /v1/models HTTP/1.1", f"Origin: {origin}")
            assert asked.status == 403 and asked.error["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({"api_keys": ("k2",)}, {"evil.example": 200}),
        ({"host": "0.0.0.0"}, {"evil.example": 200}),
        (
            {
                "allowed_hosts": (
                    "LLM.example.org",
                    "b.example:8443",
                    "c.example:443",
                    "[fd00::1]",
                )
            },
            {"llm.example.org": 200, "llm.example.org.:9": 200, "b.example:8443": 200}
            | {
                "b.example": 403,
                "b.example:8444": 403,
                "c.example": 200,
                "[FD00:0::1]:7": 200,
            }
            | {"evil.example": 403, "a.llm.example.org": 403, "localhost": 200},
        ),
        (
            {"allowed_hosts": ("llm.example.org",), "api_keys": ("k2",)},
            {"llm.example.org": 200, "evil.example": 403},
        ),
        (
            {"allowed_hosts": ("llm.example.org",), "host": "0.0.0.0"},
            {"llm.example.org": 200, "evil.example": 403, "127.0.0.1": 200},
        ),
    ],
)
def test_hosts_that_are_named(
    engine: fminfer.Engine, settings: dict[str, Any], hosts: dict[str, int]
) -> None:
    """A key tells pages from clients, and the world may know a server by any name."""
    key = f"Authorization: {KEY['Authorization']}"
    with running(engine, **settings) as server:
        for host, status in hosts.items():
            assert (
                ask_host(server, host, "GET /v1/models HTTP/1.1", key).status == status
            ), host


def test_a_machines_own_name_may_be_its_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian writes it so into /etc/hosts: such a server was taken for one that others reach."""

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], 0))]

    found = {"mybox": "127.0.1.1", "outside": "192.0.2.1"}
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert ServerSettings("mybox").hosts == {("mybox", "")}
    assert ServerSettings("outside").hosts is None
    found["::ffff:127.0.0.1"] = "::ffff:127.0.0.1"
    assert ServerSettings("::ffff:127.0.0.1").is_loopback


@LOCKED
def test_a_request_keeps_its_id(server: Running) -> None:
    assert (
        server.get("/health", {"x-request-id": "abc-1"}).headers["x-request-id"]
        == "abc-1"
    )
    made = {
        server.get("/health", {"x-request-id": wrong}).headers["x-request-id"]
        for wrong in ("", "a b", "x" * 200)
    }
    assert len(made) == 3 and all(len(each) == 32 for each in made)
    assert server.get("/nothing", KEY).headers["x-request-id"]


def test_a_full_queue_says_when_to_come_back(engine: fminfer.Engine) -> None:
    with running(engine, queue_size=3) as server:
        connections = []
        for num_rows in range(1, 5):  # one by one: more than three must not wait
            connections.append(server.start_post("/v1/completions", LONG))
            until(lambda n=num_rows: engine.state.num_running == n, "it has a row")  # type: ignore[misc]
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
    engine: fminfer.Engine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    """Any number of long texts was tokenized at once, and none was refused."""
    prepare = engine.prepare
    goes_on = threading.Event()
    begun = []

    def prepare_late(*args: Any, **options: Any) -> Any:
        begun.append(args)
        assert goes_on.wait(WAIT_S)
        return prepare(*args, **options)

    monkeypatch.setattr(engine, "prepare", prepare_late)
    with (
        running(engine, queue_size=TOKENIZERS + 1) as server,
        ThreadPoolExecutor() as asking,
    ):
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
            server.thread.service.dispatcher.close, shutting_down_error()
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
        assert server.get("/v1/models//").status == 404
        assert (
            server.post("/", {"inputs": "a", "parameters": 0}).error["param"]
            == "parameters"
        )
        answer = server.get("/v1/engines")
        assert answer.status == 404 and "/docs" in answer.error["message"]
        answer = server.get("/v1/completions")
        assert answer.status == 405 and answer.headers["allow"] == "POST"
        assert "use POST" in answer.error["message"]
        assert server.get("/run/a?max_seq_length=x").error["param"] == "max_seq_length"


GETS = (
    "/v1/models",
    "/v1/models/fminfer-demo",
    "/v1/files",
    "/v1/batches",
    "/health",
    "/stats",
)


@WITH_STATE
@pytest.mark.parametrize(
    "path", [*GETS, "/version", "/metrics", "/run/a", "/docs", "/", "/page/page.js"]
)
def test_every_get_has_its_head(server: Running, path: str) -> None:
    """Only /health and the page had: proxies and monitors that ask by HEAD got a 405."""
    answer = server.get(path)
    head = server.call("HEAD", path)
    assert (head.status, head.body) == (answer.status, b"") and answer.body
    assert head.headers["content-type"] == answer.headers["content-type"]
    assert server.call("HEAD", "/v1/completions").status == 405


@WITH_STATE
@pytest.mark.parametrize("path", [*GETS, "/version", "/openapi.json"])
def test_a_slash_at_the_end_of_a_path_is_passed_over(
    server: Running, path: str
) -> None:
    assert server.get(path + "/").status == 200


@WITH_STATE
def test_a_slash_at_the_end_of_a_posts_path(server: Running) -> None:
    assert server.post("/v1/completions/", SHORT).status == 200
    assert server.post("/tokenize/", {"prompt": "a"}).status == 200
    for path in ("/v1/completions//", "//v1/completions", "/v1//completions/"):
        assert server.post(path, SHORT).status == 200, "a base URL ended with a slash"
    assert server.get("/run/a/").json[0].startswith("a/"), "there it is the text's"
    docs = server.get("/docs/")  # whose addresses are relative
    assert (docs.status, docs.headers["location"]) == (307, "../docs")


@WITH_STATE
@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate, gzip", "br", "zstd"])
def test_a_compressed_body_is_told(server: Running, coding: str) -> None:
    """The message was that byte 1 was no UTF-8."""
    for path in ("/v1/completions", "/v1/files"):
        answer = server.post(path, gzip.compress(b"{}"), {"Content-Encoding": coding})
        assert (
            answer.status == 415 and "send it uncompressed" in answer.error["message"]
        )
        assert answer.headers["accept-encoding"] == "identity"
    assert (
        server.post(
            "/tokenize", {"prompt": "a"}, {"Content-Encoding": "identity"}
        ).status
        == 200
    )


@WITH_STATE
def test_a_byte_order_mark_before_a_body_is_passed_over(server: Running) -> None:
    assert server.post("/v1/completions", b'\xef\xbb\xbf{"prompt": "a"}').status == 200
    assert server.post("/v1/completions", b'{"prompt": "a"}\xef\xbb\xbf').status == 400


@WITH_STATE
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/responses/resp_1", "no response is kept; POST /v1/responses"),
        ("/v1/messages", "send messages to /v1/chat/completions"),
        ("/api/chat", "send messages to /v1/chat/completions"),
        ("/generate", "send a prompt to /v1/completions"),
        ("/embeddings", "it is at /v1/embeddings; set the base_url"),
        ("/pooling", "send texts to /v1/embeddings"),
        *(
            (path, "texts with texts and vectors")
            for path in ("/v1/audio/speech", "/v1/images")
        ),
        ("/v1/vector_stores/v/files", "texts with texts and vectors"),
        *(
            (path, "it is at /v1/chat/completions; set the base_url")
            for path in WRONG_CHAT
        ),
        ("/v1/v1/completions", "it is at /v1/completions; set the base_url"),
        ("/models", "it is at /v1/models; set the base_url"),
        ("/v1/tokenize", "it is at /tokenize. "),
        ("/v1/responses/resp_1/cancel", "no response is kept; POST /v1/responses"),
        ("/responses", "it is at /v1/responses; set the base_url"),
        ("/v1/nothing", "there is no /v1/nothing; /docs lists what there is"),
        (
            "/v1/" + "n" * 3000,
            f"there is no /v1/{'n' * 196}; /docs lists what there is",
        ),
        ("/v1/nothing//", "there is no /v1/nothing; /docs lists what there is"),
        ("/docs/nothing/", "there is no /docs/nothing/; /docs lists what there is"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PATCH"])
def test_what_is_not_there_is_told_with_what_is(
    server: Running, method: str, path: str, told: str
) -> None:
    """A wrong base_url is the first thing that goes wrong with a client, and got a bare 404."""
    answer = server.call(method, path, {})
    assert answer.status == 404 and answer.error["code"] == "unknown_url"
    message = answer.error["message"]
    assert told in message and message.endswith("/docs lists what there is")
    if "base_url" in told:
        assert f" {server.url}/v1. " in message


@WITH_STATE
def test_a_path_of_many_parts_costs_nothing(server: Running) -> None:
    """One of 60,000 bytes took 10 s of the event loop and 2.5 GB: each of its ends was
    written."""
    tracemalloc.start()
    try:
        assert server.get("/" + "a/" * 5000).error["code"] == "unknown_url"
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


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
        until(lambda: engine.state.num_running == 3, "both run")
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
        until(lambda: not server.thread.is_alive(), "it has ended")
        assert time.monotonic() - started_s < 3
        idle.close()


def test_a_failed_engine_turns_health_red_and_ends_the_server(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine) as server:
        stream = server.start_post("/v1/completions", LONG | {"stream": True})
        waiting = server.start_post("/v1/completions", LONG)
        until(lambda: engine.state.num_running == 2, "both run")

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
        until(lambda: not server.thread.is_alive(), "the server has ended")
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
        for sent in (
            b"",
            b"POST /v1/comp",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        ):
            connection = server.send_raw(sent)
            assert connection.recv(100) == b""
        half = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            b"100\r\n\r\n{"
        )
        received = server.send_raw(half).recv(100)
        assert received.startswith(b"HTTP/1.1 408")


def test_an_address_in_use_is_told_before_a_model_is_loaded() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="--port"),
    ):
        open_socket(ServerSettings(port=taken.getsockname()[1]))


def test_what_the_doors_refuse_is_counted(engine: fminfer.Engine) -> None:
    """Foreign hosts, wrong keys and compressed bodies stood in no figure."""
    with running(engine, api_keys=("key",), allowed_hosts=("llm.example",)) as server:
        server.get("/v1/models", {"Host": "evil.example"})
        server.get("/v1/models")
        text = server.get("/metrics", {"Authorization": "Bearer key"}).body.decode()
    for status in (401, 403):
        assert f'status="{status}"}} 1.0' in text

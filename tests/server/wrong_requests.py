"""Requests that are wrong in their fields, in their JSON, or as HTTP; and what may come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .good_requests import PATH
from .raw_http import Response, connect, write_chunked, write_post

CLOSED = 0  # the server closed the connection without an answer
LARGE = 50 * 2**20


@dataclass(slots=True, frozen=True)
class Wrong:
    """A wrong request: its bytes, and the statuses that are right for it.

    `has_end` is false where the server must wait for more, and the client leaves instead.
    """

    name: str
    write: Callable[[], bytes]
    statuses: frozenset[int]
    has_end: bool = True


def _body(name: str, body: bytes, *statuses: int) -> Wrong:
    return Wrong(name, lambda: write_post(PATH, body), frozenset(statuses or (400,)))


def _fields(name: str, **fields: Any) -> Wrong:
    return _body(name, json.dumps({"prompt": "x"} | fields).encode())


def _raw(name: str, data: bytes, *statuses: int, has_end: bool = True) -> Wrong:
    return Wrong(name, lambda: data, frozenset(statuses), has_end)


def _head(*lines: str) -> bytes:
    return "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "Host: localhost", *lines, "", ""]
    ).encode()


FIELDS = [
    _fields("prompt is an object", prompt={"a": 1}),
    _fields("prompt is empty", prompt=[]),
    _fields("no such token", prompt=[10**12]),
    _fields("negative token", prompt=[-1]),
    _fields("prompt too long", prompt=[1] * 100_000),
    _fields("prompts of two kinds", prompt=["x", 1]),
    _fields("max_tokens is text", max_tokens="many"),
    _fields("max_tokens is huge", max_tokens=10**400),
    _fields("n is negative", n=-3),
    _fields("n is huge", n=10**9),
    _fields("temperature is a list", temperature=[1]),
    _fields("temperature is NaN", temperature=float("nan")),
    _fields("top_p is infinite", top_p=float("inf")),
    _fields("logprobs is a thousand", logprobs=1000),
    _fields("stop is a number", stop=5),
    _fields("stream is a text", stream="yes"),
    _fields("seed is a float", seed=0.5),
    _fields("logit_bias is a list", logit_bias=[1, 2]),
    _body("no prompt", b"{}"),
    _body("no JSON", b"prompt=x"),
    _body("half of JSON", b'{"prompt": "x'),
    _body("a list", b"[1, 2]"),
    _body("no body", b""),
    _body("no UTF-8", b'{"prompt": "\xff\xfe"}'),
    _body("nested lists", b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    _body("nested objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    _body("zeros", bytes(1000)),
]
ROUTES = [
    _raw("no such route", b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    _raw(
        "a path up", b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404
    ),
    _raw(
        "zero in the path",
        b"GET /%00/%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        400,
        404,
    ),
    _raw(
        "wrong method",
        b"DELETE /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
        405,
    ),
    _raw(
        "unknown method",
        b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
        400,
        405,
    ),
    _raw(
        "websocket",
        b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        400,
        404,
        405,
        426,
    ),
]
PROTOCOL = [
    _raw("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 30, 400, CLOSED),
    _raw("a line of nothing", b"\r\n\r\n\r\n\r\n", 400, CLOSED, has_end=False),
    _raw(
        "HTTP 9",
        b"GET /nope HTTP/9.9\r\nHost: localhost\r\n\r\n",
        400,
        404,
        505,
        CLOSED,
    ),
    _raw(
        "two lengths",
        _head("Content-Length: 5", "Content-Length: 7") + b"12345",
        400,
        CLOSED,
    ),
    _raw("negative length", _head("Content-Length: -1"), 400, CLOSED),
    _raw("length is text", _head("Content-Length: five") + b"12345", 400, CLOSED),
    _raw("length too small", _head("Content-Length: 2") + b'{"prompt": "x"}', 400),
    _raw(
        "bad chunk", _head("Transfer-Encoding: chunked") + b"zz\r\nx\r\n", 400, CLOSED
    ),
    _raw(
        "endless line",
        b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n",
        400,
        414,
        431,
        CLOSED,
    ),
    _raw("large header", _head("X-Large: " + "a" * 300_000), 400, 431, CLOSED),
    _raw(
        "many headers", _head(*(f"X-{i}: {i}" for i in range(20_000))), 400, 431, CLOSED
    ),
    _raw(
        "length too large", _head("Content-Length: 99") + b"{}", CLOSED, has_end=False
    ),
    _raw("half a head", b"POST /v1/compl", CLOSED, has_end=False),
    _raw(
        "half a chunk",
        _head("Transfer-Encoding: chunked") + b"ff\r\nx",
        CLOSED,
        has_end=False,
    ),
]
BODIES = [  # 50 MB, so that few of them are sent
    Wrong("large body", lambda: write_post(PATH, b"[" * LARGE), frozenset({413})),
    Wrong(
        "large chunked body",
        lambda: write_chunked(PATH, [b" " * 2**20] * (LARGE // 2**20)),
        frozenset({413}),
    ),
    Wrong(
        "large prompt",
        lambda: write_post(PATH, b'{"prompt": "' + b"x" * LARGE + b'"}'),
        frozenset({413}),
    ),
]
SMALL = FIELDS + ROUTES + PROTOCOL


async def ask_wrong(port: int, wrong: Wrong, rng: random.Random) -> None:
    """Send a wrong request.

    Raises:
        AssertionError: the answer has a status that is not right, or no OpenAI error in it.
    """
    async with connect(port) as wire:
        sending = asyncio.create_task(wire.send(wrong.write()))
        try:
            if not wrong.has_end:
                await asyncio.sleep(rng.uniform(0, 0.2))
                return
            check_refusal(wrong, await wire.receive())
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending


def check_refusal(wrong: Wrong, response: Response) -> None:
    """Check what came back.

    Raises:
        AssertionError: it is not right.
    """
    told = f"{wrong.name}: {response.status} {response.body[:300]!r}"
    assert response.status in wrong.statuses, told
    if response.headers.get("content-type", "").startswith("application/json"):
        assert response.json["error"]["message"], told
    elif response.status != CLOSED:
        # what the HTTP library refuses has a line of text
        assert wrong in PROTOCOL, told

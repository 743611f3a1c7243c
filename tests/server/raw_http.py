"""HTTP by hand, so that a request may be as wrong as one likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 120.0
HOST = "127.0.0.1"


@dataclass(slots=True, frozen=True)
class Response:
    """What came back; status 0: the server closed the connection without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


NO_RESPONSE = Response(0, {}, b"")


@dataclass(slots=True)
class Wire:
    """One connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> Response:
        """Read one whole response."""
        return await asyncio.wait_for(self._receive(), TIMEOUT_S)

    async def _receive(self) -> Response:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return NO_RESPONSE
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.lower(): value.strip() for name, value in pairs}
        status = int(first.split()[1])
        try:
            return Response(status, headers, await self._read_body(headers))
        except (asyncio.IncompleteReadError, ConnectionError):
            return Response(status, headers, b"")

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        pieces = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pieces.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return b"".join(pieces)


@contextlib.asynccontextmanager
async def connect(port: int, receive_bytes: int | None = None) -> AsyncIterator[Wire]:
    """Open a connection, and close it at the end, whatever state it is in.

    Args:
        receive_bytes: of the socket's buffer, for readers that are to block soon.
    """
    reader, writer = await asyncio.open_connection(
        HOST, port, limit=receive_bytes or 2**16
    )
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()  # no wait for what the server may still read


async def get(port: int, path: str) -> Response:
    """Return what a path gives."""
    async with connect(port) as wire:
        await wire.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return await wire.receive()


def write_post(path: str, body: bytes, *more: str) -> bytes:
    """Return a POST as it goes over the wire.

    Args:
        more: header lines beside those that are right.
    """
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
    ]
    lines += [f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def write_chunked(path: str, pieces: list[bytes]) -> bytes:
    """Return a POST with a chunked body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
    ]
    head = "\r\n".join([*lines, "Transfer-Encoding: chunked"]).encode() + b"\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


def read_events(body: bytes) -> list[Any]:
    """Return the objects of a stream.

    Raises:
        AssertionError: it has no [DONE] at its end.
    """
    lines = [
        line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")
    ]
    assert lines and lines[-1] == b"[DONE]", (
        f"a stream without its end: {body[-200:]!r}"
    )
    return [json.loads(line) for line in lines[:-1]]

"""The client of serve.py: many requests over plain sockets, in a closed loop, at little cost.

Server and client share the machine's cores, so it does as little as it can while it measures:
each connection notes when bytes come, and all are parsed once the last answer is in. It
needs the standard library only: `python serve_client.py JOB.json` reads the server's port, the
requests, the number of clients and whether answers are streamed, and prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAST_CHUNK = b"\r\n0\r\n\r\n"
LIMIT_S = 600.0  # for one answer


@dataclass(slots=True, frozen=True)
class Exchange:
    """One request on the wire: when it was sent, and which bytes came when."""

    number: int
    sent_s: float
    arrivals: list[tuple[float, bytes]]


@dataclass(slots=True, frozen=True)
class Answer:
    """What came back for a request; times are seconds from when it was sent."""

    number: int
    text: str
    num_tokens: int
    # of each event with text; without a stream, of the whole answer.
    event_s: list[float]
    # Empty where no text comes: a random model may repeat half of a character.


class Connection(asyncio.Protocol):
    """A connection that is kept, and has one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._arrivals: list[tuple[float, bytes]] = []
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        # bytes; None: the head is not in, or it is chunked
        self._missing: int | None = None
        self._has_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrivals.append((time.perf_counter(), data))
        if self._has_head:
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            if self._missing is not None:
                self._missing -= len(data)
        else:
            self._read_head()
        is_complete = (
            self._missing == 0 if self._missing is not None else self._is_last_chunk()
        )
        if (
            self._has_head
            and is_complete
            and self._done is not None
            and not self._done.done()
        ):
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(
                exc or ConnectionError("the server closed the connection")
            )

    async def ask(self, number: int, payload: bytes) -> Exchange:
        """Send a request and wait until its whole answer is in."""
        assert self.transport is not None, "connected first"
        self._arrivals = []
        self._tail = b""
        self._missing = None
        self._has_head = False
        self._done = asyncio.get_running_loop().create_future()
        sent_s = time.perf_counter()
        self.transport.write(payload)
        await asyncio.wait_for(self._done, LIMIT_S)
        return Exchange(number, sent_s, self._arrivals)

    def _read_head(self) -> None:
        raw = b"".join(data for _, data in self._arrivals)
        head, found, body = raw.partition(b"\r\n\r\n")
        if not found:
            return
        self._has_head = True
        self._tail = raw[-len(LAST_CHUNK) :]
        length = read_headers(head).get("content-length")
        self._missing = None if length is None else int(length) - len(body)

    def _is_last_chunk(self) -> bool:
        return self._tail == LAST_CHUNK


def read_headers(head: bytes) -> dict[str, str]:
    """Return a head's fields, names in lower case."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.split(":", 1) for line in lines)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def write_request(path: str, fields: dict[str, Any]) -> bytes:
    """Return a POST of JSON as it goes over the wire."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read_answer(exchange: Exchange, is_streamed: bool) -> Answer:
    """Parse what came for a request.

    Raises:
        ValueError: the server refused it, or the stream is not whole.
    """
    raw = b"".join(data for _, data in exchange.arrivals)
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"request {exchange.number}: {raw[:500]!r}")
    if is_streamed:
        return _read_stream(exchange, len(head) + 4)
    if "content-length" not in read_headers(head):
        body = b"".join(piece for _, piece in _chunks(exchange, len(head) + 4))
    result = json.loads(body)
    took_s = exchange.arrivals[-1][0] - exchange.sent_s
    (choice,) = result["choices"]
    tokens = result["usage"]["completion_tokens"]
    return Answer(exchange.number, choice["text"], tokens, [took_s])


def _read_stream(exchange: Exchange, first: int) -> Answer:
    """Parse server-sent events; each has the time when its last byte came."""
    text = []
    event_s = []
    num_tokens = None
    left = b""
    for at_s, piece in _chunks(exchange, first):
        *events, left = (left + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:") or event == b"data: [DONE]":
                continue  # a sign of life, or the end
            fields = json.loads(event[5:])
            if "error" in fields:
                raise ValueError(f"request {exchange.number}: {event[:500]!r}")
            if fields.get("usage"):
                num_tokens = fields["usage"]["completion_tokens"]
            if fields["choices"] and fields["choices"][0]["text"]:
                text.append(fields["choices"][0]["text"])
                event_s.append(at_s - exchange.sent_s)
    if num_tokens is None or left:
        raise ValueError(
            f"request {exchange.number}: a stream without its usage or its end"
        )
    return Answer(exchange.number, "".join(text), num_tokens, event_s)


def _chunks(exchange: Exchange, first: int) -> Iterator[tuple[float, bytes]]:
    """Yield the chunks of a chunked body, each with the time when its last byte came.

    Args:
        first: where in the bytes the body begins.
    """
    raw = b"".join(data for _, data in exchange.arrivals)
    arrivals = iter(exchange.arrivals)
    at_s = 0.0
    num_in = 0
    while True:
        line_end = raw.index(b"\r\n", first)
        size = int(raw[first:line_end].split(b";")[0], 16)
        end = line_end + 2 + size
        while num_in < end:
            at_s, data = next(arrivals)
            num_in += len(data)
        if size == 0:
            return
        yield at_s, raw[line_end + 2 : end]
        first = end + 2


async def run_clients(
    port: int, payloads: list[bytes], num_clients: int
) -> tuple[float, list[Exchange]]:
    """Send all requests, each client its next one when it has an answer; return seconds
    and all."""
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(Connection, "127.0.0.1", port)
        for _ in range(num_clients)
    ]
    waiting = iter(enumerate(payloads))
    done: list[Exchange] = []

    async def run_client(connection: Connection) -> None:
        for number, payload in waiting:
            done.append(await connection.ask(number, payload))

    started = time.perf_counter()
    await asyncio.gather(*(run_client(connection) for _, connection in made))
    wall_s = time.perf_counter() - started
    for transport, _ in made:
        transport.close()
    return wall_s, done


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job's requests; return its seconds, the client's own CPU seconds, and the
    answers."""
    how: dict[str, Any] = {}
    if job["is_streamed"]:
        how = {"stream": True, "stream_options": {"include_usage": True}}
    payloads = [
        write_request("/v1/completions", fields | how) for fields in job["requests"]
    ]
    gc.disable()  # a pause of the client would look like one of the server
    before_s = time.process_time()
    wall_s, exchanges = asyncio.run(
        run_clients(job["port"], payloads, job["num_clients"])
    )
    cpu_s = time.process_time() - before_s
    answers = [read_answer(exchange, job["is_streamed"]) for exchange in exchanges]
    answers.sort(key=lambda answer: answer.number)
    return {
        "wall_s": wall_s,
        "client_cpu_s": cpu_s,
        "answers": [asdict(a) for a in answers],
    }


if __name__ == "__main__":
    print(json.dumps(run_job(json.loads(Path(sys.argv[1]).read_text()))))

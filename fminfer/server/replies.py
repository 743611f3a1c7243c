"""Events of one request, waited for or sent to its client as server-sent events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fminfer.contract.json_object import dump_json
from fminfer.engine.engine_core import Delta, Event, Failed, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.server.http_errors import (
    HttpError,
    describe_error,
    make_error_response,
    to_http_error,
)

# between looks for silence, so that signs of life come within twice that
KEEP_ALIVE_S = 5.0
MOST_AT_ONCE = 64  # chunks that are written before others have their turn
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx then passes each event on at once
}
Result = TypeVar("Result")


class Reply:
    """The events of one request, in the event loop's thread; `forget` is called at its end."""

    def __init__(
        self,
        request_id: int,
        arrival_s: float,
        prepared: PreparedRequest,
        forget: Callable[[int], None],
    ) -> None:
        self.id = request_id
        self.prepared = prepared
        self.arrival_s = arrival_s  # in time.perf_counter(), when the request came
        self.token_s: dict[int, float] = {}  # by choice: when its last token came
        self._forget = forget
        self._events: list[Event | HttpError] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_silent = True  # since the last beat

    def push(self, event: Event | HttpError) -> None:
        """Add an event, and wake who waits for it."""
        self._events.append(event)
        self._is_silent = False
        self._wake_waiter()

    async def wake_when_silent(self, pause_s: float) -> None:
        """End each wait in which nothing has come from one beat to the next."""
        while True:
            await asyncio.sleep(pause_s)
            if self._is_silent:
                self._wake_waiter()
            self._is_silent = True

    async def wait_for_events(self) -> list[Event]:
        """Return the events since the last call; wait for one if there is none.

        `wake_when_silent` may end the wait without an event.

        Raises:
            HttpError: there is no answer.
        """
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events: list[Event] = []
        for event in self._events:
            if isinstance(event, Failed):
                event = to_http_error(event.error)
            if isinstance(event, HttpError):
                # what came before it goes first
                self._events = [event] if events else []
                if events:
                    return events
                raise event
            events.append(event)
        self._events = []
        return events

    async def wait_for_answer(self, receive: Receive) -> Finished:
        """Wait for the answer of a request that is not streamed, while its client does."""
        return await self.run_until_left(self._wait_for_finished(), receive)

    async def run_until_left(
        self, work: Coroutine[Any, Any, Result], receive: Receive
    ) -> Result:
        """Do the client's work, but end it if the client leaves; then forget the request."""
        try:
            return await run_while_connected(work, receive)
        finally:
            self._forget(self.id)

    async def _wait_for_finished(self) -> Finished:
        while True:
            for event in await self.wait_for_events():
                if isinstance(event, Finished):
                    return event

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamShape(ABC):
    """Turns a reply's events into the chunks of a stream."""

    end = DONE  # what stands behind the last chunk

    @abstractmethod
    def make_chunks(self, events: list[Event]) -> Iterable[object]:
        """Make chunks of JSON. No events become an empty chunk, as a sign of life.

        Comments and empty events would not do: older clients in Go end there, others join
        them to the next event.
        """

    def make_error(self, error: HttpError) -> object:
        """Make the chunk of an error in the middle of a stream."""
        return describe_error(error)

    def format_chunk(self, chunk: Any) -> bytes:
        """Return a chunk as a server-sent event."""
        return format_event(chunk)


class EventStream(Response):
    """Sends a reply's events as chunks of JSON, to the end or until its client leaves."""

    def __init__(self, reply: Reply, shape: StreamShape) -> None:
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]  # of the empty body
        self._reply = reply
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        with suppress(HttpError):  # the client has left
            await self._reply.run_until_left(
                self._send_all(scope, receive, send), receive
            )

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        beating = asyncio.create_task(self._reply.wake_when_silent(KEEP_ALIVE_S))
        try:
            events = await self._reply.wait_for_events()
        except HttpError as error:  # one that comes soon still has a status of its own
            await make_error_response(error)(scope, receive, send)
        else:
            await self._send_stream(send, events)
        finally:
            beating.cancel()

    async def _send_stream(self, send: Send, events: list[Event]) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        )
        try:
            await self._send_events(send, events)
        except HttpError as error:
            await _send_body(
                send, self._shape.format_chunk(self._shape.make_error(error))
            )
        await _send_body(send, self._shape.end, is_last=True)

    async def _send_events(self, send: Send, events: list[Event]) -> None:
        while True:
            chunks = map(self._shape.format_chunk, self._shape.make_chunks(events))
            while body := b"".join(islice(chunks, MOST_AT_ONCE)):
                await _send_body(send, body)
                await asyncio.sleep(0)
            if events and not isinstance(events[-1], Delta):
                return
            events = await self._reply.wait_for_events()


async def run_while_connected(
    work: Coroutine[Any, Any, Result], receive: Receive
) -> Result:
    """Do a client's work, but end it if the client leaves, by an HttpError."""
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HttpError(499, "the client has left", code="cancelled")
    finally:
        for task in (leaving, working):
            task.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


def format_event(value: object) -> bytes:
    """Return a JSON value as a server-sent event."""
    return b"data: " + dump_json(value) + b"\n\n"


def _send_body(send: Send, body: bytes, *, is_last: bool = False) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""Server-sent events: a response whose parts go out as the engine finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fminfer.contract.json_object import dump
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.server.dispatcher import Dispatcher
from fminfer.server.http_errors import HttpError, describe, respond
from fminfer.server.reply import Reply

KEEP_ALIVE_S = 10.0  # between signs of life while a request waits
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b"\n\n"  # no comment: clients that strip pieces would join it to the next event
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx then passes each event on at once
}

MakeChunks = Callable[[list[Event]], Iterable[object]]


def as_event(value: object) -> bytes:
    """Return a JSON value as a server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


class EventStream(Response):
    """Sends the events of a reply until its answer is whole or its client has left.

    Args:
        make_chunks: turns events into the JSON values that are sent.
    """

    def __init__(self, dispatcher: Dispatcher, reply: Reply, make_chunks: MakeChunks) -> None:
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]  # of the empty body
        self._dispatcher = dispatcher
        self._reply = reply
        self._make_chunks = make_chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        leaving = asyncio.create_task(_until_left(receive))
        sending = asyncio.create_task(self._send_all(scope, receive, send))
        try:
            await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._dispatcher.leave(self._reply)
            for task in (leaving, sending):
                task.cancel()
            await asyncio.gather(leaving, sending, return_exceptions=True)
            self._reply.close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:  # an error that comes soon still has a status of its own
            events = await self._reply.take(KEEP_ALIVE_S)
        except HttpError as error:
            await respond(error)(scope, receive, send)
            return
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        try:
            await self._send_events(send, events)
        except HttpError as error:
            await _send_body(send, as_event(describe(error)))
        await _send_body(send, DONE, is_last=True)

    async def _send_events(self, send: Send, events: list[Event]) -> None:
        while True:
            body = b"".join(map(as_event, self._make_chunks(events)))
            if body or not events:
                await _send_body(send, body or KEEP_ALIVE)
            if events and not isinstance(events[-1], Delta):
                return
            events = await self._reply.take(KEEP_ALIVE_S)


def _send_body(send: Send, body: bytes, *, is_last: bool = False) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _until_left(receive: Receive) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_answered(dispatcher: Dispatcher, reply: Reply, receive: Receive) -> Finished:
    """Wait for a request's answer; forget the request if its client leaves.

    Raises:
        HttpError: there is none, or nobody is left to have it.
    """
    leaving = asyncio.create_task(_until_left(receive))
    finishing = asyncio.create_task(reply.finish())
    try:
        await asyncio.wait({leaving, finishing}, return_when=asyncio.FIRST_COMPLETED)
        if finishing.done():
            return finishing.result()
        raise HttpError(499, "the client has left", code="cancelled")
    finally:
        dispatcher.leave(reply)
        for task in (leaving, finishing):
            task.cancel()
        await asyncio.gather(leaving, finishing, return_exceptions=True)

"""The events of one request, from the engine to the route that waits for them."""

from __future__ import annotations

import asyncio
import math

from fminfer.engine.engine_core import Event, Failed, Finished
from fminfer.engine.sequence import Prepared
from fminfer.server.http_errors import HttpError, as_http


class Reply:
    """The events of one request, in the event loop's thread."""

    def __init__(self, request_id: int, asked_s: float, prepared: Prepared) -> None:
        self.id = request_id
        self.prepared = prepared
        self.asked_s = asked_s  # of time.perf_counter, when the request came
        self.token_s: dict[int, float] = {}  # by choice: when its last token came
        self._events: list[Event | HttpError] = []
        self._waiter: asyncio.Future[None] | None = None
        self._due_s = math.inf  # of the event loop's time: when its wait ends without an event
        self._timer: asyncio.TimerHandle | None = None

    def push(self, event: Event | HttpError) -> None:
        """Add an event, and wake who waits for it."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float | None = None) -> list[Event]:
        """Return the events since the last call; wait for one, or until the timeout.

        Raises:
            HttpError: there is no answer.
        """
        if not self._events:
            await self._wait(timeout_s)
        events: list[Event] = []
        for event in self._events:
            if isinstance(event, Failed):
                event = as_http(event.error)
            if isinstance(event, HttpError):
                self._events = [event] if events else []  # what came before it goes first
                if events:
                    return events
                raise event
            events.append(event)
        self._events = []
        return events

    async def finish(self) -> Finished:
        """Wait for the answer of a request that is not streamed.

        Raises:
            HttpError: there is none.
        """
        while True:
            for event in await self.take():
                if isinstance(event, Finished):
                    return event

    def close(self) -> None:
        """End its timer, which would hold it for a while."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._due_s = math.inf if timeout_s is None else loop.time() + timeout_s
        if self._timer is not None and self._timer.when() > self._due_s:
            self.close()
        if timeout_s is not None and self._timer is None:
            self._timer = loop.call_at(self._due_s, self._end_wait)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _end_wait(self) -> None:
        """End a wait that is due. One timer serves many waits, for there is one a token."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets a timer
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due_s:
            self._waiter.set_result(None)
        elif self._due_s < math.inf:
            self._timer = loop.call_at(self._due_s, self._end_wait)

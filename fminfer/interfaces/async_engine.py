"""`AsyncEngine`: requests of an event loop, answered by an engine in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from typing import Any

from typing_extensions import Self

from fminfer.contract.envelope import make_line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, PipelineError, UsageError
from fminfer.engine.engine_core import Delta, Event, Failed, Finished
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.line_intake import LineRequest, RecordForm

IDLE_S = 0.2  # between looks whether an idle team has lost a pipeline
AnyText = str | Mapping[str, Any]


class AsyncEngine:
    """Answers requests of an event loop; as many as wait run together.

        async with fminfer.AsyncEngine("path/to/model") as engine:
            answer = await engine.generate("What is the capital of France?")
            print(answer.text)
            async for delta in engine.stream("And of Spain?"):
                print(delta.text, end="")

    The model is loaded by the first request, or by `async with`. Cancelling a task cancels its
    request; so does leaving the loop over a stream.

    Args:
        model: as `Engine` has it.
        options: as `Engine` has them.
    """

    def __init__(self, model: str | EngineConfig | None = None, **options: Any) -> None:
        self._make_engine = partial(Engine, model, **options)
        self._starting: asyncio.Task[Engine] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._numbers = count(1)
        # Of requests without an answer; of the event loop's thread only.
        self._events: dict[int, asyncio.Queue[Event | FminferError]] = {}
        self._is_over = threading.Event()
        self._failure: FminferError | None = None

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def generate(self, request: AnyText, **fields: Any) -> Record:
        """Return a request's answer: what `Engine.run` yields for it.

        Args:
            request: a text, as `Engine.make_request` takes it, or the fields of a request.
            fields: further fields.

        Raises:
            RequestError: what is wrong with the request.
            FminferError: the engine is closed, or has failed.
        """
        engine = await self._start()
        line_request = await asyncio.to_thread(
            self._prepare, engine, request, fields, next(self._numbers)
        )
        async with aclosing(
            self._events_of(engine, line_request, is_streamed=False)
        ) as events:
            async for event in events:
                if isinstance(event, Finished):
                    form = RecordForm(engine.model_name, created=0)
                    return form.build(line_request, event)
        raise AssertionError("a request ends with an answer or an error")

    async def stream(
        self, request: AnyText, **fields: Any
    ) -> AsyncGenerator[Delta, None]:
        """Yield a request's tokens as they come; the last one of a choice has its finish_reason.

        It takes and raises what `generate` does.
        """
        engine = await self._start()
        line_request = await asyncio.to_thread(
            self._prepare, engine, request, fields, next(self._numbers)
        )
        async with aclosing(
            self._events_of(engine, line_request, is_streamed=True)
        ) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def close(self) -> None:
        """End all computing and free its memory; open requests raise."""
        if self._starting is None:
            self._failure = self._failure or _closed_error()
            return
        try:
            engine = await self._starting
        except FminferError:
            return  # nothing was loaded, and who asked for it was told
        self._fail(_closed_error())
        self._is_over.set()
        engine.wake()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        engine.close()

    # In the event loop's thread:

    async def _start(self) -> Engine:
        """Return the engine, which the first call loads."""
        loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            self._events.clear()
        if loop is not self._loop:
            raise UsageError(
                "this AsyncEngine is of another event loop; make one for each loop"
            )
        if self._starting is None or self._starting.cancelled():
            self._starting = loop.create_task(asyncio.to_thread(self._make_engine))
        # a cancelled request must not cancel the loading, for which others wait
        engine = await asyncio.shield(self._starting)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_engine, args=(engine,), name="engine", daemon=True
            )
            self._thread.start()
        return engine

    async def _events_of(
        self, engine: Engine, request: LineRequest, *, is_streamed: bool
    ) -> AsyncGenerator[Event, None]:
        """Add a request; yield its events, and cancel it if nobody wants the rest."""
        if self._failure is not None:
            raise self._failure
        request_id = request.line.number
        events: asyncio.Queue[Event | FminferError] = asyncio.Queue()
        self._events[request_id] = events
        try:
            engine.add(request.prepared, is_streamed=is_streamed, request_id=request_id)
            while True:
                event = await events.get()
                if isinstance(event, FminferError):
                    raise event
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if self._events.pop(request_id, None) is not None:
                engine.cancel(request_id)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            is_last = not isinstance(event, Delta)
            take = self._events.pop if is_last else self._events.get
            waiting = take(event.request_id, None)
            if waiting is not None:
                waiting.put_nowait(event)

    def _fail(self, error: FminferError) -> None:
        """Let every open and every later request raise an error."""
        self._failure = self._failure or error
        for events in self._events.values():
            events.put_nowait(self._failure)
        self._events.clear()

    # In other threads:

    def _run_engine(self, engine: Engine) -> None:
        """Compute until the engine is closed, or fails."""
        try:
            while not self._is_over.is_set():
                if engine.wait(IDLE_S) and (events := engine.step()):
                    self._call_in_loop(partial(self._deliver, events))
        except Exception as error:
            text = f"the engine failed: {type(error).__name__}: {error}"
            failure = error if isinstance(error, FminferError) else PipelineError(text)
            self._failure = self._failure or failure
            self._call_in_loop(partial(self._fail, failure))

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "a request has begun"
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call)

    def _prepare(
        self, engine: Engine, request: AnyText, fields: dict[str, Any], number: int
    ) -> LineRequest:
        """Check and tokenize a request."""
        if isinstance(request, str):
            request = engine.make_request(request, **fields)
        else:
            request = {**request, **fields}
        line = make_line(number, request)
        envelope = parse_envelope(line)
        prepared = engine.prepare(envelope.fields, endpoint=envelope.endpoint)
        return LineRequest(line, envelope, prepared, key=None)


def _closed_error() -> UsageError:
    return UsageError("the engine is closed; make a new one")

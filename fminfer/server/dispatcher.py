"""Requests of an event loop, and the engine that answers them in another thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, TypeVar

from fminfer.contract.endpoints import Endpoint
from fminfer.core.errors import FminferError, StoppedError, UncompiledError
from fminfer.core.quantities import describe_bytes
from fminfer.engine.engine_core import FURTHER_FIELDS, Delta, Event, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.runtime.engine_api import Engine
from fminfer.server.batch_engine import BatchEngine
from fminfer.server.http_errors import HttpError, shutting_down_error
from fminfer.server.metrics import Metrics
from fminfer.server.replies import Reply

IDLE_S = 0.2  # between looks whether an idle team has lost a pipeline
TOKENIZERS = 2  # requests that are tokenized at once
QUICK_ITEMS = 16  # at most, in each list or object of a quick request
# requests that a full queue tokenizes at once, to look for a kept answer
MOST_LOOKING = 16
MOST_RETRY_S = 60
# of requests that come here; the engine's own are below it, lanes' above
FIRST_ID = 2**39
MOST_BYTES = 1 << 28  # of prepared requests without an answer
SMALL_BYTES = 1 << 16  # of a request for which there is always room
CHOICE_BYTES = 3072  # of a choice that is to come, beside its prompt
SHARE = 4  # one request may take what is left, divided by this
Result = TypeVar("Result")


class Dispatcher:
    """Receives requests in an event loop, and answers them with an engine.

    Args:
        queue_size: requests that may wait; 0: any number.
    """

    def __init__(
        self, engine: Engine | BatchEngine, queue_size: int, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._cache = engine.runs.cache  # has answers that need not be computed
        self._metrics = metrics
        self._queue_size = queue_size
        # Requests without an answer that are with the engine; of the event loop's thread only.
        self.replies: dict[int, Reply] = {}
        self._held_bytes: dict[int, int] = {}  # of those without an answer
        self._ids = count(FIRST_ID)
        self._adding = threading.Lock()
        self._num_added = _count_begun(engine)  # requests so far
        self._tokenizers = _PreparingThreads(TOKENIZERS, "tokenizing")
        self._compilers = _PreparingThreads(3, "compiling")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._is_over = threading.Event()
        self.refusal: HttpError | None = None  # why no more requests are taken
        self.num_dropped = 0  # requests that were open when the server ended
        self.queue_s = 0.0  # mean time that requests wait, over the last ones

    # In the event loop's thread:

    def start(
        self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None]
    ) -> None:
        """Note the event loop; it calls `on_failure` once the engine has failed."""
        self._loop = loop
        self._on_failure = on_failure

    @property
    def num_open(self) -> int:
        """Requests without an answer."""
        return (
            len(self.replies)
            + self._tokenizers.num_pending
            + self._compilers.num_pending
        )

    @property
    def num_waiting(self) -> int:
        """Prompts that have not begun."""
        return self._tokenizers.num_pending + self._engine.num_waiting

    async def add_request(
        self,
        fields: Mapping[str, Any],
        *,
        endpoint: Endpoint = "completions",
        is_streamed: bool = False,
        is_large: bool = False,
    ) -> Reply:
        """Queue a request; a large one is not prepared in the thread of quick ones.

        Args:
            is_large: preparing it may take long.

        Raises:
            RequestError: what is wrong with it.
            HttpError: there is no room for it.
        """
        arrival_s = time.perf_counter()
        full = self._no_room_error()
        # There may be a kept answer.
        may_look = self.refusal is None and self._tokenizers.num_pending < MOST_LOOKING
        if full is not None and (self._cache is None or not may_look):
            raise full
        prepared, kept = await self._prepare_in_threads(
            partial(self._prepare_and_find_answer, fields, endpoint=endpoint),
            is_quick=not is_large and _is_quick(fields),
        )
        if kept is not None and self.refusal is None:
            self._metrics.observe(kept, time.perf_counter() - arrival_s)
            reply = Reply(kept.request_id, arrival_s, prepared, self._forget_request)
            for event in (*(_make_deltas(kept) if is_streamed else ()), kept):
                reply.push(event)
            return reply
        if (refusal := self.refusal or full) is not None:
            raise refusal

        size = self._check_request_size(prepared)
        request_id = next(self._ids)
        reply = self.replies[request_id] = Reply(
            request_id, arrival_s, prepared, self._forget_request
        )
        self._held_bytes[request_id] = size
        add = partial(
            self._add_to_engine, prepared, request_id, is_streamed=is_streamed
        )
        try:
            await self._tokenizers.run(add) if size > SMALL_BYTES else add()
        except BaseException:
            del self.replies[request_id], self._held_bytes[request_id]
            self._engine.cancel(request_id)
            raise
        return reply

    async def _prepare_in_threads(
        self,
        prepare: Callable[..., tuple[PreparedRequest, Finished | None]],
        *,
        is_quick: bool,
    ) -> tuple[PreparedRequest, Finished | None]:
        try:
            return await self._tokenizers.run(
                partial(prepare, compiles=False), is_quick=is_quick
            )
        except UncompiledError:
            pass  # to compile may take seconds, in which others do not wait
        num_pending = self._compilers.num_pending
        if 0 < self._queue_size <= num_pending:
            raise self._queue_full_error(
                f"{num_pending} requests wait for new constraints", 2
            )
        return await self._compilers.run(prepare)

    async def run_in_tokenizers(self, work: Callable[[], Result]) -> Result:
        """Tokenize in a thread; only a few requests do so at once."""
        if (refusal := self._no_room_error()) is not None:
            raise refusal
        return await self._tokenizers.run(work)

    def _check_request_size(self, prepared: PreparedRequest) -> int:
        """Return the bytes that a request takes, or raise an HttpError."""
        texts = (*prepared.prompts, *prepared.sources)
        num_choices = len(prepared.prompts) * prepared.params.num_candidates
        size = CHOICE_BYTES * num_choices + sum(
            8 * len(t.ids) + len(t.text) for t in texts
        )
        held = sum(self._held_bytes.values())
        if held and size > max(SMALL_BYTES, (MOST_BYTES - held) // SHARE):
            raise HttpError(
                429,
                f"the request takes about {describe_bytes(size)}, and those that are "
                "being answered "
                f"take {describe_bytes(held)} of {describe_bytes(MOST_BYTES)}. Send "
                "fewer prompts in a "
                "request, or try again in a second",
                code="too_many_prompts",
                headers={"Retry-After": "1"},
            )
        return size

    def _forget_request(self, request_id: int) -> None:
        """Forget a request; if it has no answer yet, the engine frees what it holds."""
        self._held_bytes.pop(request_id, None)
        if self.replies.pop(request_id, None) is not None:
            self._engine.cancel(request_id)
            self._metrics.count_cancelled()

    def close(self, error: HttpError) -> None:
        """Refuse further requests; those that are open go on."""
        self.refusal = self.refusal or error

    def fail_open_requests(self, error: HttpError) -> None:
        """End every open request with an error."""
        self.close(error)
        self.num_dropped += len(self.replies)
        for reply in self.replies.values():
            self._engine.cancel(reply.id)
            reply.push(error)
        self.replies.clear()

    def _no_room_error(self) -> HttpError | None:
        # To count prompts is quick, and there are at least as many as requests.
        if self.refusal is not None or not 0 < self._queue_size <= self.num_waiting:
            return self.refusal
        waiting = (
            self._tokenizers.num_pending + self._num_added - _count_begun(self._engine)
        )
        if waiting < self._queue_size:
            return None
        retry_s = min(MOST_RETRY_S, max(1, round(self.queue_s)))
        return self._queue_full_error(f"{waiting} requests wait", retry_s)

    def _queue_full_error(self, text: str, retry_s: int) -> HttpError:
        return HttpError(
            429,
            f"{text}, and the queue is full (--queue-size {self._queue_size}). Try again in "
            f"{retry_s} s",
            code="queue_full",
            headers={"Retry-After": str(retry_s)},
        )

    def _deliver_events(self, events: list[Event]) -> None:
        now_s = time.perf_counter()
        for event in events:
            reply = self.replies.get(event.request_id)
            if reply is None:  # its client has left
                continue
            if isinstance(event, Delta):
                if event.index in reply.token_s:
                    self._metrics.observe_gap(now_s - reply.token_s[event.index])
                reply.token_s[event.index] = now_s
            else:
                del self.replies[event.request_id]
            if isinstance(event, Finished):
                if self._cache is not None:
                    self._cache.add(reply.prepared, event)
                self.queue_s += 0.1 * (event.times["queue_time"] - self.queue_s)
                self._metrics.observe(event, now_s - reply.arrival_s)
            reply.push(event)

    def _fail_engine(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, FminferError) else type(error).__name__
        failure = HttpError(503, f"the engine failed: {reason}", code="engine_failed")
        if isinstance(error, KeyboardInterrupt | StoppedError):  # for the second time
            failure = shutting_down_error()
        self.fail_open_requests(failure)
        self._on_failure()

    # In the engine's thread:

    def run(self) -> None:
        """Answer requests until `end` is called."""
        assert self._loop is not None, "the event loop starts first"
        try:
            while not self._is_over.is_set():
                if self._engine.wait(IDLE_S) and (events := self._engine.step()):
                    self._loop.call_soon_threadsafe(self._deliver_events, events)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail_engine, error)
            raise

    # In any thread:

    def _prepare_and_find_answer(
        self, fields: Mapping[str, Any], *, endpoint: Endpoint, compiles: bool = True
    ) -> tuple[PreparedRequest, Finished | None]:
        """Prepare a request, and find its answer if the cache has it, which may take a while."""
        assert not isinstance(self._engine, BatchEngine), "it has no such routes"
        prepared = self._engine.prepare(fields, endpoint=endpoint, compiles=compiles)
        if self._cache is None:
            return prepared, None
        return prepared, self._cache.find(prepared, takes_chance=True)

    def _add_to_engine(
        self, prepared: PreparedRequest, request_id: int, *, is_streamed: bool
    ) -> None:
        """Add a request to the engine, unless its client leaves meanwhile."""
        assert not isinstance(self._engine, BatchEngine), "it has no such routes"
        self._engine.add(prepared, is_streamed=is_streamed, request_id=request_id)
        with self._adding:
            self._num_added += 1
        if request_id not in self.replies:
            self._engine.cancel(request_id)

    def end(self) -> None:
        """Have `run` return."""
        self._is_over.set()
        self._engine.wake()
        self._tokenizers.end()
        self._compilers.end()


class _PreparingThreads:
    """Threads that prepare requests, and how many requests are with them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_pending = 0
        self._pool = ThreadPoolExecutor(num_threads, name)
        # its requests wait for no long work
        self._quick_pool = ThreadPoolExecutor(1, name)

    async def run(
        self, work: Callable[[], Result], *, is_quick: bool = False
    ) -> Result:
        """Do some work in a thread; raise what it raises."""
        self.num_pending += 1
        pool = self._quick_pool if is_quick else self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self.num_pending -= 1

    def end(self) -> None:
        """Begin nothing more."""
        for pool in (self._pool, self._quick_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def _is_quick(fields: Mapping[str, Any]) -> bool:
    """Whether a request that is not large has little to prepare."""
    return all(
        len(value) <= QUICK_ITEMS
        for value in fields.values()
        if isinstance(value, list | dict)
    )


def _count_begun(engine: Engine | BatchEngine) -> int:
    """Count the requests that no longer wait, without those of batches."""
    return engine.stats.num_begun - engine.stats.num_begun_behind


def _make_deltas(answer: Finished) -> Iterator[Delta]:
    """Yield the choices of an answer that is there already."""
    for choice in answer.choices:
        message: dict[str, Any] = choice.get("message", {})
        calls = message.get("tool_calls", [])
        yield Delta(
            answer.request_id,
            choice["index"],
            message["content"] or "" if message else choice["text"],
            choice.get("token_ids", []),
            choice.get("logprobs"),
            choice["finish_reason"],
            choice.get("stop_reason"),
            [{"index": index} | call for index, call in enumerate(calls)],
            {name: choice[name] for name in FURTHER_FIELDS if name in choice},
            message.get("reasoning_content") or "",
        )

"""The engine of a run that servers elsewhere answer: who gets which request, and when.

`step` runs an event loop for a moment; there is no thread. A request has a task while a
server has it:

    queue ──▶ a server with room ──▶ answer, or its row's error ──▶ event
      ▲                 │
      └── a pause ◀── trouble        the run's trouble ends the run
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from fminfer.client.answer_builder import AnswerBuilder, read_count
from fminfer.client.flow import Flow
from fminfer.client.http_call import HttpCall, HttpServer
from fminfer.client.remote_options import RemoteOptions
from fminfer.client.remote_request import RemoteRequest
from fminfer.client.server_facts import ServerFacts
from fminfer.client.server_finding import check_alike, read_facts
from fminfer.client.server_trouble import ServerTroubleError
from fminfer.client.verdicts import MissingError, RefusalError, hide_key
from fminfer.core.errors import RequestError, ServerError, UsageError, line_error
from fminfer.core.timing import RowClock, RowTimes
from fminfer.engine.engine_core import BEHIND_ALL, Event, Failed
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.stats import EngineState, EngineStats

STEP_S = 0.05  # a step without an event ends after so long
WATCH_S = 0.2  # between two looks at what takes too long
END_OF_STREAM_S = 1.0  # for a response to end behind its last data
FIRST_PAUSE_S = 0.5  # after trouble; doubled each time
MOST_PAUSE_S = 30.0
# A request that fails so often, while its server answers others, is an error of its row.
MOST_FAILURES = 8
FEW = 8  # requests without an answer
RECENT_S = 1.0  # since an answer of a server that has too much to do
MOST_OVERLOADS = 64  # the same, where the server says that it has too much to do
NUM_FIRST_ROWS = 20  # refused alike, and no answer: it is no fault of the rows
BEGINNING = 32  # ids by which requests begin alike
MOST_BEGINNINGS = 10_000


@dataclass(slots=True, eq=False)
class _Server:
    """A server, and what it does now. Times are seconds of `time.perf_counter`."""

    http: HttpServer
    flow: Flow
    num_running: int = 0
    answered_s: float = 0.0  # its last answer, or refusal
    seen_s: float = 0.0  # when it was last there again
    num_pauses: int = 0  # since its last answer
    pauses_until_s: float = 0.0
    is_unsure: bool = (
        False  # it was away; what it serves must be read before it is used
    )
    check: asyncio.Task[None] | None = None
    trouble: str = ""  # the last one

    @property
    def has_room(self) -> bool:
        return not self.is_unsure and self.num_running < self.flow.limit

    def pause(self, error: ServerTroubleError, most_s: float) -> None:
        """Send nothing for a while, and then read what it serves."""
        pause_s = _choose_pause(self.num_pauses, error, most_s)
        self.pauses_until_s = time.perf_counter() + pause_s
        self.num_pauses += 1
        self.is_unsure = True
        url = self.http.facts.url
        text = str(error).rstrip(".")
        self.trouble = text if url in text else f"{url}: {text}"


@dataclass(slots=True, eq=False)
class _Request:
    """A request from `add` to its answer."""

    id: int
    prepared: RemoteRequest
    priority: int
    added_s: float
    num_tries: int = 0
    num_failures: int = 0  # while its server answered others
    failed_s: float = 0.0  # its last trouble, or its first try
    failed_at: _Server | None = None
    server: _Server | None = None  # that has it now
    # Of the present try:
    call: HttpCall | None = None
    task: asyncio.Task[None] | None = None
    times: RowTimes | None = None
    is_late: bool = False
    is_data_counted: bool = False

    @property
    def beginning(self) -> tuple[int, ...]:
        return tuple(self.prepared.prompts[0].ids[:BEGINNING])


class RemoteCore:
    """An `EngineCore` over HTTP."""

    is_shared = False  # by several users: no number of refused rows ends the run

    def __init__(
        self,
        servers: list[ServerFacts],
        options: RemoteOptions,
        key: str,
        *,
        print_note: Callable[[str], None],
    ) -> None:
        self.stats = self.lines = EngineStats()
        self.num_without_usage = 0  # answers whose server did not count their tokens
        self.num_sent_again = 0  # requests, each as often as it was
        self._options = options
        self._key = key
        self._print_note = print_note
        self._loop = asyncio.new_event_loop()
        self._is_woken = threading.Event()
        reached = {each.url: each for each in servers}
        self._servers = [
            _Server(
                HttpServer(replace(servers[0], url=url), options, key),
                Flow(options.max_in_flight, time.perf_counter()),
                is_unsure=url not in reached,
                trouble="" if url in reached else f"{url} was not reached at the start",
            )
            for url in dict.fromkeys([*reached, *options.urls])
        ]
        self._ids = count()
        self._requests: dict[int, _Request] = {}  # without an event
        self._running: set[_Request] = set()
        self._queue: deque[_Request] = deque()
        self._queue_behind: deque[_Request] = deque()  # behind all others
        self._by_beginning: dict[tuple[int, ...], _Server] = {}
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._clock = RowClock()
        self._drains_until_s = math.inf
        self._trouble_since_s = math.inf  # since which no server has answered
        self._watched_s = 0.0
        # None: they are not all refused for one reason
        self._first_events: list[Event] | None = None if self.is_shared else []

    def add(
        self,
        prepared: PreparedRequest,
        *,
        is_counted: bool = False,
        priority: int = 0,
        is_streamed: bool = False,
        request_id: int | None = None,
    ) -> int:
        """Queue a request; return the id by which its event names it. Nothing is streamed."""
        assert isinstance(prepared, RemoteRequest), "a request that is not translated"
        now_s = time.perf_counter()
        number = next(self._ids) if request_id is None else request_id
        if not is_counted:
            self.stats.count_request(prepared)
        if not self._requests:
            self._trouble_since_s = math.inf
        request = _Request(number, prepared, priority, now_s)
        self._requests[number] = request
        self._queue_of(request).append(request)
        self.wake()
        return number

    def cancel(self, request_id: int) -> None:
        """Forget a request; close its connection, if a server has it."""
        request = self._requests.pop(request_id, None)
        if request and request.task and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(request.task.cancel)

    def step(self) -> list[Event]:
        """Wait a moment for answers; return their events.

        Raises:
            ServerError: the servers cannot go on with the run.
        """
        self._begin_requests()
        handle = self._loop.call_later(STEP_S, self._loop.stop)
        self._loop.run_forever()
        handle.cancel()
        now_s = time.perf_counter()
        if now_s - self._watched_s > WATCH_S:
            self._watched_s = now_s
            self._watch(now_s)
        if not self._requests:
            self._release_first_events()
        events = self._events
        self._events = []
        if self._failure is not None and not events:
            raise self._failure
        return events

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        has_events = self._events or self._first_events or self._failure
        return bool(self._requests or has_events)

    @property
    def num_waiting(self) -> int:
        """Requests that no server has, without those behind all others."""
        num_known = len(self._running) + self.num_waiting_behind
        return max(0, len(self._requests) - num_known)

    @property
    def num_waiting_behind(self) -> int:
        """As in the state."""
        return len(self._queue_behind)

    @property
    def is_computing(self) -> bool:
        """Whether servers compute while the caller does other things."""
        return bool(self._running)

    @property
    def has_begun(self) -> bool:
        """As in the state."""
        return bool(self._running)

    @property
    def state(self) -> EngineState:
        """How it stands."""
        return EngineState(
            num_waiting=self.num_waiting,
            num_waiting_behind=self.num_waiting_behind,
            num_running=len(self._running),
            has_begun=self.has_begun,
            num_begun=self.stats.num_begun,
            num_begun_behind=self.stats.num_begun_behind,
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for work, at most until `wake` or the timeout; return whether there is any."""
        if not self.has_work:
            self._is_woken.wait(timeout_s)
        self._is_woken.clear()
        return self.has_work

    def wake(self) -> None:
        """End a `wait`, or the next one if none goes on, and a step of another thread."""
        self._is_woken.set()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def start_run(self) -> None:
        """No longer drain."""
        self._drains_until_s = math.inf

    def drain(self, until_s: float) -> None:
        """Let no more requests begin; those that servers have go on until then."""
        self._drains_until_s = until_s

    def expect_no_more_requests(self) -> None:
        """Do nothing: the servers' caches are their own."""

    def check_books(self) -> None:
        """Prove that no request is lost once none is left."""
        assert not self._running and not self._events, "a request has no event"

    def close(self) -> None:
        """Cancel all that goes on, and close all connections."""
        if self._loop.is_closed():
            return
        self._requests.clear()
        closing = self._loop.create_task(self._close())
        closing.add_done_callback(lambda task: self._loop.stop())
        while not closing.done():  # a stop of before may come between
            self._loop.run_forever()
        self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.http.close()

    def _queue_of(self, request: _Request) -> deque[_Request]:
        return self._queue_behind if request.priority == BEHIND_ALL else self._queue

    def _begin_requests(self) -> None:
        """Give servers requests as long as they have room."""
        while self._drains_until_s == math.inf and self._failure is None:
            queue = self._queue or self._queue_behind
            while queue and queue[0].id not in self._requests:  # cancelled
                queue.popleft()
            if not queue:
                return
            server = self._choose_server(queue[0])
            if server is None:
                return
            self._begin(queue.popleft(), server)

    def _choose_server(self, request: _Request) -> _Server | None:
        """Return one with room: that of requests that begin alike, or the emptiest."""
        servers = [each for each in self._servers if each.has_room]
        others = [each for each in servers if each is not request.failed_at]
        if len(self._servers) == 1 or not others:
            return servers[0] if servers else None
        beginning = request.beginning
        server = self._by_beginning.get(beginning)
        if server not in others:
            server = min(others, key=lambda each: each.num_running / each.flow.limit)
        if len(self._by_beginning) >= MOST_BEGINNINGS:
            self._by_beginning.clear()
        self._by_beginning[beginning] = server
        return server

    def _begin(self, request: _Request, server: _Server) -> None:
        now_s = time.perf_counter()
        if request.num_tries == 0:
            self.stats.num_begun += 1
            self.stats.num_begun_behind += request.priority == BEHIND_ALL
            request.failed_s = now_s
        request.num_tries += 1
        request.is_late = False
        request.server = server
        builder = AnswerBuilder(request.prepared)
        request.call = HttpCall(request.prepared, builder, progress_s=now_s)
        request.times = self._clock.start(now_s)
        server.num_running += 1
        self._running.add(request)
        self.stats.max_rows_running = max(
            self.stats.max_rows_running, len(self._running)
        )
        request.task = self._loop.create_task(
            self._answer(request, server, request.call, request.times)
        )
        request.task.add_done_callback(partial(self._note_end, request=request))

    async def _answer(
        self, request: _Request, server: _Server, call: HttpCall, times: RowTimes
    ) -> None:
        """Have a server answer a request."""
        event: Event | None = None
        try:
            try:
                await server.http.ask(call)
            except asyncio.CancelledError:
                if not request.is_late:
                    raise
                if not call.is_whole:
                    raise self._late_error(server) from None
            finally:
                self._end_try(request)
            event = call.builder.finish(request.id, times.to_dict(request.added_s))
            is_full = bool(self._queue or self._queue_behind)
            server.flow.count_answer(time.perf_counter(), is_full=is_full)
            self.stats.num_ended += 1
            self.num_without_usage += call.builder.usage is None
        except ServerTroubleError as error:
            hide_key(error, self._key)
            event = self._meet_trouble(request, server, error)
        except MissingError as error:
            event = await self._judge_missing(request, server, error)
        except Exception as error:
            event = Failed(request.id, line_error(error, "a line's answer"))
            hide_key(event.error, self._key)
        if event is None or self._requests.pop(request.id, None) is None:
            return
        server.answered_s = time.perf_counter()
        server.num_pauses = 0
        self._trouble_since_s = math.inf
        self._add_event(event)

    def _note_end(self, task: asyncio.Task[None], request: _Request | None) -> None:
        """Let a step end, and others begin."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        if request is not None:  # it may have been cancelled before it began
            self._end_try(request)
        self._begin_requests()
        self._loop.stop()

    def _end_try(self, request: _Request) -> None:
        """Count what a try has cost, once."""
        call = request.call
        if request not in self._running or request.times is None or call is None:
            return
        self._running.remove(request)
        assert request.server is not None
        request.server.num_running -= 1
        request.times.first_token_s = call.first_data_s
        self._clock.stop(request.times, time.perf_counter())
        usage = call.builder.usage or {}
        num_cached = read_count(usage.get("prompt_tokens_details"), "cached_tokens")
        num_fed = max(0, read_count(usage, "prompt_tokens") - num_cached)
        self.stats.num_cached_tokens += num_cached
        self.stats.num_prompt_tokens += num_fed
        self.stats.num_generated_tokens += read_count(usage, "completion_tokens")

    def _late_error(self, server: _Server) -> ServerTroubleError:
        return ServerTroubleError(
            f"{server.http.facts.url} sent no data of an answer for "
            f"{self._options.engine_timeout_s:g} s (--engine-timeout)"
        )

    def _meet_trouble(
        self, request: _Request, server: _Server, error: ServerTroubleError
    ) -> Event | None:
        """Queue a request again, in a while; return its error if it failed too often."""
        now_s = time.perf_counter()
        self._trouble_since_s = min(self._trouble_since_s, now_s)
        # A server refuses what it has no room for at once, before its next answer.
        since_s = now_s - RECENT_S if error.is_overload else now_s
        is_answering = server.answered_s > min(request.failed_s, since_s)
        request.num_failures += is_answering
        most = MOST_OVERLOADS if error.is_overload else MOST_FAILURES
        if request.num_failures >= most:
            num_times = f"{request.num_failures} times, and answered others"
            return _make_server_failure(request, f"{num_times}. At last {error}")
        if is_answering:
            server.flow.count_trouble(now_s)
        elif server.pauses_until_s <= now_s:
            server.pause(error, self._options.engine_patience_s)
            if server.num_pauses == 1:
                self._print_note(f"{server.trouble}. Requests are sent again")
        request.failed_at = server
        request.failed_s = now_s
        self.num_sent_again += 1
        if any(each.has_room for each in self._servers if each is not server):
            self._queue_of(request).appendleft(request)
        else:
            pause_s = _choose_pause(
                request.num_tries - 1, error, self._options.engine_patience_s
            )
            self._loop.call_later(pause_s, self._queue_again, request)
        return None

    def _queue_again(self, request: _Request) -> None:
        self._queue_of(request).appendleft(request)
        self._begin_requests()

    def _add_event(self, event: Event) -> None:
        """Add an event. The first ones wait while all are refusals for one reason."""
        if self._first_events is None:
            self._events.append(event)
            return
        self._first_events.append(event)
        errors = [each.error for each in self._first_events if isinstance(each, Failed)]
        reasons = {each.likeness for each in errors if isinstance(each, RefusalError)}
        num_events = len(self._first_events)
        if len(reasons) != 1 or len(errors) < num_events:
            self._release_first_events()
        elif num_events >= NUM_FIRST_ROWS:
            self._first_events.clear()  # no record says that it was the rows' fault
            self._failure = self._failure or ServerError(
                f"the first {NUM_FIRST_ROWS} requests were all refused, and none was "
                f"answered. The last: {errors[-1]}"
            )

    def trust_servers(self) -> None:
        """Take no number of refusals for a fault of the servers': they have answered before."""
        self._first_events = None

    def _release_first_events(self) -> None:
        self._events += self._first_events or []
        self._first_events = None

    def _watch(self, now_s: float) -> None:
        """End what takes too long; look for servers that come back."""
        for request in self._running:
            call = request.call
            task = request.task
            assert call is not None and task is not None and request.server is not None
            if call.first_data_s is not None and request.num_tries == 1:
                self._trouble_since_s = math.inf
                if not request.is_data_counted:
                    request.is_data_counted = True
                    request.server.flow.count_data()
            limit_s = (
                END_OF_STREAM_S if call.is_whole else self._options.engine_timeout_s
            )
            if now_s > min(call.progress_s + limit_s, self._drains_until_s):
                request.is_late = now_s <= self._drains_until_s
                task.cancel()
        if now_s - self._trouble_since_s > self._options.engine_patience_s:
            troubles = "; ".join(each.trouble for each in self._servers if each.trouble)
            was_seen = (
                max(each.seen_s for each in self._servers) > self._trouble_since_s
            )
            # The last ones have no others beside them, whose answers clear the servers.
            if was_seen and self._first_events is None and len(self._requests) <= FEW:
                for request in [*self._requests.values()]:
                    self.cancel(request.id)
                    text = f"until --engine-patience was over: {troubles}"
                    self._events.append(_make_server_failure(request, text))
                return
            self._failure = self._failure or ServerError(
                f"no server has answered anything for {self._options.engine_patience_s:g} s "
                f"(--engine-patience): {troubles}. Finished rows are kept; run the same "
                "command again once the servers are there"
            )
        for server in self._servers:
            is_due = server.is_unsure and now_s >= server.pauses_until_s
            if is_due and (server.check is None or server.check.done()):
                server.check = self._loop.create_task(self._check(server))
                server.check.add_done_callback(partial(self._note_end, request=None))

    async def _check(self, server: _Server) -> None:
        """Use a server again if it is what it was."""
        try:
            await self._read_facts(server)
            server.is_unsure = False
            server.seen_s = time.perf_counter()
            self._print_note(f"{server.http.facts.url} is there, and gets requests")
        except ServerTroubleError as error:
            server.pause(error, self._options.engine_patience_s)
            self._trouble_since_s = min(self._trouble_since_s, time.perf_counter())

    async def _judge_missing(
        self, request: _Request, server: _Server, error: MissingError
    ) -> Event | None:
        """Return the refusal of a request whose endpoint the server does not have.

        Raises:
            ServerError: it is the model that the server does not have.
        """
        try:
            await self._read_facts(server)
        except ServerTroubleError as trouble:
            return self._meet_trouble(request, server, trouble)
        text = f"{error}. It has the model, but not what the request asks for"
        return Failed(request.id, RefusalError(text, (404, "")))

    async def _read_facts(self, server: _Server) -> None:
        """Read what a server serves now; raise if it is not what it was."""
        facts = server.http.facts
        try:
            async with server.http.open_client() as client:
                now_facts = await read_facts(
                    client, facts.url, self._options, facts.model, self._key
                )
            check_alike(facts, now_facts)
        except UsageError as error:
            text = f"{facts.url} is not what it was at the start: {error}"
            raise ServerError(text) from None


def _make_server_failure(request: _Request, text: str) -> Failed:
    return Failed(
        request.id, RequestError("server_failed", f"servers failed at it {text}")
    )


def _choose_pause(num_before: int, error: ServerTroubleError, most_s: float) -> float:
    """Return seconds: what the server asks for, or twice as many each time; never equal."""
    pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_before, 10))
    return max(min(error.retry_after_s, most_s), pause_s * random.uniform(0.75, 1.25))

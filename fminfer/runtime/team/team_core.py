"""Several pipelines for one engine: each takes requests as it gets free; a dead one
loses none."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait

from fminfer.core.errors import FminferError, PipelineError, UsageError
from fminfer.core.messages import RankMemory
from fminfer.core.quantities import with_noun
from fminfer.engine.engine_core import Delta, Event
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.models.fingerprint import digest_weight_files, name_different_files
from fminfer.pipeline.watch import Fault
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.job_engine import OnStep, OnWork
from fminfer.runtime.load.agreement import replace_plan
from fminfer.runtime.load.properties import PipelineProperties
from fminfer.runtime.team.team_messages import END, GO_ON, Ask, Cancel, Report, receive
from fminfer.runtime.team.team_process import SentRequest, StreamPosition, TeamPipeline

MOST_WAITING = 80  # requests that wait in one pipeline
ASKED_AT_ONCE = 4  # neighbours, which may share a prefix, go to the same pipeline
END_S = 4.0  # time for pipelines to end by themselves


class Team:
    """Several pipelines that answer together: an `EngineCore`.

    Args:
        start: starts the pipelines.
        say: tells the user of a pipeline that died.
    """

    def __init__(
        self,
        plan: RunPlan,
        start: Callable[[], list[TeamPipeline]],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._on_work: OnWork | None = None
        self._ids = itertools.count()
        self._added: deque[SentRequest] = deque()  # by other threads
        self._cancelled: deque[int] = deque()
        self._waiting: deque[SentRequest] = deque()  # for a pipeline
        self._news = threading.Condition()
        self._is_closed = self._is_woken = False
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        # of lines that were read, which pipelines do not see
        self.lines = EngineStats()
        self._is_draining = False
        self._until_s: float | None = None  # when a step is over at the latest
        self._expects_more = True
        self._file_digests = digest_weight_files(plan.checkpoint)
        self._dead: list[TeamPipeline] = []  # in the order in which they ended
        self._has_started = False
        self._pipelines = start()
        try:
            self._await_loading()
            self.facts = self._combine(plan)
        except BaseException:
            self.close()
            raise

    def _combine(self, plan: RunPlan) -> PipelineProperties:
        """Return the properties of all pipelines together."""
        loaded = [each.loaded for each in self._pipelines if each.loaded is not None]
        first = loaded[0]
        plan = replace(
            replace_plan(plan, first.machine),
            num_kv_tokens=min(each.num_kv_tokens for each in loaded),
            chunk_size=first.chunk_size,
        )
        why_plain = (each.measured.why_plain for each in loaded)
        why_slower = (each.measured.why_slower for each in loaded)
        why_dependent = (each.measured.why_dependent for each in loaded)
        measured = replace(
            first.measured,
            why_plain=next(filter(None, why_plain), ""),
            why_slower=next(filter(None, why_slower), ""),
            why_dependent=next(filter(None, why_dependent), ""),
        )
        return PipelineProperties(
            plan, measured, num_pipelines=len(loaded), is_team=True
        )

    @property
    def core(self) -> Team:
        return self

    @property
    def memory(self) -> list[RankMemory]:
        """The peaks of all ranks, as their pipelines last reported them."""
        return [
            replace(each, rank=pipeline.number * len(self.facts.plan.ranks) + each.rank)
            for pipeline in self._pipelines
            for each in pipeline.memory
        ]

    def follow(
        self, on_work: OnWork | None = None, on_step: OnStep | None = None
    ) -> None:
        """Call a function now and then with the numbers of tokens that were fed and drawn."""
        self._on_work = on_work

    @property
    def stats(self) -> EngineStats:
        """What all pipelines have counted, as they last said it."""
        total = EngineStats()
        for pipeline in self._pipelines:
            total.add(pipeline.stats)
        total.add(self.lines)
        return total

    def add(
        self,
        prepared: PreparedRequest,
        *,
        priority: int = 0,
        is_streamed: bool = False,
        is_counted: bool = False,
        request_id: int | None = None,
    ) -> int:
        """Queue a request, as `EngineCore.add` says."""
        request_id = next(self._ids) if request_id is None else request_id
        ask = Ask(request_id, prepared, priority, is_streamed, is_counted)
        self._added.append(SentRequest(ask))
        self._notify()
        return request_id

    def cancel(self, request_id: int) -> None:
        """Forget a request."""
        self._cancelled.append(request_id)
        self._notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for work, at most until `wake` or the timeout; return whether there is any.

        What pipelines say unasked is work, too: that of one that died is its end.
        """
        with self._news:
            self._news.wait_for(
                lambda: self.has_work or self._is_closed or self._is_woken, timeout_s
            )
            self._is_woken = False
        if self.has_work or self._is_closed:
            return self.has_work
        living = [pipeline.connection for pipeline in self._living]
        return not living or bool(wait(living, 0))

    def step(self) -> list[Event]:
        """Hand out waiting requests, and return the next events; an error drops all requests."""
        self._queue_added()
        self._send_waiting()
        try:
            self._check_any_lives()
        except FminferError:
            self._waiting.clear()
            for pipeline in self._pipelines:
                pipeline.requests.clear()
            raise
        timeout_s = None if self.is_computing else 0.0  # nobody would say anything
        if self.is_computing and self._until_s is not None:
            timeout_s = max(0.0, self._until_s - time.perf_counter())
        return list(self._listen(timeout_s))

    def start_run(self) -> None:
        """Count the steps of a run anew; no longer drain."""
        self._is_draining = False
        self._until_s = None
        self._expects_more = True
        self._send_to_all("start_run")

    def drain(self, until_s: float = math.inf) -> None:
        """Let no more requests begin; those whose rows run go on. `step` returns by then."""
        if not self._is_draining:
            self._is_draining = True
            self._send_to_all("drain")
        self._until_s = until_s if until_s < math.inf else None

    def expect_no_more_requests(self) -> None:
        """Note that no more requests come: prefixes that none of them shares can be evicted."""
        self._queue_added()
        if self._expects_more and not self._waiting:
            self._expects_more = False
            self._send_to_all("expect_no_more_requests")

    def check_books(self) -> None:
        """Nothing: the books are the pipelines'."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self._added or self._cancelled:
            return True
        if self._is_draining:
            return self.has_begun
        return bool(self._waiting) or self.is_computing

    @property
    def state(self) -> EngineState:
        """How the pipelines stand together, and how much waits for them."""
        return EngineState.sum_states(
            [pipeline.state for pipeline in self._living],
            num_waiting=self.num_waiting,
            num_waiting_behind=self.num_waiting_behind,
            has_begun=self.has_begun,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, without those behind all others."""
        at_pipelines = sum(pipeline.num_waiting for pipeline in self._living)
        num_all = len(self._added) + len(self._waiting) + at_pipelines
        return max(0, num_all - self.num_waiting_behind)

    @property
    def num_waiting_behind(self) -> int:
        """Requests behind all others that have not begun."""
        here = sum(
            asking.is_behind for asking in (*tuple(self._added), *tuple(self._waiting))
        )
        return here + sum(pipeline.num_waiting_behind for pipeline in self._living)

    @property
    def is_computing(self) -> bool:
        """Whether a pipeline has requests."""
        return any(pipeline.requests for pipeline in self._living)

    @property
    def has_begun(self) -> bool:
        """Whether rows run, as the pipelines last said it."""
        return any(
            pipeline.state.has_begun and pipeline.requests for pipeline in self._living
        )

    def close(self) -> None:
        """End all pipelines: idle ones in good order, the others at once."""
        for pipeline in self._pipelines:
            if pipeline.requests or pipeline.loaded is None:
                pipeline.close()
            else:
                pipeline.send(END)
        deadline_s = time.monotonic() + END_S
        for pipeline in self._pipelines:
            pipeline.end(max(0.0, deadline_s - time.monotonic()))
            pipeline.close()
        with self._news:  # nobody writes to what another file's number may be soon
            is_closed = self._is_closed
            self._is_closed = True
            self._news.notify_all()
        if not is_closed:
            os.close(self._wake_out)
            os.close(self._wake_in)

    @property
    def _living(self) -> list[TeamPipeline]:
        return [pipeline for pipeline in self._pipelines if pipeline.is_alive]

    def wake(self) -> None:
        """End a `wait`, or the next one; and a `step` that listens."""
        self._is_woken = True
        self._notify()

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # it is full
                    os.write(self._wake_in, b".")

    def _send_to_all(self, what: str) -> None:
        for pipeline in self._living:
            pipeline.send(what)

    def _await_loading(self) -> None:
        """Wait until each pipeline has loaded, then for its KV cache; tell of those
        that ended."""
        try:
            self._await_all(lambda each: each.file_digests is not None)
            for pipeline in self._living:  # the folder may have changed
                if names := name_different_files(
                    pipeline.file_digests or {}, self._file_digests
                ):
                    raise PipelineError(
                        f"the weights of pipeline {pipeline.number} are not those with "
                        f"which the run began: {names} differ; leave the model's "
                        "folder as it is while a run starts"
                    )
            self._send_to_all(GO_ON)
            self._await_all(lambda each: each.loaded is not None)
        finally:
            self._has_started = True
            for pipeline in self._dead:
                self._report_end(pipeline)

    def _await_all(self, has_come: Callable[[TeamPipeline], bool]) -> None:
        while not all(map(has_come, self._living)):
            list(self._listen(None))
        self._check_any_lives()

    def _queue_added(self) -> None:
        """Queue what was added, the higher priorities first, and forget what was cancelled."""
        # counted first: all of these were added by now
        num_cancelled = len(self._cancelled)
        while self._added:
            insort(
                self._waiting,
                self._added.popleft(),
                key=lambda each: -each.ask.priority,
            )
        for _ in range(num_cancelled):
            request_id = self._cancelled.popleft()
            kept = [each for each in self._waiting if each.ask.request_id != request_id]
            self._waiting = deque(kept)
            for pipeline in self._living:
                if request_id in pipeline.requests:
                    pipeline.remove(request_id)
                    pipeline.send(Cancel(request_id))

    def _send_waiting(self) -> None:
        """Give waiting requests to pipelines that have room."""
        while self._waiting and not self._is_draining:
            urgent = self._waiting[0].ask.priority > 0
            free = [p for p in self._living if urgent or p.num_waiting < MOST_WAITING]
            if not free:
                return
            pipeline = min(free, key=lambda pipeline: pipeline.cost)
            share = -(-len(self._waiting) // len(free))  # share the last ones evenly
            for _ in range(min(ASKED_AT_ONCE, share)):
                pipeline.send_request(self._waiting.popleft())

    def _listen(self, timeout_s: float | None) -> Iterator[Event]:
        """Process reports of the pipelines, bury the dead ones, and yield events."""
        living = self._living
        ready = wait([self._wake_out, *(each.connection for each in living)], timeout_s)
        if self._wake_out in ready:
            os.read(self._wake_out, 4096)
        for pipeline in [each for each in living if each.connection in ready]:
            try:
                report: Report = receive(pipeline.connection)
            except (EOFError, OSError):
                self._remove_dead(pipeline)
                continue
            before = pipeline.stats
            pipeline.update(report)
            if report.stats is not None and self._on_work is not None:
                num_fed = report.stats.num_prompt_tokens - before.num_prompt_tokens
                num_drawn = (
                    report.stats.num_generated_tokens - before.num_generated_tokens
                )
                self._on_work(num_fed, num_drawn, self.state.num_running)
            for event in report.events:
                yield from self._pass_on_event(pipeline, event)

    def _pass_on_event(self, pipeline: TeamPipeline, event: Event) -> Iterator[Event]:
        asking = pipeline.requests.get(event.request_id)
        if asking is None:  # it was cancelled
            return
        if not isinstance(event, Delta):
            pipeline.remove(event.request_id)
            yield event
        elif (
            new := asking.positions.setdefault(
                event.index, StreamPosition()
            ).cut_repeated(event)
        ) is not None:
            yield new

    def _remove_dead(self, pipeline: TeamPipeline) -> None:
        """Give a dead pipeline's requests to the others."""
        pipeline.is_alive = False
        self._dead.append(pipeline)
        left = sorted(
            pipeline.requests.values(), key=lambda asking: asking.ask.request_id
        )
        pipeline.requests.clear()
        for asking in left:
            for heard in asking.positions.values():
                heard.begin_anew()
        left_first = sorted(
            [*left, *self._waiting], key=lambda asking: -asking.ask.priority
        )
        self._waiting = deque(left_first)
        if self._has_started:
            self._report_end(pipeline, len(left))

    def _report_end(self, pipeline: TeamPipeline, num_left: int = 0) -> None:
        """Tell the user of a dead pipeline, unless the error that ends the run is alike."""
        failure = pipeline.failure
        fatal = self._fatal
        if failure is not None and fatal is not None and _is_alike(failure, fatal):
            return
        why = "ended" if failure is None else f"failed: {failure.text}"
        if not self._living:
            others = "; no other is left."
        elif num_left:
            others = f"; the others go on, and answer its {with_noun(num_left, 'row')}."
        else:
            others = "; the others go on."
        self._say(f"Pipeline {pipeline.number} {why}{others}")

    @property
    def _fatal(self) -> Fault | None:
        """The failure that ends the run: the last one, once no pipeline lives."""
        failures = [each.failure for each in self._dead if each.failure is not None]
        return failures[-1] if failures and not self._living else None

    def _check_any_lives(self) -> None:
        if self._is_closed:
            raise UsageError("the engine is closed; make a new one")
        if self._living:
            return
        if (fatal := self._fatal) is None:
            raise PipelineError(
                "every pipeline has ended (the system kills processes when memory runs out). "
                "Finished rows are kept"
            )
        raise fatal.to_error()


def _is_alike(one: Fault, other: Fault) -> bool:
    """Tell whether two failures differ in numbers at most, such as free bytes."""
    return one.kind == other.kind and re.sub(r"\d+", "", one.text) == re.sub(
        r"\d+", "", other.text
    )

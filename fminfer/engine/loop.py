"""The engine's loop: accept requests, fill the pipeline, return events."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from fminfer.compute.values.step import Step, StepResult, StepTrace
from fminfer.core.errors import StepLimitError
from fminfer.core.quantities import with_noun
from fminfer.core.timing import RowClock
from fminfer.engine.answer import AnswerStyle, DeltaStream, build_answer
from fminfer.engine.engine_core import BEHIND_ALL, Event
from fminfer.engine.packing import ObservedPrompt
from fminfer.engine.prefix import SharedTokens
from fminfer.engine.prompt_fit import check_room
from fminfer.engine.results import apply_result
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PreparedRequest, PromptState, RequestState, Sequence
from fminfer.engine.start import RequestStarter
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.engine.waiting import order_prompts


class Pipeline(Protocol):
    """The engine's view of the ranks."""

    num_in_flight: int

    def submit(self, step: Step) -> None:
        """Send a step in; results come in the order of steps."""

    def collect(self) -> StepResult:
        """Wait for the oldest step's result."""

    def drop_steps(self) -> None:
        """Throw the results of the steps in flight away."""


class EngineLoop:
    """Answers requests over one pipeline, with `micro_batches` steps in flight.

    `add`, `cancel` and `wait` may be called from any thread, the rest from one.
    """

    def __init__(
        self,
        starter: RequestStarter,
        scheduler: Scheduler,
        pipeline: Pipeline,
        style: AnswerStyle,
        *,
        max_steps: int | None = None,
    ) -> None:
        self._starter = starter
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._style = style
        self._max_steps = max_steps
        # called with every finished step
        self.on_step: Callable[[StepTrace], None] | None = None
        self.stats = self.lines = EngineStats(num_kv_tokens=scheduler.pool.num_tokens)
        self._ids = itertools.count()
        self._added: deque[RequestState] = (
            deque()
        )  # by other threads, not yet in the queue
        self._cancelled: deque[int] = deque()
        self._news = threading.Condition()
        self._is_woken = False
        self._num_steps_before = 0  # of earlier runs
        self._shared_tokens = SharedTokens()
        self._clear_requests()

    def _clear_requests(self) -> None:
        self._clock = RowClock()
        self._open: dict[int, RequestState] = {}  # requests without an answer
        # Answers that are being built, one piece a step, by the id of their request.
        self._finished: dict[int, tuple[RequestState, Iterator[Event | None]]] = {}
        self._streams: dict[int, DeltaStream] = {}
        self._is_draining = False

    def add(
        self,
        prepared: PreparedRequest,
        *,
        priority: int = 0,
        is_streamed: bool = False,
        is_counted: bool = False,
        request_id: int | None = None,
    ) -> int:
        state = self.make_request_state(prepared)
        if request_id is not None:
            state.id = request_id
        state.priority = priority
        state.is_streamed = is_streamed
        state.is_counted = is_counted
        self._added.append(state)
        self._wake_waiters()
        return state.id

    def make_request_state(self, prepared: PreparedRequest) -> RequestState:
        """Return the state of a request, or raise a RequestError: it can never run here."""
        state = self._starter.start_request(next(self._ids), prepared)
        check_room(state, self._scheduler)
        return state

    def cancel(self, request_id: int) -> None:
        self._cancelled.append(request_id)
        self._wake_waiters()

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._news:
            self._news.wait_for(lambda: self.has_work or self._is_woken, timeout_s)
            self._is_woken = False
        return self.has_work

    def wake(self) -> None:
        self._is_woken = True
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        with self._news:
            self._news.notify_all()

    @property
    def has_work(self) -> bool:
        may_go_on = bool(self._open) and (not self._is_draining or self.has_begun)
        has_news = self._added or self._cancelled or self._finished
        return bool(has_news or self.is_computing or may_go_on)

    def step(self) -> list[Event]:
        """Do one step, and return its events. If anything fails, all requests are dropped."""
        try:
            self._update_requests()
            self._submit_steps()
            if self.is_computing:
                self._apply_step(self._pipeline.collect())
                self._update_requests()  # what came meanwhile need not wait for a step more
                self._submit_steps()  # stages work while answers are built
            elif self._is_at_limit and self._open and not self._finished:
                done = with_noun(self._max_steps or 0, "micro-batch", "micro-batches")
                raise StepLimitError(
                    f"stopped after {done}, as --num-iters says; rows are left. Leave "
                    "the flag out to answer all"
                )
            return self._collect_events()
        except BaseException:
            self.drop_requests()
            raise

    def drop_requests(self) -> None:
        """Forget every request; wait for the steps in flight."""
        self._pipeline.drop_steps()
        self._scheduler.clear()
        self._added.clear()
        self._cancelled.clear()
        self._clear_requests()

    def start_run(self) -> None:
        self._num_steps_before = self.stats.num_steps
        self._is_draining = False

    def drain(self, until_s: float = math.inf) -> None:
        self._is_draining = True

    def expect_no_more_requests(self) -> None:
        self._update_requests()
        # From now on, a finished prefix that no waiting prompt shares is evicted when
        # its row ends. Its blocks, which are warm, are used again before others.
        if self._scheduler.kv.shares:
            self._scheduler.waiting.expect_no_more_prompts()

    def check_books(self) -> None:
        if not (self._open or self.is_computing):
            self._scheduler.check_books()

    @property
    def state(self) -> EngineState:
        rows = (
            s
            for r in tuple(self._open.values())
            for p in r.prompts
            for s in p.sequences
        )
        left = (
            row.num_draws_left
            for row in rows
            if row.block_table and not row.finish_reason
        )
        return EngineState(
            num_waiting=self.num_waiting,
            num_waiting_behind=self.num_waiting_behind,
            num_running=self.num_running,
            kv_usage=self._scheduler.pool.usage,
            has_begun=self.has_begun,
            longest_row=max(left, default=0),
            num_begun=self.stats.num_begun,
            num_begun_behind=self.stats.num_begun_behind,
        )

    @property
    def num_waiting(self) -> int:
        num_added = sum(len(state.prompts) for state in tuple(self._added))
        num_all = len(self._scheduler.waiting) + num_added
        return max(0, num_all - self.num_waiting_behind)

    @property
    def num_waiting_behind(self) -> int:
        added = [state for state in tuple(self._added) if state.priority == BEHIND_ALL]
        num_added = sum(len(state.prompts) for state in added)
        return self._scheduler.waiting.num_from_priority(BEHIND_ALL) + num_added

    @property
    def num_running(self) -> int:
        return self._scheduler.kv.num_sequences

    @property
    def is_computing(self) -> bool:
        return bool(self._scheduler.in_flight)

    @property
    def has_begun(self) -> bool:
        scheduler = self._scheduler
        is_running = self.num_running > 0 or scheduler.waiting.has_preempted
        return bool(is_running or scheduler.reading or scheduler.in_flight)

    @property
    def _is_at_limit(self) -> bool:
        num_steps = (
            self.stats.num_steps - self._num_steps_before + self._pipeline.num_in_flight
        )
        return self._max_steps is not None and num_steps >= self._max_steps

    def _update_requests(self) -> None:
        """Queue added requests, and forget cancelled ones."""
        # counted first: all of these were added by now
        num_cancelled = len(self._cancelled)
        while self._added:
            state = self._added.popleft()
            self._open[state.id] = state
            if state.is_streamed:
                self._streams[state.id] = DeltaStream(state, self._style)
            if not state.is_counted:
                self.stats.count_request(state.prepared)
            for place, prompt in enumerate(order_prompts(state.prompts)):
                if prompt.walk is not None:
                    (prompt,) = prompt.walk.make_wave()  # its first branch
                if prompt.is_pooled:
                    self._scheduler.add(prompt, place)
                elif prompt.num_to_feed > 0:
                    # Only of lines, whose summary has it; encoder outputs are shared whole.
                    if state.is_counted and prompt.source is None:
                        self._count_shareable(prompt)
                    self._scheduler.add(prompt, 0 if state.is_counted else place)
                else:  # nothing to compute: max_tokens 0 without scores, or one token to score
                    for sequence in prompt.sequences:
                        sequence.finish_reason = "length"
            if state.is_finished:
                self._begin_answer(state)
        for _ in range(num_cancelled):
            request_id = self._cancelled.popleft()
            self._finished.pop(request_id, None)
            self._streams.pop(request_id, None)
            if request_id in self._open:
                self._free_cancelled(self._open[request_id])

    def _count_shareable(self, prompt: PromptState) -> None:
        """Count what the best possible prefix cache would save of a prompt."""
        if not self._shared_tokens.is_full:
            prompt.is_counted = True
            num_shared = self._shared_tokens.add(prompt.ids[: prompt.num_to_feed])
            self.stats.num_counted_tokens += prompt.num_to_feed
            self.stats.num_counted_shareable += min(num_shared, prompt.num_to_feed - 1)

    def _free_cancelled(self, state: RequestState) -> None:
        """Free the blocks of a cancelled request; steps in flight still bring its results."""
        state.is_cancelled = True
        for prompt in state.prompts:
            self._scheduler.cancel(prompt)
            for sequence in prompt.sequences:
                if sequence.finish_reason is None:
                    self.stats.count_ended(sequence.num_draws_left)
        self._close_request(state)
        state.unlink()

    def _submit_steps(self) -> None:
        most = self._scheduler.shape.micro_batches
        stats = self.stats
        while self._pipeline.num_in_flight < most and not self._is_at_limit:
            for prompt in self._scheduler.admit(is_stopping=self._is_draining):
                stats.count_admitted(prompt)
                if prompt.owner.times is None:
                    prompt.owner.times = self._clock.start(time.perf_counter())
                    self._count_begun(prompt.owner)
            planned = self._scheduler.schedule()
            if planned is None:
                return
            self._pipeline.submit(planned.step)
            stats.max_rows_running = max(stats.max_rows_running, self.num_running)
            stats.max_kv_tokens = self._scheduler.pool.max_used_tokens

    def _apply_step(self, result: StepResult) -> None:
        """Give each token of a step to its sequence, and end those that are done."""
        planned = self._scheduler.pop_oldest_step()
        stats = self.stats
        assert planned.step.step_id == result.step_id, (
            "the pipeline changed the order of steps"
        )
        stats.num_steps += 1
        stats.add_spans(result.spans)
        if self.on_step is not None:
            counts = planned.num_prompt_tokens, planned.num_decode_rows
            self.on_step(StepTrace(result.step_id, *counts, result.spans, planned.step))
        stats.num_prompt_tokens += planned.num_prompt_tokens
        for sequence in apply_result(planned, result, self._scheduler):
            self._end_sequence(sequence)
        drawn = (sequence.prompt for sequence in planned.sequences)
        for prompt in (
            itertools.chain(planned.scored_prompts, drawn) if self._streams else ()
        ):
            if isinstance(prompt, ObservedPrompt):
                continue  # its own scores or draws stand beside it
            if prompt.branch is not None:
                if not (owners := prompt.branch.parent.sequences):
                    continue  # it is done, and was unlinked
                prompt = owners[0].prompt
            if (stream := self._streams.get(prompt.owner.id)) is not None:
                stream.touched[prompt] = None
        for prompt in planned.read_prompts:
            if (
                prompt.is_pooled
                and prompt.owner.id in self._open
                and prompt.owner.is_finished
            ):
                self._begin_answer(prompt.owner)
        num_forced = sum(
            max(0, sequence.num_unfed - 1) for sequence in planned.sequences
        )
        stats.num_generated_tokens += len(planned.sequences) + num_forced

    def _end_sequence(self, sequence: Sequence) -> None:
        state = sequence.prompt.owner
        if sequence.walk is None:
            self._scheduler.release_sequence(sequence)
        if sequence.prompt.walk is None:
            self.stats.count_ended(sequence.num_draws_left)
        else:  # its tokens were scored, not drawn
            self.stats.count_ended(sequence.prompt.params.max_tokens)
        self.stats.num_cut_off += sequence.is_cut_off
        if sequence.thought is not None:
            self.stats.num_truncated_thoughts += sequence.thought.is_truncated
        if sequence.is_thinking:
            self.stats.num_open_thoughts += sequence.finish_reason == "length"
            self.stats.num_ended_thoughts += sequence.finish_reason == "stop"
        sequence.edits = None  # they may take megabytes until the request ends
        if state.is_finished:
            self._begin_answer(state)

    def _begin_answer(self, state: RequestState) -> None:
        self._finished[state.id] = state, build_answer(state, self._style)
        self._close_request(state)

    def _close_request(self, state: RequestState) -> None:
        del self._open[state.id]
        if state.times is None:
            self._count_begun(state)
        else:
            self._clock.stop(state.times, time.perf_counter())

    def _count_begun(self, state: RequestState) -> None:
        self.stats.num_begun += 1
        self.stats.num_begun_behind += state.priority == BEHIND_ALL

    def _collect_events(self) -> list[Event]:
        """Return the deltas of streamed requests, and the answers of finished ones."""
        events: list[Event] = []
        for stream in self._streams.values():
            events += stream.make_deltas()
        for state, pieces in [*self._finished.values()]:
            answer = next(pieces)
            if answer is not None:
                del self._finished[state.id]
                self._streams.pop(state.id, None)
                events.append(answer)
                state.unlink()
        return events

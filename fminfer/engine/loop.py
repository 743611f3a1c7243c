"""The engine's loop: take lines in, keep the pipeline full, hand records out.

It knows the pipeline as `submit` and `collect` only, and nothing of files.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Protocol

from fminfer.engine.advance import advance
from fminfer.engine.answer import AnswerForm, build_record
from fminfer.engine.equal_requests import EqualRequests
from fminfer.engine.intake import Intake
from fminfer.engine.packing import PlannedStep
from fminfer.engine.planner import MAX_WINDOW_TOKENS, plan_order
from fminfer.engine.prefix import SharedTokens
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PromptState, RequestState, Sequence, TokenReport
from fminfer.engine.stats import EngineStats
from fminfer.errors import RequestError, StepLimitError, StoppedError, UsageError, row_error
from fminfer.input.envelope import Envelope, as_text, open_envelope
from fminfer.input.lines import Line
from fminfer.messages import Step, StepResult, StepTrace, TokenLogprobs
from fminfer.output.records import Record
from fminfer.timing import RowClock

LOOKAHEAD = 64  # lines that are read between steps, and prompts that wait where no more is said
WAIT_S = 0.02  # for a line, where nothing else is to be done
MIN_WAITING = 32  # so few prompts wait, and those that were read join them


class Pipeline(Protocol):
    """What the engine sees of the ranks."""

    num_in_flight: int

    def submit(self, step: Step) -> None: ...

    def collect(self) -> StepResult: ...

    def drop(self) -> None: ...


class EngineLoop:
    """Answers lines with what it is given."""

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        pipeline: Pipeline,
        form: AnswerForm,
        *,
        micro_batches: int,  # steps to keep in flight
        kv_capacity: int,
        max_steps: int | None = None,
        is_only_run: bool = False,
        equal_requests: EqualRequests | None = None,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._form = form
        self._micro_batches = micro_batches
        self._max_steps = max_steps
        self._is_only_run = is_only_run
        self._equal_requests = equal_requests
        self.on_step: Callable[[StepTrace], None] | None = None  # told of every finished step
        self._clock = RowClock()
        self._in_flight: deque[PlannedStep] = deque()
        self._done: deque[RequestState | Record] = deque()
        self._is_running = False
        self._num_steps_before = 0  # of earlier runs
        self._has_ended = False  # every line was read
        self._read_ahead = LOOKAHEAD
        self._window: list[PromptState] = []  # read, and not yet waiting: to be put in order
        self._num_window_tokens = 0
        self._stop_at_s = math.inf
        self._shared_tokens = SharedTokens()
        self.stats = EngineStats(num_kv_tokens=kv_capacity)

    def run(
        self, lines: Iterable[Line | None], read_ahead: int = LOOKAHEAD
    ) -> Generator[Record, None, None]:
        """Yield one record a line, as they finish. Lines are read as room for them appears.

        Args:
            lines: None stands for a line that is not there yet; the next is asked for later.
            read_ahead: prompts that are read before there is room for them, to be put in order.

        Raises:
            UsageError: an earlier run is not finished.
        """
        if self._is_running:
            raise UsageError("the engine is in the middle of a run; finish or close that one first")
        self._is_running = True
        self._num_steps_before = self.stats.num_steps
        self._stop_at_s = math.inf
        self._has_ended = False
        self._read_ahead = read_ahead
        self._form.created = int(time.time())
        try:
            self._intake.start_run()
            if self._equal_requests is not None:
                self._equal_requests.clear()
            yield from self._run(iter(lines))
            self._scheduler.check_idle()
        except BaseException:  # also when the caller wants no more records
            self._drop_everything()
            raise
        finally:
            self._is_running = False

    def pass_over(self, line: Line) -> None:
        """Take note of a line of this run that is not to be answered again."""
        self._intake.pass_over(line)

    def open_line(self, line: Line) -> RequestState | Record:
        """Return a line's request, or the record that says why it cannot be answered."""
        envelope = Envelope("bare", as_text(line.raw))  # until it is opened
        try:
            envelope = open_envelope(line)
            state = self._intake.prepare(line, envelope)
            self._check_memory(state)
            return state
        except Exception as error:
            return Record(line, envelope, error=row_error(error, line.number))

    def stop(self, grace_s: float) -> None:
        """Take no more lines in; rows that run may go on so long. It may be called at any moment.

        The run then raises StoppedError, unless it is complete.
        """
        self._stop_at_s = min(self._stop_at_s, time.perf_counter() + grace_s)

    @property
    def num_draws_left(self) -> int:
        """The most tokens that running rows may still draw. It may be asked at any moment."""
        in_flight = (s for planned in self._in_flight for s in planned.sequences)
        return sum(s.num_draws_left for s in (*self._scheduler.between_steps, *in_flight))

    @property
    def _is_stopping(self) -> bool:
        return self._stop_at_s < math.inf

    def _run(self, source: Iterator[Line | None]) -> Iterator[Record]:
        while True:
            has_more = self._take_in(source)
            self._fill_pipeline()
            if self._in_flight:
                result = self._pipeline.collect()
                self._apply(self._in_flight.popleft(), result)
                self._fill_pipeline()  # stages work while records are built and lines are read
            while self._done:
                done = self._done.popleft()
                if isinstance(done, Record):
                    yield done
                else:
                    yield build_record(done, self._form, time.perf_counter())
            if not has_more and not self._in_flight and self._scheduler.is_idle:
                return
            is_late = time.perf_counter() > self._stop_at_s
            is_running = self._scheduler.num_running > 0 or self._scheduler.has_put_back
            is_drained = not self._in_flight and not is_running
            if is_late or (self._is_stopping and is_drained):
                raise StoppedError("stopped as told, and rows are left")
            if self._is_at_limit and not self._in_flight:
                raise StepLimitError(
                    f"stopped after {self._max_steps} micro-batches, as --num-iters says; rows "
                    "are left. Leave the flag out to answer all"
                )

    @property
    def _is_at_limit(self) -> bool:
        num_steps = self.stats.num_steps - self._num_steps_before + self._pipeline.num_in_flight
        return self._max_steps is not None and num_steps >= self._max_steps

    def _drop_everything(self) -> None:
        self._pipeline.drop()
        self._in_flight.clear()
        self._done.clear()
        self._window.clear()
        self._num_window_tokens = 0
        self._scheduler.clear()
        self._clock = RowClock()

    def _take_in(self, source: Iterator[Line | None]) -> bool:
        """Read some lines, and let them wait in good order; return False when all do."""
        has_more = self._read(source)
        if self._window and not self._is_stopping:
            is_whole = not has_more or self._num_ahead >= self._window_size
            if self._scheduler.num_waiting < (LOOKAHEAD if is_whole else MIN_WAITING):
                for prompt in plan_order(self._window):
                    self._scheduler.add(prompt)
                self._window.clear()
                self._num_window_tokens = 0
        has_more = has_more or bool(self._window)
        if self._is_only_run and not has_more:
            self._scheduler.forget_unshared()
        return has_more

    @property
    def _num_ahead(self) -> int:
        return self._scheduler.num_waiting + len(self._window)

    @property
    def _window_size(self) -> int:
        """Return how many prompts are read ahead: few once another file was opened."""
        if self._window and self._window[0].owner.line.source != self._window[-1].owner.line.source:
            return min(LOOKAHEAD, self._read_ahead)
        return self._read_ahead

    def _read(self, source: Iterator[Line | None]) -> bool:
        """Read lines until enough are there for now; return False at the end of the input."""
        if self._has_ended:
            return False
        # While nothing runs, nothing waits for the reading.
        for _ in range(LOOKAHEAD if self._in_flight else self._read_ahead):
            is_full = self._num_window_tokens >= MAX_WINDOW_TOKENS
            if self._num_ahead >= self._window_size or is_full or self._is_stopping:
                return True
            if len(self._done) >= LOOKAHEAD:  # lines that need no step: hand them out first
                return True
            if self._equal_requests is not None and self._equal_requests.is_full:
                return True
            try:
                line = next(source)
            except StopIteration:
                self._has_ended = True
                return False
            if line is None:  # not there yet
                if not (self._in_flight or self._num_ahead or self._done):
                    time.sleep(WAIT_S)
                return True
            self._take_line(line)
        return True

    def _take_line(self, line: Line) -> None:
        state = self.open_line(line)
        self.stats.read.num_rows += 1
        if isinstance(state, Record):
            self._done.append(state)
            return
        params = state.request.params
        self.stats.read.num_seeded += params.seed is not None and not params.is_greedy
        if self._equal_requests is not None and self._equal_requests.follow(state):
            self._follow(state)
            return
        for prompt in state.prompts:
            if prompt.num_to_feed > 0:
                self._window.append(prompt)
                self._num_window_tokens += len(prompt.ids)
                max_tokens = prompt.params.max_tokens
                self.stats.read.add(prompt.num_to_feed, len(prompt.sequences), max_tokens)
                self._count_shared(prompt)
            else:  # nothing to compute: max_tokens 0 without scores, or one token to score
                for sequence in prompt.sequences:
                    sequence.finish_reason = "length"
        if state.is_finished:
            self._finish(state)

    def _follow(self, state: RequestState) -> None:
        """Let a request wait for the answer of an equal one, or take it if it is there."""
        state.times = self._clock.start(time.perf_counter())
        if state.is_finished:
            self._finish(state)

    def _check_memory(self, state: RequestState) -> None:
        for prompt in state.prompts:
            if len(prompt.sequences) > self._scheduler.max_rows:
                raise RequestError(
                    "out_of_memory",
                    f"the prompt has {len(prompt.sequences)} candidates, which run together; "
                    f"--max-rows allows {self._scheduler.max_rows} sequences at once. Raise it, or "
                    "lower n or best_of",
                    "best_of",
                )
            if prompt.num_to_feed > 0 and not self._scheduler.fits(prompt):
                raise RequestError(
                    "out_of_memory",
                    f"the prompt needs the KV cache of {prompt.num_kv_tokens} tokens for each of "
                    f"its {len(prompt.sequences)} candidates at once; the budget is "
                    f"{self.stats.num_kv_tokens} tokens. Raise --budget, or lower max_tokens, n or "
                    "best_of",
                    "max_tokens",
                )

    def _fill_pipeline(self) -> None:
        while self._pipeline.num_in_flight < self._micro_batches and not self._is_at_limit:
            for prompt in self._scheduler.admit(is_stopping=self._is_stopping):
                if prompt.again or prompt.is_apart:
                    self.stats.num_put_back += not prompt.is_apart
                    self.stats.num_apart += prompt.is_apart
                    self.stats.num_again_tokens += prompt.num_to_feed - prompt.num_fed
                else:
                    self.stats.num_cached_tokens += prompt.num_cached
                    self.stats.num_counted_cached += prompt.num_cached * prompt.is_counted
                if prompt.owner.times is None:
                    prompt.owner.times = self._clock.start(time.perf_counter())
            planned = self._scheduler.schedule()
            if planned is None:
                return
            self._pipeline.submit(planned.step)
            self._in_flight.append(planned)
            running = self._scheduler.num_running
            self.stats.max_rows_running = max(self.stats.max_rows_running, running)

    def _apply(self, planned: PlannedStep, result: StepResult) -> None:
        assert planned.step.step_id == result.step_id, "the pipeline changed the order of steps"
        self.stats.num_steps += 1
        self.stats.add_spans(result.spans)
        self._scheduler.collect(planned)
        if self.on_step is not None:
            counts = planned.num_prompt_tokens, planned.num_decode_rows
            self.on_step(StepTrace(result.step_id, *counts, result.spans, planned.step))
        self.stats.num_prompt_tokens += planned.num_prompt_tokens
        scores = _reports(result.scored)
        for prompt, report in zip(planned.scored_prompts, scores, strict=True):
            self._take_score(prompt, report)
        self.stats.num_generated_tokens += len(planned.sequences)
        self.stats.read.max_open_draws -= len(planned.sequences)
        draws = _reports(result.sampled)
        for sequence, report in zip(planned.sequences, draws, strict=True):
            self._take_token(sequence, report)

    def _count_shared(self, prompt: PromptState) -> None:
        stats = self.stats
        if not self._shared_tokens.is_full:
            prompt.is_counted = True
            num_shared = self._shared_tokens.add(prompt.ids[: prompt.num_to_feed])
            stats.num_counted_tokens += prompt.num_to_feed
            stats.num_counted_shareable += min(num_shared, prompt.num_to_feed - 1)

    def _take_shared_scores(self, prompt: PromptState) -> None:
        prompt.take_shared_scores()
        for place, report in enumerate(prompt.reports, start=1):
            if math.isnan(report.logprob):
                prompt.nan_at = prompt.nan_at or f"prompt token {place}"

    def _take_score(self, prompt: PromptState, report: TokenReport) -> None:
        if prompt.shared_scores:
            self._take_shared_scores(prompt)
        prompt.reports.append(report)
        if math.isnan(report.logprob):
            prompt.nan_at = prompt.nan_at or f"prompt token {len(prompt.reports)}"
        is_last = len(prompt.reports) == len(prompt.ids) - 1
        if prompt.params.max_tokens == 0 and is_last and not self._feeds_again(prompt):
            for sequence in prompt.sequences:
                sequence.finish_reason = "length"
                self._end(sequence)

    def _take_token(self, sequence: Sequence, report: TokenReport) -> None:
        prompt, state = sequence.prompt, sequence.prompt.owner
        if prompt.num_fed == 0:  # its first sequence had it put back, just now
            return
        if prompt.shared_scores:
            self._take_shared_scores(prompt)
        if math.isnan(report.logprob):
            prompt.nan_at = prompt.nan_at or f"generated token {len(sequence.tokens)}"
        if self._feeds_again(prompt):
            return
        assert state.times is not None, "a row ran before it was admitted"
        if state.times.first_token_s is None:
            state.times.first_token_s = time.perf_counter()
        if prompt.nan_at:
            sequence.finish_reason = "stop"
        else:
            advance(sequence, report)
        if sequence.finish_reason is None:
            self._scheduler.resume(sequence)
        else:
            self._end(sequence)

    def _feeds_again(self, prompt: PromptState) -> bool:
        """Judge a prompt by its first result since it was admitted.

        Of nan, blocks that it shares may be the cause, whatever the row that computed them gave:
        then it is fed again, alone, and has a verdict of its own.
        """
        if prompt.is_unproven:
            prompt.is_unproven = False
            if not prompt.nan_at:
                self._scheduler.vouch(prompt)
            elif self._scheduler.put_apart(prompt):
                num_draws = len(prompt.sequences) if prompt.params.max_tokens > 0 else 0
                self.stats.read.max_open_draws += num_draws
                return True
        if prompt.nan_at and prompt.owner.error is None:
            prompt.owner.error = _nan_error(prompt.nan_at)
        return False

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.release(sequence)
        self.stats.read.end(len(sequence.tokens), sequence.prompt.params.max_tokens)
        if sequence.prompt.owner.is_finished:
            self._finish(sequence.prompt.owner)

    def _finish(self, state: RequestState) -> None:
        if state.times is not None:
            self._clock.stop(state.times, time.perf_counter())
        self._done.append(state)
        self.stats.num_copied_requests += state.leader is not None
        if self._equal_requests is not None:
            for follower in self._equal_requests.finish(state):
                self._finish(follower)


def _reports(columns: TokenLogprobs) -> Iterator[TokenReport]:
    for token_id, logprob, top_ids, top_logprobs in zip(
        columns.ids, columns.logprobs, columns.top_ids, columns.top_logprobs, strict=True
    ):
        yield TokenReport(token_id, logprob, list(zip(top_ids, top_logprobs, strict=True)))


def _nan_error(where: str) -> RequestError:
    return RequestError(
        "nan_logits",
        f"the model's logits for {where} are not numbers (nan); its weights or dtype overflow. "
        "Try --dtype float32 or bfloat16",
    )

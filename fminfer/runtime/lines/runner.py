"""A run over lines: reads ahead, puts lines in order, and answers equal ones once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import InitVar, dataclass
from itertools import groupby
from typing import Literal

from fminfer.answers.answer_index import AnswerIndex
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import StoppedError, UsageError, line_error
from fminfer.engine.engine_core import (
    Delta,
    EngineCore,
    Event,
    Failed,
    Finished,
    RequestCore,
)
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.waiting import order_prompts
from fminfer.runtime.lines.constraint_watch import ConstraintWatch
from fminfer.runtime.lines.equal_requests import EqualRequests
from fminfer.runtime.lines.line_intake import (
    Answer,
    LineIntake,
    LineRequest,
    RecordForm,
)

# Of a line's answer: the model; an equal line, which had it computed; or another run.
Origin = Literal["computed", "copied", "kept"]
LOOKAHEAD = 64  # lines to read between steps, and the default number of waiting prompts
WINDOW = 1024  # prompts that a run over files reads ahead, to put them in order
MAX_WINDOW_TOKENS = 500_000  # of all their ids, some 20 MB
# of lines that are tokenized together, before more are wanted or not
MAX_GROUP_BYTES = 1 << 17
MIN_WAITING = 32  # when fewer prompts wait, those that were read join them


@dataclass(eq=False)
class LineRunner:
    """Answers lines with an engine: let it read lines, and `step`."""

    core: RequestCore  # answers the lines' requests
    intake: LineIntake
    form: RecordForm
    # the same as `core`, if the run has the engine for itself
    engine: EngineCore | None = None
    # prompts read before there is room for them, to be put in order
    read_ahead: int = LOOKAHEAD
    has_long_steps: bool = False  # all wanted prompts are read between two steps
    is_only_run: bool = False  # keep no prefixes for another run of the engine
    joins_equal: InitVar[bool] = True  # compute equal requests once
    # measures constraints in some of its rows
    watch: ConstraintWatch | None = None
    # answers of other runs; several runners may share it
    cache: AnswerIndex | None = None
    # Told by `step` of events of requests that others have added to the engine.
    on_other: Callable[[Event], None] = lambda event: None

    def __post_init__(self, joins_equal: bool) -> None:
        self._equal = EqualRequests(is_on=joins_equal)
        self._read: list[Line] = []  # and not yet opened
        self._window: list[LineRequest] = []  # opened, and not yet with the engine
        self._num_window_prompts = self._num_window_tokens = 0
        self._requests: dict[int, LineRequest] = {}  # with the engine
        self._done: list[Record] = []  # and not yet handed out
        self._has_all = False
        self._is_ended = False
        self._stop_at_s = math.inf
        if self.engine is not None:
            self.engine.start_run()

    def run(self, lines: Iterable[Line]) -> Generator[Record, None, None]:
        """Yield one record a line, as they finish. Lines are read as room for them appears.

        Raises:
            StoppedError: `stop` was called, and lines are left.
        """
        source = iter(lines)
        try:
            while True:
                self.read_from(source)
                yield from self.step()
                if not self.has_work:
                    return
        finally:
            self.close()

    def read_from(self, lines: Iterator[Line | None]) -> None:
        """Add lines as long as more are wanted; None: none is there at the moment."""
        # While nothing is computed, nothing waits for the reading.
        is_computing = self.engine is None or self.engine.is_computing
        is_brief = is_computing and not self.has_long_steps
        num_most = LOOKAHEAD if is_brief else max(LOOKAHEAD, self.read_ahead)
        num_bytes = 0
        for _ in range(num_most):
            if not self.wants_more:
                break
            try:
                line = next(lines)
            except StopIteration:
                self._has_all = True
                break
            if line is None:
                break
            self._read.append(line)
            num_bytes += len(line.raw)
            if (
                len(self._read) >= self.intake.group_size
                or num_bytes >= MAX_GROUP_BYTES
            ):
                self._open_read()
                num_bytes = 0
        self._open_read()

    @property
    def wants_more(self) -> bool:
        """Whether another line should be read now."""
        return not (
            self._has_all
            or self._is_stopping
            or self.core.num_waiting + self._num_window_prompts >= self._window_size
            or self._num_window_tokens >= MAX_WINDOW_TOKENS
            # lines that need no step: hand them out first
            or len(self._done) >= LOOKAHEAD
            or self._equal.is_full
        )

    @property
    def has_window(self) -> bool:
        """Whether lines wait for the engine to have room for them."""
        return bool(self._window)

    @property
    def is_busy(self) -> bool:
        """Whether a line that was added has no record yet."""
        return bool(self._window or self._requests or self._done)

    @property
    def has_work(self) -> bool:
        """Whether lines are left, or may still come."""
        return self.is_busy or not self._has_all

    def _open_read(self) -> None:
        """Open the lines that were read, all at once."""
        lines = self._read
        self._read = []
        for request in self.intake.open_all(lines):
            self._queue_opened(request)

    def _queue_opened(self, request: LineRequest | Record) -> None:
        if isinstance(request, Record):
            self._count(None)
            self._done.append(request)
            return
        finished = self._equal.find(request)
        if finished is not None or self._equal.follow(request):
            self._count(request.prepared, "copied")
            if finished is not None:
                self._done.append(self.form.build(request, finished))
            return
        kept = None if self.cache is None else self.cache.find(request.prepared)
        if kept is not None:
            self._count(request.prepared, "kept")
            self._finish(request, kept)
            return
        self._count(request.prepared)
        if self.watch is not None:
            request.prepared = self.watch.observe(request.prepared)
        self._window.append(request)
        self._num_window_prompts += request.num_prompts
        self._num_window_tokens += request.num_prompt_tokens

    def add_answered_line(self, line: Line) -> None:
        """Take note of a line of this run that is not to be answered again."""
        self._open_read()  # which stand before it
        self.intake.add_answered_line(line)

    def stop(self, grace_s: float) -> None:
        """Take no more lines in; rows that run may go on so long. It may be called at
        any moment.

        `step` then raises StoppedError, unless every line is answered.
        """
        self._stop_at_s = min(self._stop_at_s, time.perf_counter() + grace_s)

    def step(self) -> list[Record]:
        """Let the engine go on a little; return the records that are there now.

        Raises:
            StoppedError: it was to stop, and lines are left.
            FminferError: the engine cannot go on.
        """
        if self._is_ended:
            raise UsageError("a newer run has ended this one, which was interrupted")
        self._feed_engine()
        for event in self.core.step() if self.core.has_work else []:
            if event.request_id not in self._requests:
                self.on_other(event)
            elif not isinstance(event, Delta):
                request = self._requests.pop(event.request_id)
                if self.watch is not None:
                    self.watch.add(request, event)
                if self.cache is not None and isinstance(event, Finished):
                    self.cache.add(request.prepared, event)
                self._finish(request, event)
        records = self._done
        self._done = []
        if self._is_stopping and self.has_work and not records:
            has_begun = self.engine is None or self.engine.has_begun
            if time.perf_counter() > self._stop_at_s or not has_begun:
                raise StoppedError("stopped as told, and rows are left")
        if self.engine is not None and not self.has_work:
            self.engine.check_books()
        return records

    def _feed_engine(self) -> None:
        """Give the engine lines, if few wait there."""
        if self._is_stopping:
            if self.engine is not None:
                self.engine.drain(self._stop_at_s)
            return
        is_whole = self._has_all or not self.wants_more
        num_few = LOOKAHEAD if is_whole else MIN_WAITING
        if self._window and self.core.num_waiting < num_few:
            window = self._window
            self._window = []
            self._num_window_prompts = self._num_window_tokens = 0
            for request in _in_order(window):
                self._add_request(request)
        if (
            self.engine is not None
            and self.is_only_run
            and self._has_all
            and not self._window
        ):
            self.engine.expect_no_more_requests()

    def end(self) -> None:
        """Cancel what has no record yet, and answer no more lines."""
        self.close()
        self._is_ended = True

    def close(self) -> None:
        """Cancel what has no record yet."""
        for request_id in self._requests:
            self.core.cancel(request_id)
        self._requests.clear()
        self._window.clear()
        self._done.clear()
        if self.engine is not None and self._is_stopping:
            self.engine.start_run()  # requests that others add may begin again

    @property
    def _is_stopping(self) -> bool:
        return self._stop_at_s < math.inf

    @property
    def _window_size(self) -> int:
        """Return how many prompts are read ahead: few once another file was opened."""
        if self._window and self._window[0].line.source != self._window[-1].line.source:
            return min(LOOKAHEAD, self.read_ahead)
        return self.read_ahead

    def _count(
        self, prepared: PreparedRequest | None, origin: Origin = "computed"
    ) -> None:
        """Count a line for progress; a shared engine counts only the requests that it gets."""
        if self.engine is None:
            return
        stats = self.engine.lines
        stats.read.num_rows += 1
        stats.num_copied_requests += origin == "copied"
        stats.num_kept_requests += origin == "kept"
        if prepared is not None:
            stats.read.num_seeded += prepared.params.effective_seed is not None
            if origin == "computed":
                stats.count_request(prepared)

    def _add_request(self, request: LineRequest) -> None:
        request.added_s = time.perf_counter()
        try:
            self._requests[
                self.core.add(request.prepared, is_counted=self.engine is not None)
            ] = request
        except Exception as error:  # it can never run here
            self._finish(
                request, Failed(-1, line_error(error, f"line {request.line.number}"))
            )

    def _finish(self, request: LineRequest, answer: Answer) -> None:
        for each, its_answer in [
            (request, answer),
            *self._equal.finish(request, answer),
        ]:
            self._done.append(self.form.build(each, its_answer))


def _in_order(window: list[LineRequest]) -> list[LineRequest]:
    """Order lines; files keep their order, so that they are done one after another."""
    by_file = groupby(window, key=lambda request: request.line.source)
    return [request for _, of_file in by_file for request in order_prompts([*of_file])]

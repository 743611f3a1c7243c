"""A run over lines: reads ahead, puts lines in order, and answers equal ones once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import StoppedError, row_error
from fminfer.engine.counting import count_row
from fminfer.engine.engine_core import Delta, EngineCore, Event, Failed, Origin, RequestCore
from fminfer.engine.sequence import Prepared
from fminfer.engine.waiting import plan_order
from fminfer.runtime.lines.asked import Answer, LineRequest, RecordForm, answer_of
from fminfer.runtime.lines.equal_requests import EqualRequests
from fminfer.runtime.lines.line_intake import LineIntake
from fminfer.runtime.result_cache import ResultCache

LOOKAHEAD = 64  # lines to read between steps, and the default number of waiting prompts
WINDOW = 1024  # prompts that a run over files reads ahead, to put them in order
MAX_WINDOW_TOKENS = 500_000  # of all their ids, some 20 MB
MAX_GROUP_BYTES = 1 << 17  # of lines that are tokenized together, before more are wanted or not
MIN_WAITING = 32  # when fewer prompts wait, those that were read join them


class LineRunner:
    """Answers lines with an engine: `add` lines while it wants some, and `step`.

    Args:
        core: answers the lines' requests.
        form: of the records.
        engine: the same as `core`, if the run has the engine for itself.
        read_ahead: prompts that are read before there is room for them, to be put in order.
        has_long_steps: all wanted prompts are read between two steps.
        joins_equal: compute equal requests once.
        is_only_run: keep no prefixes for another run of the engine.
        cache: has answers of other runs; several runners may share it.
        on_others: told by `step` of events of requests that others have added to the engine.
    """

    def __init__(
        self,
        core: RequestCore,
        intake: LineIntake,
        form: RecordForm,
        *,
        engine: EngineCore | None = None,
        read_ahead: int = LOOKAHEAD,
        has_long_steps: bool = False,
        joins_equal: bool = True,
        is_only_run: bool = False,
        cache: ResultCache | None = None,
        on_others: Callable[[list[Event]], None] = lambda events: None,
    ) -> None:
        self._core, self._engine = core, engine
        self._intake = intake
        self._form = form
        self._read_ahead, self._has_long_steps = read_ahead, has_long_steps
        self._equal = EqualRequests() if joins_equal else None
        self._is_only_run = is_only_run
        self._cache = cache
        self._on_others = on_others
        self._read: list[Line] = []  # and not yet opened
        self._window: list[LineRequest] = []  # opened, and not yet with the engine
        self._num_window_prompts = self._num_window_tokens = 0
        self._asked: dict[int, LineRequest] = {}  # with the engine
        self._done: deque[Record] = deque()
        self._has_all = False
        self._stop_at_s = math.inf
        if engine is not None:
            engine.start_run()

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
        is_computing = self._engine is None or self._engine.is_computing
        is_brief = is_computing and not self._has_long_steps
        num_most = LOOKAHEAD if is_brief else max(LOOKAHEAD, self._read_ahead)
        num_bytes = 0
        for _ in range(num_most):
            if not self.wants_more:
                break
            try:
                line = next(lines)
            except StopIteration:
                self._open_read()
                self.end_input()
                return
            if line is None:
                break
            self._read.append(line)
            num_bytes += len(line.raw)
            if len(self._read) >= self._intake.group_size or num_bytes >= MAX_GROUP_BYTES:
                self._open_read()
                num_bytes = 0
        self._open_read()

    @property
    def wants_more(self) -> bool:
        """Whether another line should be read now."""
        return not (
            self._has_all
            or self._is_stopping
            or self._num_ahead >= self._window_size
            or self._num_window_tokens >= MAX_WINDOW_TOKENS
            or len(self._done) >= LOOKAHEAD  # lines that need no step: hand them out first
            or (self._equal is not None and self._equal.is_full)
        )

    @property
    def has_window(self) -> bool:
        """Whether lines wait for the engine to have room for them."""
        return bool(self._window)

    @property
    def is_busy(self) -> bool:
        """Whether a line that was added has no record yet."""
        return bool(self._window or self._asked or self._done)

    @property
    def has_work(self) -> bool:
        """Whether lines are left, or may still come."""
        return self.is_busy or not self._has_all

    def add(self, line: Line) -> None:
        """Take the next line."""
        self._read.append(line)
        self._open_read()

    def _open_read(self) -> None:
        """Open the lines that were read, all at once."""
        lines, self._read = self._read, []
        for asked in self._intake.open_all(lines):
            self._take_in(asked)

    def _take_in(self, asked: LineRequest | Record) -> None:
        if isinstance(asked, Record):
            self._count(None)
            self._done.append(asked)
            return
        leader = None if self._equal is None else self._equal.follow(asked)
        if leader is not None:
            self._count(asked.prepared, "copied")
            if leader.answer is not None:
                self._done.append(self._form.build(asked, answer_of(asked, leader)))
            return
        kept = None if self._cache is None else self._cache.find(asked.prepared)
        if kept is not None:
            self._count(asked.prepared, "kept")
            self._finish(asked, kept)
            return
        self._count(asked.prepared)
        self._window.append(asked)
        self._num_window_prompts += asked.num_prompts
        self._num_window_tokens += asked.num_prompt_tokens

    def pass_over(self, line: Line) -> None:
        """Take note of a line of this run that is not to be answered again."""
        self._open_read()  # which stand before it
        self._intake.pass_over(line)

    def end_input(self) -> None:
        """Take note that no more lines come."""
        self._has_all = True

    def stop(self, grace_s: float) -> None:
        """Take no more lines in; rows that run may go on so long. It may be called at any moment.

        `step` then raises StoppedError, unless every line is answered.
        """
        self._stop_at_s = min(self._stop_at_s, time.perf_counter() + grace_s)

    def step(self) -> list[Record]:
        """Let the engine go on a little; return the records that are there now.

        Raises:
            StoppedError: it was to stop, and lines are left.
            FminferError: the engine cannot go on.
        """
        self.hand_over()
        events = self._core.step() if self._core.has_work else []
        self._on_others([event for event in events if event.request_id not in self._asked])
        records = self.take(events)
        if self._engine is not None and not self.has_work:
            self._engine.check_idle()
        return records

    def hand_over(self) -> None:
        """Give the engine lines, if few wait there."""
        if self._is_stopping:
            if self._engine is not None:
                self._engine.drain(self._stop_at_s)
            return
        is_whole = self._has_all or not self.wants_more
        num_few = LOOKAHEAD if is_whole else MIN_WAITING
        if self._window and self._core.num_waiting < num_few:
            window, self._window = self._window, []
            self._num_window_prompts = self._num_window_tokens = 0
            for asked in _in_order(window):
                self._give(asked)
        if self._engine is not None and self._is_only_run and self._has_all and not self._window:
            self._engine.expect_no_more()

    def take(self, events: list[Event]) -> list[Record]:
        """Return the records that are there now.

        Events of requests that it did not add are passed over: who shares the engine takes them.

        Raises:
            StoppedError: as `step`.
        """
        for event in events:
            if not isinstance(event, Delta) and event.request_id in self._asked:
                asked = self._asked.pop(event.request_id)
                if self._cache is not None and not isinstance(event, Failed):
                    self._cache.keep(asked.prepared, event)
                self._finish(asked, event)
        records = [*self._done]
        self._done.clear()
        self._check_stopped(has_news=bool(records))
        return records

    def close(self) -> None:
        """Cancel what has no record yet."""
        for request_id in self._asked:
            self._core.cancel(request_id)
        self._asked.clear()
        self._window.clear()
        self._done.clear()
        if self._engine is not None and self._is_stopping:
            self._engine.start_run()  # requests that others add may begin again

    @property
    def _is_stopping(self) -> bool:
        return self._stop_at_s < math.inf

    @property
    def _num_ahead(self) -> int:
        return self._core.num_waiting + self._num_window_prompts

    @property
    def _window_size(self) -> int:
        """Return how many prompts are read ahead: few once another file was opened."""
        if self._window and self._window[0].line.source != self._window[-1].line.source:
            return min(LOOKAHEAD, self._read_ahead)
        return self._read_ahead

    def _count(self, prepared: Prepared | None, origin: Origin = "computed") -> None:
        """Count a line for progress; a shared engine counts only the requests that it gets."""
        if self._engine is not None:
            count_row(self._engine.lines, prepared, origin)

    def _give(self, asked: LineRequest) -> None:
        asked.added_s = time.perf_counter()
        try:
            self._asked[self._core.add(asked.prepared, is_counted=self._engine is not None)] = asked
        except Exception as error:  # it can never run here
            self._finish(asked, Failed(-1, row_error(error, f"line {asked.line.number}")))

    def _finish(self, asked: LineRequest, answer: Answer) -> None:
        asked.answer = answer
        self._done.append(self._form.build(asked, answer))
        if self._equal is not None:
            for follower in self._equal.finish(asked):
                self._done.append(self._form.build(follower, answer_of(follower, asked)))

    def _check_stopped(self, *, has_news: bool) -> None:
        if not (self._is_stopping and self.has_work) or has_news:
            return
        has_begun = self._engine is None or self._engine.has_begun
        if time.perf_counter() > self._stop_at_s or not has_begun:
            raise StoppedError("stopped as told, and rows are left")


def _in_order(window: list[LineRequest]) -> list[LineRequest]:
    """Order lines; files keep their order, so that they are done one after another."""
    ordered: list[LineRequest] = []
    first = 0
    for place in range(1, len(window) + 1):
        if place == len(window) or window[place].line.source != window[first].line.source:
            ordered += plan_order(window[first:place])
            first = place
    return ordered

"""Shows the progress of a run on stderr: a bar on a terminal, a line now and then elsewhere.

The time left comes from the rate of the last minute, the tokens left, and the longest row.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable

from fminfer.core.quantities import describe_seconds, with_noun
from fminfer.engine.stats import EngineStats, ObservableEngine
from fminfer.runtime.bars import make_bar, num_columns
from fminfer.runtime.job_engine import Pace

BAR_EVERY_S = 0.2
FIRST_LINE_S = 5.0
LINE_EVERY_S = 30.0  # without a terminal; the wait doubles up to the second
LEFT_EVERY_S = 2.0  # how often the time left is worked out
UNKNOWN = "left ?"
LEAST_BAR = 3  # columns
BAR_OF_UNKNOWN = "{desc}: {n_fmt}/? rows{postfix}"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows{postfix}"


# A step takes as long as so many of its tokens: its weights are read, its kernels started.
# The CPU's figure is that of llamas of 12 × 768. The others are assumed. "streamed": some layers
# are (--offload).
STEP_TOKENS = {"cpu": 40.0, "cuda": 300.0, "streamed": 500.0}
MINUTE_S = 60.0
MARK_EVERY_S = 1.0


class TimeLeft:
    """Learns the rate of the last minute, and predicts how long the rest takes.

    Args:
        kind: of the device, cpu or cuda; or "streamed".
        num_stages: of all pipelines; a row draws once while each of them makes a step.
    """

    def __init__(self, kind: str = "cpu", num_stages: int = 1) -> None:
        self._step_tokens = STEP_TOKENS[kind]
        self._num_stages = num_stages
        self._is_warm = False
        self._elapsed_s = self._num_units = 0.0
        self._most_fed = 1.0
        self._num_steps = 0
        self._marks: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def add_steps(
        self, seconds: float, stats: EngineStats, num_fed: int, num_drawn: int
    ) -> None:
        """Add steps that have just ended, and are counted in the statistics."""
        num_steps = stats.num_steps - self._num_steps
        self._num_steps = stats.num_steps
        self._most_fed = max(self._most_fed, num_fed / max(1, num_steps))
        units = num_fed + num_drawn + self._step_tokens * num_steps
        # the first step waited for the first lines, and for memory
        if not self._is_warm:
            self._is_warm = units > 0
            return
        self._elapsed_s += seconds
        self._num_units += units
        self._add_mark()

    def _add_mark(self) -> None:
        if self._elapsed_s - self._marks[-1][0] >= MARK_EVERY_S:
            self._marks.append((self._elapsed_s, self._num_units))
        while len(self._marks) > 1 and self._elapsed_s - self._marks[1][0] >= MINUTE_S:
            self._marks.popleft()

    def predict_running_s(self, engine: ObservableEngine) -> float | None:
        """Predict how long running rows take at most; None: none runs, or not known yet."""
        state = engine.state
        num_turns = state.longest_row
        num_tokens = num_turns * state.num_running
        return (
            self._predict_seconds(num_turns * self._num_stages, num_tokens)
            if num_tokens
            else None
        )

    def predict_all_s(self, engine: ObservableEngine, total_rows: int) -> float | None:
        """Predict how long all rows take that are left; None: it is not known yet."""
        stats = engine.stats
        read = engine.stats.read
        if not read.num_rows:
            return None
        times = max(1.0, total_rows / read.num_rows)  # unread rows are like those read
        num_fed = stats.num_prompt_tokens - stats.num_again_tokens
        num_fed -= stats.num_label_tokens
        num_met = num_fed + stats.num_cached_tokens
        fed_left = (
            max(0.0, read.num_tokens * times - num_met) * num_fed / max(1, num_met)
        )
        num_open = max(1.0, read.num_sequences * times - stats.num_ended)
        fed_left += num_open * stats.num_label_tokens / max(1, stats.num_ended)
        most_drawn = (
            read.max_draws * times - stats.num_generated_tokens - stats.num_undrawn
        )
        stops = stats.num_stopped / max(1, stats.num_generated_tokens)
        drawn_left = num_open * _expected_draws(max(0.0, most_drawn) / num_open, stops)
        num_places = max(1, stats.max_rows_running)
        # The longest of rows that may stop at any draw is so many times the usual one.
        times_usual = 1 + math.log(min(num_open, num_places))
        longest_row = engine.state.longest_row
        usual = _expected_draws(longest_row, stops)
        longest = _expected_draws(longest_row, stops / times_usual)
        num_turns = max(longest, drawn_left / num_places + longest - usual)
        num_steps = num_turns * self._num_stages + fed_left / self._most_fed
        return self._predict_seconds(num_steps, fed_left + drawn_left)

    def is_upper_bound(self, engine: ObservableEngine, total_rows: int) -> bool:
        """Whether rows may take far less: all were read, and none has ended."""
        return engine.stats.read.num_rows >= total_rows and not engine.stats.num_ended

    def _predict_seconds(self, num_steps: float, num_tokens: float) -> float | None:
        first_s, first = self._marks[0]
        seconds = self._elapsed_s - first_s
        units = self._num_units - first
        if not units or seconds <= 0:
            return None
        return (self._step_tokens * num_steps + num_tokens) * seconds / units


class RowsLeft(TimeLeft):
    """Predicts by the rows of the last minute: of servers' rows no tokens are known before."""

    def add_steps(
        self, seconds: float, stats: EngineStats, num_fed: int, num_drawn: int
    ) -> None:
        """Add rows that have just ended, and are counted in the statistics."""
        self._elapsed_s += seconds
        self._num_units = stats.num_ended
        self._add_mark()

    def predict_all_s(self, engine: ObservableEngine, total_rows: int) -> float | None:
        """Predict how long all rows take that are left; None: it is not known yet."""
        state = engine.state
        num_open = state.num_running + state.num_waiting
        num_left = total_rows - engine.stats.read.num_rows + num_open
        return self._predict_seconds(0, num_left)


def make_time_left(pace: Pace, num_stages: int) -> TimeLeft:
    """Return what predicts the rest of a run on such an engine."""
    if pace == "elsewhere":
        return RowsLeft()
    return TimeLeft(pace, num_stages)


def _expected_draws(most: float, stops: float) -> float:
    """Return the draws of a row that may draw so many, if each ends it with a probability."""
    return -math.expm1(-most * stops) / stops if stops else most


class ProgressBar:
    """Shows rows, tokens, tokens/s and the time left.

    Args:
        total_rows: None if it is not known before the input's end. It may change.
        is_slowed: tells whether other work slows the run.
    """

    def __init__(
        self,
        total_rows: int | None,
        time_left: TimeLeft | None = None,
        *,
        is_quiet: bool,
        is_slowed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.total_rows = total_rows
        self._is_slowed = is_slowed
        self._is_terminal = sys.stderr.isatty()
        self._is_quiet = is_quiet
        self._last_step_s = self._last_line_s = time.perf_counter()
        self._every_s = BAR_EVERY_S if self._is_terminal else FIRST_LINE_S
        self._time_left = time_left or TimeLeft()
        self._num_rows = self._num_errors = self._num_tokens = 0
        self._elapsed_s = 0.0
        self._left = UNKNOWN
        self._left_at_s = -math.inf
        self._bar = make_bar(
            total=total_rows,
            desc="fminfer",
            bar_format=BAR_OF_UNKNOWN if total_rows is None else BAR,
            disable=is_quiet or not self._is_terminal,
        )

    def add_work(self, stats: EngineStats, num_fed: int, num_drawn: int) -> None:
        """Add steps that have just ended, and are counted in the statistics."""
        now_s = time.perf_counter()
        self._time_left.add_steps(now_s - self._last_step_s, stats, num_fed, num_drawn)
        self._elapsed_s += now_s - self._last_step_s
        self._last_step_s = now_s
        self._num_tokens += num_fed + num_drawn

    def predict_running_s(self, engine: ObservableEngine) -> float | None:
        """Predict how long running rows take at most; None: none runs, or not known yet."""
        return self._time_left.predict_running_s(engine)

    def predict_left_s(self, engine: ObservableEngine) -> float | None:
        """Predict the seconds left; None: nothing is known, or not how many rows there are."""
        return (
            None
            if self.total_rows is None
            else self._time_left.predict_all_s(engine, self.total_rows)
        )

    def update(self, num_rows: int, num_errors: int, engine: ObservableEngine) -> None:
        """Show the newest counts, if it is time to; `num_errors` of the rows are in error."""
        self._num_rows = num_rows
        self._num_errors = num_errors
        now_s = time.perf_counter()
        if self._is_quiet or now_s - self._last_line_s <= self._every_s:
            return
        self._last_line_s = now_s
        if not self._is_terminal:
            self._every_s = min(2 * self._every_s, LINE_EVERY_S)
        if self._left == UNKNOWN or now_s - self._left_at_s >= LEFT_EVERY_S:
            self._left = self._describe_left(engine)
            self._left_at_s = now_s
        if self._is_terminal:
            self._show_bar()
        else:
            print(f"{self._rows}, {self._make_texts()[0]}", file=sys.stderr, flush=True)

    @property
    def _rows(self) -> str:
        return f"{self._num_rows}/{'?' if self.total_rows is None else self.total_rows} rows"

    def _show_bar(self) -> None:
        texts = self._make_texts()
        room = num_columns() - len(f"fminfer: 100%|| {self._rows}, ") - LEAST_BAR
        text = next((each for each in texts if len(each) <= room), texts[-1])
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.total = self.total_rows
        self._bar.update(self._num_rows - self._bar.n)
        self._bar.refresh()

    def _describe_left(self, engine: ObservableEngine) -> str:
        left_s = self.predict_left_s(engine)
        if left_s is None or self.total_rows is None:
            return UNKNOWN
        is_most = self._time_left.is_upper_bound(engine, self.total_rows)
        return f"left {'<' if is_most else '~'}{describe_seconds(left_s)}"

    def _make_texts(self) -> list[str]:
        """Return what stands behind the rows, and shorter forms of it for narrow terminals."""
        # Rows may take long to end; tokens show that they go on.
        tokens_per_s = (
            self._num_tokens / self._elapsed_s if self._elapsed_s > 0 else 0.0
        )
        tokens = f"{self._num_tokens:,} tokens"
        speed = f"{tokens_per_s:,.0f} tok/s"
        errors = [with_noun(self._num_errors, "error")] if self._num_errors else []
        most = [*filter(None, [self._left]), *errors]
        slowed = ["slowed by other work"] if self._is_slowed() else []
        brief = [*most, *(["slowed"] if slowed else [])]
        forms = [
            [tokens, speed, *most, *slowed],
            [speed, *most, *slowed],
            [speed, *brief],
            brief,
            most,
            most[:1],
        ]
        return [", ".join(form) for form in forms]

    def close(self) -> None:
        self._left = ""  # the run has ended
        self._show_bar()
        self._bar.close()

"""Shows the progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from fminfer.core.quantities import counted, show_seconds
from fminfer.engine.stats import EngineStats, Observed
from fminfer.job.time_left import TimeLeft
from fminfer.runtime.bars import make_bar, num_columns

BAR_EVERY_S = 0.2
FIRST_LINE_S, LINE_EVERY_S = 5.0, 30.0  # without a terminal; the wait doubles up to the second
LEFT_EVERY_S = 2.0  # how often the time left is worked out
UNKNOWN = "left ?"
LEAST_BAR = 3  # columns
BAR_OF_UNKNOWN = "{desc}: {n_fmt}/? rows{postfix}"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows{postfix}"


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
        self._num_rows = self._num_tokens = 0
        self._elapsed_s = 0.0
        self._left, self._left_at_s = UNKNOWN, -math.inf
        hide = is_quiet or not self._is_terminal
        form = BAR_OF_UNKNOWN if total_rows is None else BAR
        self._bar = make_bar(total=total_rows, desc="fminfer", bar_format=form, disable=hide)

    def add_work(self, stats: EngineStats, num_fed: int, num_drawn: int) -> None:
        """Take note of steps that have just ended, and are counted in the statistics."""
        now_s = time.perf_counter()
        self._time_left.add(now_s - self._last_step_s, stats, num_fed, num_drawn)
        self._elapsed_s += now_s - self._last_step_s
        self._last_step_s = now_s
        self._num_tokens += num_fed + num_drawn

    def drawing_s(self, engine: Observed) -> float | None:
        """Estimate how long running rows take at most; None: none runs, or it is not known yet."""
        return self._time_left.running_s(engine)

    def left_s(self, engine: Observed) -> float | None:
        """Estimate the seconds left; None: nothing is known, or not how many rows there are."""
        return None if self.total_rows is None else self._time_left.all_s(engine, self.total_rows)

    def update(self, num_rows: int, num_errors: int, engine: Observed) -> None:
        """Show the newest counts, if it is time to; `num_errors` of the rows are in error."""
        self._num_rows = num_rows
        now_s = time.perf_counter()
        if self._is_quiet or now_s - self._last_line_s <= self._every_s:
            return
        self._last_line_s = now_s
        if not self._is_terminal:
            self._every_s = min(2 * self._every_s, LINE_EVERY_S)
        if self._left == UNKNOWN or now_s - self._left_at_s >= LEFT_EVERY_S:
            self._left, self._left_at_s = self._tell_left(engine), now_s
        total = "?" if self.total_rows is None else self.total_rows
        rows = f"{num_rows}/{total} rows"
        texts = self._texts(num_errors)
        if self._is_terminal:
            room = num_columns() - len(f"fminfer: 100%|| {rows}, ") - LEAST_BAR
            text = next((each for each in texts if len(each) <= room), texts[-1])
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.total = self.total_rows
            self._bar.update(num_rows - self._bar.n)
            self._bar.refresh()
        else:
            print(f"{rows}, {texts[0]}", file=sys.stderr, flush=True)

    def _tell_left(self, engine: Observed) -> str:
        left_s = self.left_s(engine)
        if left_s is None or self.total_rows is None:
            return UNKNOWN
        is_most = self._time_left.is_most(engine, self.total_rows)
        return f"left {'<' if is_most else '~'}{show_seconds(left_s)}"

    def _texts(self, num_errors: int) -> list[str]:
        """Return what stands behind the rows, and shorter forms of it for narrow terminals."""
        # Rows may take long to end; tokens show that they go on.
        tokens_per_s = self._num_tokens / self._elapsed_s if self._elapsed_s > 0 else 0.0
        tokens, speed = f"{self._num_tokens:,} tokens", f"{tokens_per_s:,.0f} tok/s"
        most = [self._left, *([counted(num_errors, "error")] if num_errors else [])]
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
        self._bar.update(self._num_rows - self._bar.n)
        self._bar.close()

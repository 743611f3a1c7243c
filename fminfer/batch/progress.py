"""Shows the progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fminfer.core.quantities import counted
from fminfer.core.quantities import show_dtypes as show_dtypes
from fminfer.core.quantities import show_seconds as show_seconds
from fminfer.engine.stats import EngineStats

BAR_EVERY_S = 0.2
FIRST_LINE_S, LINE_EVERY_S = 5.0, 30.0  # without a terminal; the wait doubles up to the second
DRAWN_COST = 1.48  # time of a drawn token over a prompt token's, on CPUs, until it is measured
USUAL_SIZE = {"ncols": 80, "nrows": 24}  # for a terminal that does not report its size
BAR_OF_UNKNOWN = "{desc}: {n_fmt}/? rows{postfix}"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows{postfix}"


class Pace:
    """The time of a prompt token and of a drawn one, learned from the steps of a run so far."""

    def __init__(self) -> None:
        self._num_fed = self._num_drawn = 0
        self._elapsed_s = 0.0
        self._num_drawn_alone = 0  # in steps that fed no prompt
        self._alone_s = 0.0

    def add(self, seconds: float, num_fed: int, num_drawn: int) -> None:
        """Take note of a step."""
        self._num_fed += num_fed
        self._num_drawn += num_drawn
        self._elapsed_s += seconds
        if not num_fed:
            self._num_drawn_alone += num_drawn
            self._alone_s += seconds

    @property
    def num_tokens(self) -> int:
        return self._num_fed + self._num_drawn

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self._elapsed_s if self._elapsed_s > 0 else 0.0

    def seconds(self, num_fed: float, num_drawn: float) -> float | None:
        """Estimate how long so many more tokens take; None: no token has been computed yet."""
        if self.tokens_per_s == 0:
            return None
        drawn, fed = DRAWN_COST, 1.0
        if self._num_drawn_alone and self._num_fed:
            drawn = self._alone_s / self._num_drawn_alone
            fed = max(0.0, self._elapsed_s - drawn * self._num_drawn) / self._num_fed
        past = fed * self._num_fed + drawn * self._num_drawn
        return self._elapsed_s * (fed * num_fed + drawn * num_drawn) / past


def work_left(stats: EngineStats, total_rows: int) -> tuple[float, float]:
    """Estimate how many tokens are still to be fed, and to be drawn.

    Unread rows count like those that were read. The expected saving of the prefix cache is first
    that of the best possible one, and then more and more what it has saved so far. Each token ends
    a row as often as it has so far: a mean over finished rows would favor the short ones.
    """
    read = stats.read
    num_unread = max(0, total_rows - read.num_rows) / max(1, read.num_rows)  # times what was read
    num_fed = stats.num_prompt_tokens - stats.num_again_tokens
    num_met = num_fed + stats.num_cached_tokens
    num_tokens = read.num_tokens * (1 + num_unread)
    seen = num_met / max(1.0, num_tokens)
    share = 1 - stats.num_counted_shareable / max(1, stats.num_counted_tokens)
    if num_met:
        share += seen * (num_fed / num_met - share)
    to_feed = share * max(0.0, num_tokens - num_met)
    stop_rate = read.num_stopped / max(1, stats.num_generated_tokens)
    to_draw = _expected_draws(read.num_open, read.max_open_draws, stop_rate)
    to_draw += num_unread * _expected_draws(read.num_sequences, read.max_draws, stop_rate)
    return to_feed, to_draw


def _expected_draws(num_sequences: int, max_draws: int, stop_rate: float) -> float:
    """Return what sequences will draw if each draw is the last one with a probability."""
    if not (num_sequences and stop_rate):
        return max_draws
    ends_share: float = 1 - (1 - stop_rate) ** (max_draws / num_sequences)
    return num_sequences * ends_share / stop_rate


class ProgressBar:
    """Shows rows, tokens, tokens/s and the time left.

    Args:
        total_rows: None if it is not known before the input's end. It may change.
        is_slowed: tells whether other work slows the run.
    """

    def __init__(
        self,
        total_rows: int | None,
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
        self._pace = Pace()
        self._num_rows = 0
        hide = is_quiet or not self._is_terminal
        form = BAR_OF_UNKNOWN if total_rows is None else BAR
        self._bar = _make_bar(total=total_rows, desc="fminfer", bar_format=form, disable=hide)

    def add_step(self, num_fed: int, num_drawn: int) -> None:
        """Take note of a step that has just ended."""
        now_s = time.perf_counter()
        self._pace.add(now_s - self._last_step_s, num_fed, num_drawn)
        self._last_step_s = now_s

    def drawing_s(self, num_tokens: int) -> float | None:
        """Estimate how long so many more tokens take to draw; None: it is not known yet."""
        return self._pace.seconds(0, num_tokens) if num_tokens else None

    def left_s(self, stats: EngineStats) -> float | None:
        """Estimate the seconds left; None: nothing is known, or not how many rows there are."""
        if self.total_rows is None or not stats.read.num_rows:
            return None
        return self._pace.seconds(*work_left(stats, self.total_rows))

    def update(self, num_rows: int, num_errors: int, stats: EngineStats) -> None:
        """Show the newest counts, if it is time to.

        Args:
            num_rows: finished, `num_errors` of them in error.
        """
        self._num_rows = num_rows
        now_s = time.perf_counter()
        if self._is_quiet or now_s - self._last_line_s <= self._every_s:
            return
        self._last_line_s = now_s
        if not self._is_terminal:
            self._every_s = min(2 * self._every_s, LINE_EVERY_S)
        left_s = self.left_s(stats)
        left = "?" if left_s is None else show_seconds(left_s)
        # Rows may take long to end; tokens show that they go on.
        postfix = f"{self._pace.num_tokens:,} tokens, {self._pace.tokens_per_s:,.0f} tok/s"
        postfix += f", left {left}"
        if num_errors:
            postfix += f", {counted(num_errors, 'error')}"
        if self._is_slowed():
            postfix += ", slowed by other work"
        if self._is_terminal:
            self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.total = self.total_rows
            self._bar.update(num_rows - self._bar.n)
            self._bar.refresh()
        else:
            total = "?" if self.total_rows is None else self.total_rows
            print(f"{num_rows}/{total} rows, {postfix}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.update(self._num_rows - self._bar.n)
        self._bar.close()


class TimeBar:
    """Shows how much of an expected time is over; the expectation may change."""

    def __init__(self, name: str) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last_line_s = -math.inf
        form = "{desc}: {percentage:3.0f}%|{bar}|{postfix}"
        self._bar = _make_bar(
            desc=name, bar_format=form, disable=not self._is_terminal, leave=False
        )
        self._name = name

    def update(self, what: str, elapsed_s: float, in_all_s: float) -> None:
        """Show what is done now, and the time left.

        Args:
            in_all_s: 0: not known yet.
        """
        left = f"left {show_seconds(max(0.0, in_all_s - elapsed_s))}" if in_all_s else "left ?"
        if self._is_terminal:
            self._bar.total = max(in_all_s, elapsed_s, 1.0)
            self._bar.set_postfix_str(f"{left}, {what}", refresh=False)
            self._bar.update(elapsed_s - self._bar.n)
            self._bar.refresh()
        elif elapsed_s - self._last_line_s > FIRST_LINE_S:
            self._last_line_s = elapsed_s
            print(f"{self._name}: {left}, {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def write_beside_bar(line: bytes) -> None:
    """Write a line to stderr without disturbing a bar that is shown there."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):
        sys.stderr.buffer.write(line + b"\n")
        sys.stderr.buffer.flush()


class LoadingBar:
    """Shows the weights coming in, on a terminal."""

    def __init__(self, *, is_quiet: bool) -> None:
        hide = is_quiet or not sys.stderr.isatty()
        self._bar = _make_bar(
            total=0, desc="weights", unit="B", unit_scale=True, disable=hide, leave=False, delay=0.5
        )

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.total = total_bytes
        self._bar.update(done_bytes - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _make_bar(**how: Any) -> Any:
    """Return a tqdm bar; its library takes a third of the start of commands that show none."""
    from tqdm import tqdm

    return tqdm(**how, **_size())


def _size() -> dict[str, int]:
    """Return a size for a terminal that reports no columns, where a bar would not show."""
    with suppress(OSError, ValueError):
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            return USUAL_SIZE
    return {}

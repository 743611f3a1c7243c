"""What a person sees while a run goes on: a bar on a terminal, a line now and then elsewhere.

Everything goes to stderr. It knows counts and seconds only.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

LINE_EVERY_S = 30.0  # without a terminal
BAR_OF_UNKNOWN = "{desc}: {n_fmt}/? rows{postfix}"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows{postfix}"


@dataclass(slots=True, frozen=True)
class Progress:
    """How far a run is."""

    num_rows: int
    num_errors: int
    num_tokens: int  # prompt tokens fed and tokens generated, unfinished rows included
    num_finished_tokens: int  # the same of finished rows


def remaining_s(progress: Progress, total_rows: int | None, elapsed_s: float) -> float | None:
    """Estimate the seconds left from tokens: rows that are half done count as half done.

    None where nothing is known yet, or how many rows there are is not. The rows to come are taken
    to be as long as the finished ones are on average; where those that run are longer already, that
    is no guide.
    """
    if total_rows is None:
        return None
    if not (progress.num_finished_tokens and progress.num_tokens and elapsed_s > 0):
        return None
    expected = progress.num_finished_tokens / progress.num_rows * total_rows
    left = expected - progress.num_tokens
    if left <= 0 and progress.num_rows < total_rows:
        return None
    return max(0.0, left) / (progress.num_tokens / elapsed_s)


def show_seconds(seconds: float) -> str:
    """Write 3725.0 as 1:02:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


class ProgressBar:
    """Shows rows, tokens/s and the time left.

    Args:
        total_rows: None if it is not known before the input's end.
    """

    def __init__(self, total_rows: int | None, *, is_quiet: bool) -> None:
        self._total = total_rows
        self._is_terminal = sys.stderr.isatty()
        self._is_quiet = is_quiet
        self._started_s = self._last_line_s = time.perf_counter()
        hide = is_quiet or not self._is_terminal
        form = BAR_OF_UNKNOWN if total_rows is None else BAR
        self._bar = tqdm(total=total_rows, desc="fminfer", bar_format=form, disable=hide)

    def update(self, progress: Progress) -> None:
        """Show the newest counts, if it is time to."""
        now_s = time.perf_counter()
        if self._is_quiet or not (self._is_terminal or now_s - self._last_line_s > LINE_EVERY_S):
            self._bar.update(progress.num_rows - self._bar.n)
            return
        elapsed_s = now_s - self._started_s
        left_s = remaining_s(progress, self._total, elapsed_s)
        rate = progress.num_tokens / elapsed_s if elapsed_s > 0 else 0.0
        postfix = f"{rate:,.0f} tok/s, left " + ("?" if left_s is None else show_seconds(left_s))
        if progress.num_errors:
            postfix += f", {progress.num_errors} errors"
        if self._is_terminal:
            self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.update(progress.num_rows - self._bar.n)
        else:
            self._last_line_s = now_s
            total = "?" if self._total is None else self._total
            print(f"{progress.num_rows}/{total} rows, {postfix}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def write_beside_bar(line: bytes) -> None:
    """Write a line to stderr without disturbing a bar that is shown there."""
    with tqdm.external_write_mode(file=sys.stderr):
        sys.stderr.buffer.write(line + b"\n")
        sys.stderr.buffer.flush()


class LoadingBar:
    """Shows the weights coming in, on a terminal."""

    def __init__(self, *, is_quiet: bool) -> None:
        hide = is_quiet or not sys.stderr.isatty()
        self._bar = tqdm(
            total=0, desc="weights", unit="B", unit_scale=True, disable=hide, leave=False, delay=0.5
        )

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.total = total_bytes
        self._bar.update(done_bytes - self._bar.n)

    def close(self) -> None:
        self._bar.close()

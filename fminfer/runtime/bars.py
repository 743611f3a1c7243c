"""Bars on a terminal, and lines beside them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from fminfer.core.errors import make_printable
from fminfer.core.terminal import find_width, wrap_lines

USUAL_COLUMNS = 80
USUAL_LINES = 24  # for a terminal that does not report its size


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
        self._bar = make_bar(
            total=0,
            desc="weights",
            unit="B",
            unit_scale=True,
            disable=hide,
            leave=False,
            delay=0.5,
        )

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.total = total_bytes
        self._bar.update(done_bytes - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def make_bar(**options: Any) -> Any:
    """Return a tqdm bar; its library takes a third of the start of commands that show none."""
    from tqdm import tqdm

    # Where a terminal reports no columns, or no lines, tqdm would show no bar.
    size: dict[str, Any] = {"dynamic_ncols": True}
    if not all(_terminal_size()):
        size = {"ncols": num_columns(), "nrows": USUAL_LINES}
    return tqdm(**options, **size)


def num_columns() -> int:
    """Return the width of the terminal, which may change."""
    return _terminal_size().columns or USUAL_COLUMNS


def _terminal_size() -> os.terminal_size:
    """Return the size of the terminal; 0: it is not known."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno())
    return os.terminal_size((0, 0))


def say(text: str) -> None:
    """Tell the user something while rows run."""
    write_beside_bar(wrap_lines(make_printable(text), find_width(sys.stderr)).encode())

"""Writes records to stdout in input order, each as soon as those before it are out.

Errors go to stderr, as JSON lines. It knows nothing of the records' contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from fminfer.core.errors import OutputError


class OrderedStream:
    """Takes records in any order; holds those that are ready before their turn.

    Args:
        write_error: takes the line of a request that could not be answered.
    """

    def __init__(self, answers: BinaryIO, write_error: Callable[[bytes], None]) -> None:
        self._answers = answers
        self._write_error = write_error
        self._order: deque[tuple[int, int]] = deque()  # (source, number) of what is not out yet
        self._ready: dict[tuple[int, int], tuple[bytes, bool]] = {}

    def expect(self, source: int, number: int) -> None:
        """Announce a record; they come out in the order in which they are announced."""
        self._order.append((source, number))

    def append(self, source: int, number: int, line: bytes, *, is_error: bool) -> None:
        """Take the record of line `number` of an input, and write what is next in order.

        Raises:
            BrokenPipeError: the reader is gone.
            OutputError: it cannot be written for another reason.
        """
        self._ready[source, number] = line, is_error
        while self._order and self._order[0] in self._ready:
            line, is_error = self._ready.pop(self._order.popleft())
            if is_error:
                self._write_error(line)
            else:
                self._write(line + b"\n")

    def _write(self, line: bytes) -> None:
        try:
            self._answers.write(line)
            self._answers.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"stdout cannot be written: {error.strerror or error}. What was written is not "
                "gone on with; give --output FILE, which is"
            ) from error

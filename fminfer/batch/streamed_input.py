"""An input whose answers go to stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from fminfer.contract.line import Line
from fminfer.contract.record import Record
from fminfer.files.carrying_over import CarriedOver
from fminfer.files.line_reader import count_rows, read_lines
from fminfer.files.ordered_stdout import OrderedStream
from fminfer.files.output_paths import STDOUT
from fminfer.files.row_counts import Tally


class StreamedInput:
    """An input whose answers go to stdout: in order, as soon as those before them are out.

    No run goes on where another ended, and no other run can take it over.
    """

    output = STDOUT
    kept = Tally()
    num_damaged_rows = num_tried_rows = 0
    num_saved_rows = None
    carried = CarriedOver()
    is_lost = False

    def __init__(
        self, path: Path, source: int, stream: OrderedStream, limit: int | None = None
    ) -> None:
        self.path, self.source = path, source
        self._limit = limit
        self.num_left = count_rows(path, limit)
        self._num_read = self._num_done = 0
        self._is_read = False
        self._stream = stream

    @property
    def is_finished(self) -> bool:
        return self._is_read and self._num_done == self._num_read

    @property
    def is_settled(self) -> bool:
        return self.is_finished

    def lines(self, pass_over: Callable[[Line], None]) -> Iterator[Line]:
        """Read it; no line is passed over."""
        for line in read_lines(self.path, self.source, limit=self._limit):
            self._stream.expect(self.source, line.number)
            self._num_read += 1
            yield line
        self._is_read = True

    def add(self, record: Record) -> bool:
        """Write a record when it is its turn."""
        is_error = record.error is not None
        self._stream.append(self.source, record.line.number, record.to_json(), is_error=is_error)
        self._num_done += 1
        return True

    def see_completed(self) -> None:
        """No other run completes it."""

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing."""

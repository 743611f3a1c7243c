"""The inputs of a run, and where their answers go: to files, or to stdout."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from fminfer.answers.carrying_over import CarriedOver, RunTerms
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import InUseError, OutputError, UsageError
from fminfer.files.journal_rows import RowCounts
from fminfer.files.line_reader import count_lines, read_lines, sum_counts
from fminfer.files.output_paths import STDOUT
from fminfer.files.tables.row_template import RowTemplate
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.run_summary import JobSummary
from fminfer.runtime.bars import write_beside_bar


class OrderedStream:
    """Writes records in their order; holds those that are ready early."""

    def __init__(self, answers: BinaryIO, write_error: Callable[[bytes], None]) -> None:
        self._answers = answers
        self._write_error = write_error
        # (source, number) of what is not out yet
        self._order: deque[tuple[int, int]] = deque()
        self._ready: dict[tuple[int, int], tuple[bytes, bool]] = {}

    def expect_record(self, source: int, number: int) -> None:
        """Announce a record; they come out in the order in which they are announced."""
        self._order.append((source, number))

    def append(self, source: int, number: int, line: bytes, *, is_error: bool) -> None:
        """Add the record of line `number` of an input, and write those that are next."""
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


class StreamedInput:
    """An input whose answers go to stdout: in order, as soon as those before them are out."""

    output = STDOUT
    kept = RowCounts()
    num_damaged_rows = num_tried_rows = 0
    num_saved_rows = None
    carried = CarriedOver()
    is_lost = False

    def __init__(
        self,
        path: Path,
        source: int,
        stream: OrderedStream,
        limit: int | None = None,
        row_template: RowTemplate | None = None,
        *,
        has_line_numbers: bool = False,
    ) -> None:
        self.path = path
        self.source = source
        self._limit = limit
        self._row_template = row_template
        self._has_line_numbers = has_line_numbers
        self.num_left = count_lines(path, limit, row_template)
        self._num_read = self._num_done = 0
        self._is_read = False
        self._stream = stream

    @property
    def is_finished(self) -> bool:
        return self._is_read and self._num_done == self._num_read

    is_settled = is_finished

    def begin(self) -> None:
        """Do nothing: there are no rows of earlier runs."""

    def read_lines(self, pass_over: Callable[[Line], None]) -> Iterator[Line]:
        """Read it; no line is passed over."""
        lines = read_lines(
            self.path, self.source, limit=self._limit, row_template=self._row_template
        )
        for line in lines:
            self._stream.expect_record(self.source, line.number)
            self._num_read += 1
            yield replace(line, shows_number=self._has_line_numbers)
        self._is_read = True

    def add(self, record: Record) -> bool:
        """Write a record when it is its turn."""
        self._stream.append(
            self.source,
            record.line.number,
            record.to_json(),
            is_error=record.error is not None,
        )
        self._num_done += 1
        return True

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing."""


RunInput = JournaledInput | StreamedInput


class RunInputs(ABC):
    """The inputs of a run: named files, a shared folder, stdin."""

    files: Sequence[RunInput]  # so far; a line's `source` is the place of its own
    num_rows: int | None  # lines to answer; None: not known before the inputs' end

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Return whether nothing is left for this run."""

    @property
    @abstractmethod
    def kept(self) -> RowCounts:
        """Rows of other runs that stand in the outputs."""

    @property
    def num_saved_rows(self) -> int | None:
        """Rows that the next run keeps, once a file; None: it keeps none."""
        saved = {file.path: file.num_saved_rows for file in self.files}
        known = [number for number in saved.values() if number is not None]
        return sum(known) if known else None

    @abstractmethod
    def iterate_files(self) -> Iterator[RunInput | None]:
        """Yield one input after another; None while none is free."""

    @abstractmethod
    def abandon_file(self, file: RunInput, error: UsageError) -> None:
        """Leave an input that cannot be answered, or raise its error: the run cannot go on."""

    @abstractmethod
    def check_none_lost(self) -> None:
        """Raise an InUseError if another run answers an input of this run."""

    def abandon(self, error: BaseException) -> None:
        """Stop without finishing; each status file says why."""
        for file in self.files:
            file.abandon(error)

    def add_to_summary(self, summary: JobSummary) -> None:
        """Add what became of the inputs to a run's summary.

        What a run finds in a file counts once, also if it lost that file and took it again.
        """
        summary.num_kept_rows = self.kept.num_rows
        summary.num_kept_errors = self.kept.num_errors
        damaged = Counter[Path]()
        tried = Counter[Path]()
        carried = dict[Path, CarriedOver]()
        for file in self.files:
            if file.is_lost and file.is_finished:
                summary.completed_elsewhere.append(str(file.output))
            damaged |= Counter({file.path: file.num_damaged_rows})  # the larger one
            tried |= Counter({file.path: file.num_tried_rows})
            if file.carried.has_answers:
                carried[file.path] = file.carried
        summary.num_damaged_rows = damaged.total()
        summary.num_tried_rows = tried.total()
        summary.num_changed_inputs = len(carried)
        summary.num_taken_rows = sum(each.num_answered for each in carried.values())
        summary.num_left_out_rows = sum(each.num_left_out for each in carried.values())


class NamedFiles(RunInputs):
    """The inputs of a run that answers all of them itself, one after another."""

    def __init__(self, files: Sequence[RunInput]) -> None:
        self.files = files
        self.num_rows = sum_counts([file.num_left for file in files])

    @property
    def is_finished(self) -> bool:
        return all(file.is_settled for file in self.files)

    @property
    def kept(self) -> RowCounts:
        return sum((file.kept for file in self.files), RowCounts())

    def iterate_files(self) -> Iterator[RunInput]:
        return iter(self.files)

    def abandon_file(self, file: RunInput, error: UsageError) -> None:
        """End the run: whoever named a file wants it answered."""
        raise error

    def check_none_lost(self) -> None:
        for file in self.files:
            if (
                isinstance(file, JournaledInput)
                and file.is_lost
                and not file.is_finished
            ):
                file.adopt_completed()
        lost = [
            str(file.path)
            for file in self.files
            if file.is_lost and not file.is_finished
        ]
        if lost:
            raise InUseError(
                f"another run has taken over {', '.join(lost)}, since this one slept "
                "or did not reach the disk for a minute; what it had finished is kept. "
                "Run the same command again when the other has ended"
            )


def open_files(inputs: list[Path], outputs: list[Path], terms: RunTerms) -> NamedFiles:
    """Open each input with the rows of earlier runs; write nothing if anything is wrong."""
    stream = OrderedStream(sys.stdout.buffer, write_beside_bar)
    files: list[RunInput] = [
        StreamedInput(
            path,
            source,
            stream,
            terms.limit,
            terms.row_template,
            has_line_numbers=terms.has_line_numbers,
        )
        if output == STDOUT
        else JournaledInput(path, source, output, terms)
        for source, (path, output) in enumerate(zip(inputs, outputs, strict=True))
    ]
    for file in files:
        file.begin()
    return NamedFiles(files)

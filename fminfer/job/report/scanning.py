"""Reads all rows of outputs once: counts them, and chooses those to show."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fminfer.core.errors import FminferError, UsageError
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import read_row
from fminfer.files.ordered_output import errors_path
from fminfer.job.report.answer_fields import ODD_RECORD, AnswerFields, read_answer
from fminfer.job.report.row_choice import Place, RowChoice
from fminfer.job.report.tally import AnswerTally
from fminfer.job.report.told_outputs import ToldOutput

LOOK_EVERY = 512  # rows, at the clock
FoundRow = tuple[int, int, int, bytes, bool]  # number, first byte, size, record, is an error


class OutOfTimeError(FminferError):
    """There is no time for a report."""


@dataclass(slots=True, frozen=True)
class RowsFile:
    """A file with rows of an output."""

    path: Path
    output: int  # number of the output
    kind: Literal["answers", "errors", "journal"]


@dataclass(slots=True)
class Scan:
    """What was found in outputs."""

    sources: list[RowsFile] = field(default_factory=list)
    tallies: list[AnswerTally] = field(default_factory=list)  # one an output
    whole: AnswerTally = field(default_factory=AnswerTally)
    choice: RowChoice = field(default_factory=RowChoice)
    end_s: float = math.inf  # in time.monotonic(); later it gives up

    def add(self, output: ToldOutput) -> None:
        """Read all rows of an output.

        Raises:
            UsageError: a file cannot be read.
            OutOfTimeError: it takes too long.
        """
        number = len(self.tallies)
        own = AnswerTally()
        self.tallies.append(own)
        if output.is_unfinished:
            sources = [RowsFile(journal_path(output.path), number, "journal")]
        else:
            sources = [
                RowsFile(output.path, number, "answers"),
                RowsFile(errors_path(output.path), number, "errors"),
            ]
        for source in sources:
            if source.path.exists():
                self.sources.append(source)
                try:
                    self._add_source(source, own)
                except OSError as error:
                    text = f"{source.path} cannot be read: {error.strerror or error}"
                    raise UsageError(text) from error

    def _add_source(self, source: RowsFile, own: AnswerTally) -> None:
        file = len(self.sources) - 1
        rows = _rows_of_journal(source.path) if source.kind == "journal" else _rows(source)
        whole, choice = self.whole, self.choice
        for count, (number, start, size, record, is_error) in enumerate(rows):
            if count % LOOK_EVERY == 0 and time.monotonic() > self.end_s:
                raise OutOfTimeError("to read the answers takes too long; fminfer report does it")
            answer = read_answer(record)
            place = (file, number, start, size)
            try:
                if answer is None:
                    own.num_unread += 1
                    whole.num_unread += 1
                elif is_error or answer.error is not None:
                    own.add_error(answer)
                    choice.add_error(whole.add_error(answer), place)
                else:
                    self._add_answer(answer, place, own)
            except ODD_RECORD:  # edited by hand, or another program's
                own.num_unread += 1
                whole.num_unread += 1

    def _add_answer(
        self, answer: AnswerFields, place: tuple[int, int, int, int], own: AnswerTally
    ) -> None:
        num_drawn = answer.usage.get("completion_tokens", 0)
        own.num_answers += 1
        own.prompt_tokens += answer.usage.get("prompt_tokens", 0)
        own.completion_tokens += num_drawn
        own.num_without_requests += answer.shape == "batch"
        mean = self.whole.add_answer(answer)
        self.choice.add_answer(place, num_drawn, answer.times.get("batch_time"), mean)

    def read(self, place: Place) -> AnswerFields | None:
        """Read a row again; None: it has changed."""
        try:
            with self.sources[place.file].path.open("rb") as file:
                file.seek(place.start)
                return read_answer(file.read(place.size))
        except OSError:
            return None


def _rows(source: RowsFile) -> Iterator[FoundRow]:
    """Yield the rows of a complete file."""
    start = 0
    is_error = source.kind == "errors"
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            size = len(line)
            if size > 1:
                yield number, start, size, line, is_error
            start += size


def _rows_of_journal(path: Path) -> Iterator[FoundRow]:
    """Yield the rows of a journal; of a line that was tried again, the later row."""
    seen = bytearray()  # a byte a line
    tried: dict[int, tuple[int, int, bool]] = {}
    start = 0
    with path.open("rb") as file:
        start = len(file.readline())
        for line in file:
            row = read_row(line)
            size = len(line)
            if row is not None:
                if row.number >= len(seen):
                    seen.extend(bytes(row.number + 1024 - len(seen)))
                first = start + size - 2 - len(row.record)
                if row.is_ours:
                    tried[row.number] = (first, len(row.record), row.is_error)
                elif not seen[row.number]:
                    seen[row.number] = 1
                    tried.pop(row.number, None)
                    yield row.number, first, len(row.record), row.record, row.is_error
            start += size
        for number, (first, length, is_error) in sorted(tried.items()):
            if not seen[number]:
                file.seek(first)
                yield number, first, length, file.read(length), is_error

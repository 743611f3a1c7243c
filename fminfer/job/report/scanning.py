"""Reads all rows of outputs once: counts them, and chooses those to show."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

from fminfer.core.errors import FminferError
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import parse_row
from fminfer.files.ordered_output import errors_path
from fminfer.files.streams import raising_read_errors
from fminfer.job.report.answer_fields import (
    ODD_RECORD,
    AnswerFields,
    find_logprobs,
    read_answer,
)
from fminfer.job.report.answer_tally import AnswerTally, ErrorKind
from fminfer.job.report.label_tally import LabelTally, RowLabel, find_label
from fminfer.job.report.reported_outputs import ReportedOutput

Reason = Literal["sample", "slow", "long", "unlikely", "unsure", "wrong", "error"]
NUM_SHOWN = 200
EXTREMES: tuple[Reason, ...] = ("slow", "long", "unlikely")
NUM_EXTREME = 15  # of each kind
NUM_UNSURE = 100  # rows whose label has the least probability
NUM_OF_KIND = 3  # errors that say the same
MAX_ERRORS = 40
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
MASK = (1 << 64) - 1
CHECK_EVERY = 512  # rows, at the clock
ScannedRow = tuple[int, int, bytes, bool]  # number, first byte, record, is an error


class OutOfTimeError(FminferError):
    """There is no time for a report."""


def _compute_mean_logprob(answer: AnswerFields) -> float | None:
    """Return the mean logprob of all tokens that a row has drawn or scored, if it is known."""
    values = [
        v for choice in answer.choices for v in find_logprobs(choice, answer.request)
    ]
    return sum(values) / len(values) if values else None


class Place(NamedTuple):
    """Where a row stands: its record can be read again."""

    file: int  # number of the file
    number: int  # of the line in that file, from 1; in a journal: of the input's line
    start: int  # byte
    size: int


@dataclass(slots=True)
class _TopRows:
    """The rows with the largest keys; of equal ones, the first."""

    most: int
    # some more of them at times
    rows: list[tuple[float, Place]] = field(default_factory=list)
    least: float = math.inf  # key of all rows

    def add(self, key: float, place: Place) -> None:
        self.least = min(key, self.least)
        self.rows.append((key, place))
        if len(self.rows) > 4 * self.most:
            self.rows = self.sort_rows()

    def sort_rows(self) -> list[tuple[float, Place]]:
        return sorted(self.rows, key=itemgetter(0), reverse=True)[: self.most]

    def list_outstanding(self) -> list[Place]:
        """Return the places of those with more than the least key: no row is long if all are."""
        return [place for key, place in self.sort_rows() if key > self.least]


@dataclass(slots=True)
class RowChoice:
    """The rows to show. The same outputs give the same choice."""

    sampled: _TopRows = field(default_factory=lambda: _TopRows(NUM_SHOWN))
    extremes: dict[Reason, _TopRows] = field(
        default_factory=lambda: {
            **{reason: _TopRows(NUM_EXTREME) for reason in EXTREMES},
            "unsure": _TopRows(NUM_UNSURE),
            "wrong": _TopRows(NUM_EXTREME, least=-math.inf),  # each one stands out
        }
    )
    errors: dict[ErrorKind, list[Place]] = field(default_factory=dict)

    def add_answer(
        self,
        place: Place,
        num_drawn: int,
        seconds: float | None,
        mean_logprob: float | None,
        label: RowLabel | None = None,
    ) -> None:
        """Consider an answered row."""
        self.extremes["long"].add(num_drawn, place)
        if seconds is not None:
            self.extremes["slow"].add(seconds, place)
        if mean_logprob is not None:
            self.extremes["unlikely"].add(-mean_logprob, place)
        if label is not None and label.probability is not None:
            self.extremes["unsure"].add(-label.probability, place)
        if label is not None and label.verdict == "wrong":
            self.extremes["wrong"].add(label.probability or 0.0, place)
        # Multiples of the golden ratio are spread evenly, and so are rows with the largest ones.
        self.sampled.add(((place.number + place.file * 7919) * GOLDEN) & MASK, place)

    def add_error(self, kind: ErrorKind, place: Place) -> None:
        """Consider a row without an answer."""
        places = self.errors.setdefault(kind, [])
        if len(places) < NUM_OF_KIND:
            places.append(place)

    def choose_rows(self) -> dict[Place, set[Reason]]:
        """Return the rows to show, in their order in the outputs, each with why it is shown."""
        chosen: dict[Place, set[Reason]] = {}
        # The first of each kind, then the second of each.
        errors = [
            each
            for places in zip_longest(*self.errors.values())
            for each in places
            if each
        ]
        for error in errors[:MAX_ERRORS]:
            chosen.setdefault(error, set()).add("error")
        for reason, best in self.extremes.items():
            for place in best.list_outstanding():
                chosen.setdefault(place, set()).add(reason)
        for _, place in self.sampled.sort_rows():
            if place not in chosen and len(chosen) < NUM_SHOWN:
                chosen[place] = {"sample"}
        return dict(sorted(chosen.items(), key=lambda each: each[0]))


@dataclass(slots=True, frozen=True)
class RowsFile:
    """A file with rows of an output."""

    path: Path
    output: int  # number of the output
    kind: Literal["answers", "errors", "journal"]

    def read_rows(self) -> Iterator[ScannedRow]:
        """Yield its rows; of a journal's line that was tried again, the later row."""
        if self.kind == "journal":
            yield from _read_journal_rows(self.path)
            return
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if len(line) > 1:
                    yield number, start, line, self.kind == "errors"
                start += len(line)


@dataclass(slots=True)
class Scan:
    """What was found in outputs."""

    sources: list[RowsFile] = field(default_factory=list)
    tally: AnswerTally = field(default_factory=AnswerTally)
    choice: RowChoice = field(default_factory=RowChoice)
    labels: LabelTally = field(default_factory=LabelTally)
    end_s: float = math.inf  # in time.monotonic(); later it gives up

    def add(self, number: int, output: ReportedOutput) -> None:
        """Read all rows of the output with this number.

        Raises:
            UsageError: a file cannot be read.
            OutOfTimeError: it takes too long.
        """
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
                with raising_read_errors(source.path):
                    self._add_source(source)

    def _add_source(self, source: RowsFile) -> None:
        file = len(self.sources) - 1
        for count, (number, start, record, is_error) in enumerate(source.read_rows()):
            if count % CHECK_EVERY == 0 and time.monotonic() > self.end_s:
                raise OutOfTimeError(
                    "to read the answers takes too long; fminfer report does it"
                )
            answer = read_answer(record)
            place = Place(file, number, start, len(record))
            try:
                if answer is None:
                    self.tally.num_unread += 1
                elif is_error or answer.error is not None:
                    self.choice.add_error(
                        self.tally.add_error(answer.error or {}), place
                    )
                else:
                    label = find_label(answer, self.labels.truth)
                    self.choice.add_answer(
                        place,
                        num_drawn=answer.usage.get("completion_tokens", 0),
                        seconds=answer.times.get("batch_time"),
                        mean_logprob=_compute_mean_logprob(answer),
                        label=label,
                    )
                    self.tally.add_answer(answer)
                    self.labels.add(answer, label)
            except ODD_RECORD:  # edited by hand, or another program's
                self.tally.num_unread += 1

    def read_row(self, place: Place) -> AnswerFields | None:
        """Read a row again; None: it has changed.

        Raises:
            UsageError: its file cannot be read any more.
        """
        path = self.sources[place.file].path
        with raising_read_errors(path), path.open("rb") as file:
            file.seek(place.start)
            return read_answer(file.read(place.size))


def _read_journal_rows(path: Path) -> Iterator[ScannedRow]:
    seen = bytearray()  # a byte a line
    tried: dict[int, tuple[int, int, bool]] = {}
    with path.open("rb") as file:
        start = len(file.readline())
        for line in file:
            row = parse_row(line)
            start += len(line)
            if row is None:
                continue
            if row.number >= len(seen):
                seen.extend(bytes(row.number + 1024 - len(seen)))
            first = start - 2 - len(row.record)
            if row.is_ours:
                tried[row.number] = (first, len(row.record), row.is_error)
            elif not seen[row.number]:
                seen[row.number] = 1
                tried.pop(row.number, None)
                yield row.number, first, row.record, row.is_error
        for number, (first, length, is_error) in sorted(tried.items()):
            if not seen[number]:
                file.seek(first)
                yield number, first, file.read(length), is_error

"""Reads all rows of outputs once: counts them, and chooses those to show."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fminfer.core.errors import FminferError, UsageError
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import read_row
from fminfer.files.ordered_output import errors_path
from fminfer.job.report.answer_fields import (
    ODD_RECORD,
    AnswerFields,
    choice_logprobs,
    prompt_of,
    read_answer,
)
from fminfer.job.report.row_choice import ErrorKind, Place, RowChoice
from fminfer.job.report.told_outputs import ToldOutput

LOOK_EVERY = 512  # rows, at the clock
FoundRow = tuple[int, int, int, bytes, bool]  # number, first byte, size, record, is an error
MAX_MESSAGE = 200  # characters by which messages are told apart
MAX_NAMES = 100  # of codes, of models, of reasons to end
MAX_KINDS = 300  # of errors
_GIVEN = re.compile(r"\d+|\"[^\"]*\"")


class OutOfTimeError(FminferError):
    """There is no time for a report."""


@dataclass(slots=True)
class AnswerTally:
    """Counts over all rows, in memory that does not grow with them."""

    num_answers: int = 0
    num_errors: int = 0
    num_unread: int = 0  # lines that are no records
    num_truncated: int = 0  # rows whose prompt was cut to fit
    models: Counter[str] = field(default_factory=Counter)  # of Batch answers
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    error_kinds: Counter[ErrorKind] = field(default_factory=Counter)
    prompt_lengths: Counter[int] = field(default_factory=Counter)  # in tokens
    completion_lengths: Counter[int] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        return self.num_answers + self.num_errors

    def add_error(self, error: dict[str, Any]) -> ErrorKind:
        """Count a row without an answer; return its error's code, and what its message says."""
        self.num_errors += 1
        code = _count(self.error_codes, error.get("code"))
        kind = code, _GIVEN.sub("…", str(error.get("message"))[:MAX_MESSAGE])
        if kind not in self.error_kinds and len(self.error_kinds) >= MAX_KINDS:
            kind = code, ""
        self.error_kinds[kind] += 1
        return kind

    def add_answer(self, answer: AnswerFields) -> None:
        """Count an answered row."""
        usage = answer.usage
        self.num_answers += 1
        num_prompt, num_drawn = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
        if isinstance(num_prompt, int) and isinstance(num_drawn, int):
            self.prompt_lengths[num_prompt] += 1
            self.completion_lengths[num_drawn] += 1
        self.num_truncated += "truncated_tokens" in (usage.get("prompt_tokens_details") or {})
        for choice in answer.choices:
            _count(self.finish_reasons, choice.get("finish_reason") or "none")
        if answer.is_batch:
            _count(self.models, answer.fields["response"]["body"].get("model"))


def _count(counts: Counter[str], value: object) -> str:
    """Count a name, as one of `others` if there are too many; return it as it is counted."""
    name = str(value)[:MAX_MESSAGE]
    if name not in counts and len(counts) >= MAX_NAMES:
        name = "others"
    counts[name] += 1
    return name


def _mean_logprob(answer: AnswerFields) -> float | None:
    """Return the mean logprob of all tokens that a row has drawn or scored, if it is known."""
    values: list[float] = []
    for choice in answer.choices:
        if choice.get("logprobs") is not None:
            request = answer.request if type(answer.request) is dict else {}
            is_echo = bool(request.get("echo"))
            prompt = prompt_of(request, choice.get("index", 0)) if is_echo else None
            values += choice_logprobs(choice, prompt, is_echo=is_echo)
    return sum(values) / len(values) if values else None


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
    tally: AnswerTally = field(default_factory=AnswerTally)
    choice: RowChoice = field(default_factory=RowChoice)
    end_s: float = math.inf  # in time.monotonic(); later it gives up

    def add(self, number: int, output: ToldOutput) -> None:
        """Read all rows of an output.

        Args:
            number: of the output.

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
                try:
                    self._add_source(source)
                except OSError as error:
                    text = f"{source.path} cannot be read: {error.strerror or error}"
                    raise UsageError(text) from error

    def _add_source(self, source: RowsFile) -> None:
        file = len(self.sources) - 1
        rows = _rows_of_journal(source.path) if source.kind == "journal" else _rows(source)
        for count, (number, start, size, record, is_error) in enumerate(rows):
            if count % LOOK_EVERY == 0 and time.monotonic() > self.end_s:
                raise OutOfTimeError("to read the answers takes too long; fminfer report does it")
            answer, place = read_answer(record), Place(file, number, start, size)
            try:
                if answer is None:
                    self.tally.num_unread += 1
                elif is_error or answer.error is not None:
                    self.choice.add_error(self.tally.add_error(answer.error or {}), place)
                else:
                    num_drawn = answer.usage.get("completion_tokens", 0)
                    mean = _mean_logprob(answer)
                    self.choice.add_answer(place, num_drawn, answer.times.get("batch_time"), mean)
                    self.tally.add_answer(answer)
            except ODD_RECORD:  # edited by hand, or another program's
                self.tally.num_unread += 1

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

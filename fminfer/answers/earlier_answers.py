"""Looks up the answers of an earlier run, complete or not, for a changed input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fminfer.answers.line_counter import LineCounter
from fminfer.contract.envelope import MAX_QUOTED_BYTES, Envelope, Line
from fminfer.contract.record import (
    AnsweredRecord,
    find_record_key,
    find_request_bytes,
    is_batch_record,
    make_record_key,
    parse_record,
    readdress_record,
)
from fminfer.core.errors import RequestError, UsageError, line_error
from fminfer.files.completed import is_retryable, read_records
from fminfer.files.journal_rows import parse_row
from fminfer.files.ordered_output import errors_path


class KeyIndex:
    """Places by keys of 16 bytes. First all are added, then they are looked up."""

    def __init__(self) -> None:
        # 24 bytes each: a key, and its place, high bytes first
        self._rows = bytearray()
        self._sorted: Any = None  # the same bytes in order, once they are looked up
        self._is_used = bytearray()  # of each row, for the first one of its key

    def __len__(self) -> int:
        return len(self._rows) // 24

    def add(self, key: bytes, place: int) -> None:
        """Add an answer."""
        self._rows += key + place.to_bytes(8, "big")

    def find(self, key: bytes) -> int | None:
        """Return the place of the first answer with this key; None: there is none."""
        self._sort_rows()
        number = int(np.searchsorted(self._sorted, key))
        row = self._rows[24 * number : 24 * number + 24]
        if row[:16] != key:
            return None
        self._is_used[number] = 1
        return int.from_bytes(row[16:], "big")

    def count_unused(self) -> int:
        """Return how many answers have a key that nobody has asked for."""
        self._sort_rows()
        keys = np.frombuffer(self._rows, [("key", "S16"), ("place", "S8")])["key"]
        firsts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        counts = np.diff(np.append(firsts, len(keys)))
        return int(counts[np.frombuffer(self._is_used, "u1")[firsts] == 0].sum())

    def _sort_rows(self) -> None:
        if self._sorted is None:
            self._sorted = np.frombuffer(self._rows, "S24")
            self._sorted.sort()  # in its place
            self._is_used = bytearray(len(self))


UNSURE = 1 << 40  # more equal lines than a file has
PRINT_EVERY_S = 5.0
CHECK_EVERY = 1024  # seconds; rows between two looks at the clock


class PacedProgress:
    """Prints now and then how far a long task over rows is."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._printed_s = time.monotonic()

    def print_if_due(self, task: str, number: int, total: int = 0) -> None:
        """Print the number of rows so far, if it is time to; `total` 0: it is not known."""
        if (
            number % CHECK_EVERY == 0
            and time.monotonic() - self._printed_s >= PRINT_EVERY_S
        ):
            self._printed_s = time.monotonic()
            self._print_line(f"{task}: {number:,}{f' of {total:,}' if total else ''}")


class EarlierAnswers:
    """Answers by the keys of their requests (`contract.record.make_record_key`)."""

    def __init__(
        self, path: Path, file: BinaryIO, input_was: str, progress: PacedProgress
    ) -> None:
        self.path = path
        self.input_was = input_was
        self.progress = progress
        # of which it is not known how many equal ones stood before them
        self.num_unsure = 0
        self._index = KeyIndex()
        self._file = file
        self._place = -1

    @property
    def num_answers(self) -> int:
        return len(self._index) + self.num_unsure

    @property
    def num_left_out(self) -> int:
        """Answers that no line has asked for."""
        return self._index.count_unused() + self.num_unsure

    def find(self, line: Line, envelope: Envelope, key: bytes) -> AnsweredRecord | None:
        """Return the record that a line gets; None: it has no answer yet."""
        place = self._index.find(key)
        if place is None:
            return None
        if place != self._place:
            self._file.seek(place)
        written = self._file.readline()
        self._place = place + len(written)
        try:
            return readdress_record(self._extract_record(written), line, envelope, key)
        except (ValueError, KeyError) as error:
            raise self._damaged_error(f"{error}, at byte {place}") from error

    def _extract_record(self, written: bytes) -> bytes:
        return written.rstrip(b"\n")

    def _read_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line of the file with its place."""
        place = 0
        for number, line in enumerate(self._file):
            self.progress.print_if_due("Reading earlier answers", number)
            yield place, line
            place += len(line)

    def _damaged_error(self, what: str) -> UsageError:
        return UsageError(
            f"a run cannot go on with {self.path}: its input has changed, and it is not clear "
            f"({what}) which lines the answers belong to. Put the input back as it was, give "
            "--restart to answer all again, or give another --output"
        )


class OutputAnswers(EarlierAnswers):
    """The answers of a complete output.

    Batch records hold their keys, and others their requests.
    Equal requests of other shapes than Batch are counted in the order of the output.
    Where that is not the order of the old input's lines, those in which chance has a
    part are unsure.
    """

    def __init__(
        self,
        output: Path,
        file: BinaryIO,
        input_was: str,
        progress: PacedProgress,
        counter: LineCounter,
    ) -> None:
        super().__init__(output, file, input_was, progress)
        self._has_unknown = False  # a request before the next answer
        self._has_long_unknown = False  # the same, of more than MAX_QUOTED_BYTES
        for record in read_records(errors_path(output)):
            if is_retryable(record):  # other errors are those of all equal requests
                try:
                    self._note_failed_line(record, counter)
                except Exception as error:  # then it was not counted
                    line_error(error, "a failed line")
        for place, line in self._read_lines():
            try:
                key = self._find_key(line.rstrip(b"\n"), counter)
            except (ValueError, KeyError, TypeError, RequestError) as error:
                raise self._damaged_error(f"{error}, at byte {place}") from error
            if key is None:
                self.num_unsure += 1
            else:
                self._index.add(key, place)

    def _note_failed_line(self, record: bytes, counter: LineCounter) -> None:
        """Note a line that was counted, and has no answer: its place is not known."""
        request = None if is_batch_record(record) else parse_record(record)["request"]
        if isinstance(request, dict):
            counter.count_request(request, times=UNSURE)
        elif isinstance(request, str):  # only its beginning is quoted
            self._has_long_unknown = True
        else:
            self._has_unknown = True

    def _find_key(self, record: bytes, counter: LineCounter) -> bytes | None:
        if is_batch_record(record):
            self._has_unknown = True
            if (key := find_record_key(record)) is None:
                raise ValueError(
                    "a Batch record of an older version does not tell its request"
                )
            return key
        request = find_request_bytes(record)
        repeat = counter.count_request(parse_record(request))
        is_long = self._has_long_unknown and len(request) > MAX_QUOTED_BYTES
        if repeat is not None and (repeat >= UNSURE or self._has_unknown or is_long):
            return None
        return make_record_key(Envelope("bare", request), repeat or 0)


class JournalAnswers(EarlierAnswers):
    """The answers of a journal, whose rows hold their keys, unless an older version wrote it."""

    def __init__(
        self, journal: Path, file: BinaryIO, input_was: str, progress: PacedProgress
    ) -> None:
        super().__init__(journal, file, input_was, progress)
        for place, line in self._read_lines():
            row = parse_row(line)
            # its head, a damaged row, or one to be judged again
            if row is None or row.is_error:
                continue
            if not row.key:
                raise self._damaged_error(
                    "a row of an older version does not tell its request"
                )
            self._index.add(row.key, place)

    def _extract_record(self, written: bytes) -> bytes:
        if (row := parse_row(written)) is None:
            raise ValueError("a row is damaged")
        return row.record

"""The answers that an earlier run has written, for a run over a changed input to look up.

They stand in a complete output, or in the journal of a run that has not ended.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fminfer.contract.envelope import MAX_QUOTED_BYTES, Envelope, Line
from fminfer.contract.record import (
    Tokens,
    is_batch,
    load_record,
    make_key,
    read_key,
    read_request,
    readdress,
)
from fminfer.core.errors import RequestError, UsageError, row_error
from fminfer.files.journal_rows import read_row
from fminfer.files.ordered_output import errors_path
from fminfer.files.reopening import is_retryable, records_of
from fminfer.files.run_terms import LineCounter

_LOW, _HIGH = slice(0, 8), slice(8, 16)


class KeyIndex:
    """Places by key. First all are added, then they are looked up."""

    def __init__(self) -> None:
        self._low, self._high = array("Q"), array("Q")  # the halves of each key
        self._places = array("q")
        self._is_used = bytearray()
        self._next = 0  # whose key will probably be asked for next
        # Once one was not: `_low` in order, and the numbers of its answers.
        self._sorted, self._order = array("Q"), array("I")

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: bytes, place: int) -> None:
        """Add an answer."""
        self._low.append(int.from_bytes(key[_LOW], "little"))
        self._high.append(int.from_bytes(key[_HIGH], "little"))
        self._places.append(place)
        self._is_used.append(0)

    def find(self, key: bytes) -> int | None:
        """Return the place of an answer with this key; None: there is none."""
        low, high = int.from_bytes(key[_LOW], "little"), int.from_bytes(key[_HIGH], "little")
        number: int | None = self._next
        if not self._is_at(self._next, low, high):
            number = self._search(low, high)
        if number is None:
            return None
        self._next = number + 1
        self._is_used[number] = 1
        return self._places[number]

    def count_unused(self) -> int:
        """Return how many answers have a key that nobody has asked for."""
        if all(self._is_used):
            return 0
        order = np.lexsort((np.frombuffer(self._high, "u8"), np.frombuffer(self._low, "u8")))
        low, high = (np.frombuffer(half, "u8")[order] for half in (self._low, self._high))
        is_new = np.append(True, (low[1:] != low[:-1]) | (high[1:] != high[:-1]))
        starts = np.flatnonzero(is_new)
        is_used = np.maximum.reduceat(np.frombuffer(self._is_used, "u1")[order], starts)
        sizes = np.diff(np.append(starts, len(order)))
        return int(sizes[is_used == 0].sum())

    def _is_at(self, number: int, low: int, high: int) -> bool:
        is_there = number < len(self._low)
        return is_there and self._low[number] == low and self._high[number] == high

    def _search(self, low: int, high: int) -> int | None:
        if not self._sorted:
            self._sort()
        place = bisect_left(self._sorted, low)
        while place < len(self._sorted) and self._sorted[place] == low:
            number = self._order[place]
            if self._high[number] == high:
                return number
            place += 1
        return None

    def _sort(self) -> None:
        halves = np.frombuffer(self._low, "u8")
        order = np.argsort(halves, kind="stable")
        self._order = array("I", order.astype("u4").tobytes())
        self._sorted = array("Q", halves[order].tobytes())


UNSURE = 1 << 40  # more equal lines than a file has
TELL_EVERY_S, LOOK_EVERY = 5.0, 1024  # seconds; rows between two looks at the clock


class Pace:
    """Tells now and then how far a task is that takes long where there are many rows."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told_s = time.monotonic()

    def look(self, what: str, number: int, total: int = 0) -> None:
        """Tell the number of rows so far, if it is time to.

        Args:
            total: 0: not known.
        """
        if number % LOOK_EVERY == 0 and time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._told_s = time.monotonic()
            self._tell(f"{what}: {number:,}{f' of {total:,}' if total else ''}")


class EarlierAnswers:
    """Answers by the keys of their requests (`contract.record.make_key`).

    Args:
        path: where they stand.
    """

    def __init__(self, path: Path, file: BinaryIO, pace: Pace) -> None:
        self.path = path
        self.pace = pace
        self.num_unsure = 0  # of which it is not known how many equal ones stood before them
        self._index = KeyIndex()
        self._file = file
        self._place = -1  # of the file

    @property
    def num_answers(self) -> int:
        return len(self._index) + self.num_unsure

    @property
    def num_left_out(self) -> int:
        """Answers that no line has asked for."""
        return self._index.count_unused() + self.num_unsure

    def find(self, line: Line, envelope: Envelope, key: bytes) -> tuple[bytes, Tokens] | None:
        """Return the record that a line gets, and its tokens; None: it has no answer yet.

        Raises:
            UsageError: what stands there is not what was read before.
        """
        place = self._index.find(key)
        if place is None:
            return None
        if place != self._place:
            self._file.seek(place)
        written = self._file.readline()
        self._place = place + len(written)
        try:
            return self._open(written, line, envelope, key)
        except (ValueError, KeyError) as error:
            raise damaged(self.path, f"{error}, at byte {place}") from error

    def _open(
        self, written: bytes, line: Line, envelope: Envelope, key: bytes
    ) -> tuple[bytes, Tokens]:
        answered = readdress(written.rstrip(b"\n"), line, envelope, key)
        return answered.record, answered.tokens

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line of the file with its place."""
        place = 0
        for number, line in enumerate(self._file):
            self.pace.look("Reading earlier answers", number)
            yield place, line
            place += len(line)


class OutputAnswers(EarlierAnswers):
    """The answers of a complete output. Its Batch records hold their keys, others their requests.

    Equal requests of other shapes than Batch are counted in the order of the output. Where that is
    not the order of the old input's lines, those in which chance has a part are unsure.

    Args:
        counter: begins with the first of them.

    Raises:
        UsageError: records are none, or an older version's.
    """

    def __init__(self, output: Path, file: BinaryIO, counter: LineCounter, pace: Pace) -> None:
        super().__init__(output, file, pace)
        self._has_unknown = False  # a request before the next answer
        self._has_long_unknown = False  # the same, of more than MAX_QUOTED_BYTES
        for record in records_of(errors_path(output)):
            if is_retryable(record):  # other errors are those of all equal requests
                try:
                    self._note_failed(record, counter)
                except Exception as error:  # then it was not counted
                    row_error(error, "a failed line")
        for place, line in self._lines():
            record = line.rstrip(b"\n")
            try:
                key = self._key_of(record, counter)
            except (ValueError, KeyError, TypeError, RequestError) as error:
                raise damaged(output, f"{error}, at byte {place}") from error
            if key is None:
                self.num_unsure += 1
            else:
                self._index.add(key, place)

    def _note_failed(self, record: bytes, counter: LineCounter) -> None:
        """Take note of a line that was counted, and has no answer: its place is not known."""
        request = None if is_batch(record) else load_record(record)["request"]
        if isinstance(request, dict):
            counter.count_request(request, times=UNSURE)
        elif isinstance(request, str):  # only its beginning is quoted
            self._has_long_unknown = True
        else:
            self._has_unknown = True

    def _key_of(self, record: bytes, counter: LineCounter) -> bytes | None:
        if is_batch(record):
            self._has_unknown = True
            if (key := read_key(record)) is None:
                raise ValueError("a Batch record of an older version does not tell its request")
            return key
        request = read_request(record)
        repeat = counter.count_request(load_record(request))
        is_long = self._has_long_unknown and len(request) > MAX_QUOTED_BYTES
        if repeat is not None and (repeat >= UNSURE or self._has_unknown or is_long):
            return None
        return make_key(Envelope("bare", request), repeat or 0)


class JournalAnswers(EarlierAnswers):
    """The answers of a journal, whose rows hold their keys.

    Raises:
        UsageError: rows are an older version's.
    """

    def __init__(self, journal: Path, file: BinaryIO, pace: Pace) -> None:
        super().__init__(journal, file, pace)
        for place, line in self._lines():
            row = read_row(line)
            if row is None or row.is_error:  # its head, a damaged row, or one to be judged again
                continue
            if not row.key:
                raise damaged(journal, "a row of an older version does not tell its request")
            self._index.add(row.key, place)

    def _open(
        self, written: bytes, line: Line, envelope: Envelope, key: bytes
    ) -> tuple[bytes, Tokens]:
        row = read_row(written)
        if row is None:
            raise ValueError("a row is damaged")
        return readdress(row.record, line, envelope, key).record, row.tokens


def damaged(path: Path, what: str) -> UsageError:
    return UsageError(
        f"a run cannot go on with {path}: its input has changed, and it is not clear ({what}) "
        "which lines the answers belong to. Put the input back as it was, give --restart to answer "
        "all again, or give another --output"
    )

"""The journal of one output: each finished row is in it at once, so that a run can go on.

A line that breaks off, or whose checksum is wrong, counts as not written.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from fminfer.core.errors import InUseError, OutputError
from fminfer.files.disk import (
    lock_file,
    path_beside,
    raising_disk_errors,
    sync_folder,
    unlock_file,
    write_all,
)
from fminfer.files.journal_rows import (
    CLOCK,
    Counts,
    Fingerprint,
    Row,
    RowCounts,
    check_fingerprint,
    check_settings,
    is_of_other_input,
    make_head_line,
    parse_fingerprint,
    parse_row,
)

JournalOwner = Literal["mine", "other input"]  # whose rows a journal has
JOURNAL = ".journal"  # added to the output's name
TRIED = -1  # in the place of a row
PAGE = 1024  # lines
SYNC_EVERY_S = 0.5  # a power cut costs at most a second's rows


def journal_path(output: Path) -> Path:
    """Return where an output's journal stands."""
    return path_beside(output, JOURNAL)


def _make_page() -> tuple[array[int], array[int]]:
    """Make room for `PAGE` lines.

    For each line: where its row stands (0: it has none; TRIED: it is to be tried again), and the
    checksum of the line.
    """
    return array("q", bytes(8 * PAGE)), array("I", bytes(4 * PAGE))


NO_ROWS = _make_page()


class Journal:
    """An open journal. It is locked: no other process opens it.

    Rows of an earlier run are kept if their fingerprint is equal, unless it is to `restart`.

    Raises:
        UsageError: another run has it open, or its fingerprint differs.
        OutputError: it cannot be read or written.
    """

    def __init__(
        self, output: Path, fingerprint: Fingerprint, *, restart: bool = False
    ) -> None:
        self.output = output
        self.path = journal_path(output)
        self._reset_counts()
        self.vector_bytes = 0  # of each row's vector; 0: rows have none
        self.clock = fingerprint.get(CLOCK, "")  # that its rows' templates read
        self.num_bytes = 0  # of whole rows and the journal's first line
        self._dirty = False
        self._failure: OSError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        with raising_disk_errors(self.path):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                self._lock_file()
                if restart:
                    self._write_head(fingerprint)
                else:
                    self._read_earlier_rows(fingerprint)
            except BaseException:
                unlock_file(self._fd)
                os.close(self._fd)
                raise

    def __contains__(self, number: int) -> bool:
        return self._pages.get(number // PAGE, NO_ROWS)[0][number % PAGE] > 0

    def has_input_crc(self, number: int, input_crc: int) -> bool:
        """Tell whether a row that is there was answered from a line with this checksum."""
        return self._pages[number // PAGE][1][number % PAGE] == input_crc

    def read_rows(self) -> Iterator[Row]:
        """Read the rows, in the order of their lines."""
        with (
            raising_disk_errors(self.path),
            open(self._fd, "rb", closefd=False) as file,
        ):
            here = 0
            for place in chain.from_iterable(
                self._pages[page][0] for page in sorted(self._pages)
            ):
                if place <= 0:
                    continue
                if place != here:  # to seek costs more than to read
                    file.seek(place)
                line = file.readline()
                here = place + len(line)
                row = parse_row(line)
                if row is None:
                    raise OutputError(
                        f"{self.path} changed under this run, at byte {place}; run the same "
                        "command again"
                    )
                yield row

    def restart(self, fingerprint: Fingerprint) -> None:
        """Drop all rows: those that come are of another run."""
        self._reset_counts()
        with raising_disk_errors(self.path):
            self._write_head(fingerprint)

    def append(self, row: Row) -> None:
        """Write a row, at once. It is safe from a power cut within a second.

        Raises:
            OutputError: the disk is full or gone. What was written before stays good.
        """
        line = row.to_line()
        with raising_disk_errors(self.path):
            if self._failure is not None:
                raise self._failure
            try:
                write_all(self._fd, line, self.num_bytes)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self.num_bytes)
                raise
        self._note_row(row, self.num_bytes)
        self.num_bytes += len(line)
        self._dirty = True
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._sync_often, name="journal", daemon=True
            )
            self._thread.start()

    def sync(self) -> None:
        """Write all rows through to the disk."""
        with raising_disk_errors(self.path):
            self._dirty = False
            os.fsync(self._fd)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Stop writing; the file stays, and the same command goes on from there."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            try:
                with raising_disk_errors(self.path):
                    os.fsync(fd)
            finally:
                unlock_file(fd)
                os.close(fd)

    def remove(self) -> None:
        """Close and delete it: the output is complete."""
        with raising_disk_errors(self.path):
            # first, so that nobody opens what is given up
            self.path.unlink(missing_ok=True)
        self.close()

    def _reset_counts(self) -> None:
        # A page is made for its first row. So blank lines take none; others take 12 bytes each.
        self._pages: defaultdict[int, tuple[array[int], array[int]]] = defaultdict(
            _make_page
        )
        self.kept = Counts()  # of what an earlier run had finished
        self.num_rows = 0
        self.last_number = 0  # the largest number of a line with a record
        self.num_tried = 0  # rows of earlier runs that are to be tried again
        self.num_damaged = 0  # lines that were not kept

    def _lock_file(self) -> None:
        self.has_locks = lock_file(self._fd, self.path, self.output)
        # Whoever had the lock may have finished, and removed the file, in between.
        if not self.path.exists() or not os.path.samestat(
            os.fstat(self._fd), self.path.stat()
        ):
            raise InUseError(
                f"another run has just finished {self.output}; run again to see"
            )

    def _read_earlier_rows(self, fingerprint: Fingerprint) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            head = file.readline()
            first = file.readline()
            # new, or killed while its first line was written
            if not head.endswith(b"\n"):
                self._write_head(fingerprint)
                return
            old = parse_fingerprint(self.path, head)
            if old != fingerprint and _is_empty(first, self.output):
                self._write_head(fingerprint)
                return
            check_fingerprint(self.path, old, fingerprint)
            self.clock = old.get(CLOCK, self.clock)
            self.num_bytes = len(head)
            for line in chain([first], file):
                if not line.endswith(b"\n"):
                    break  # a torn tail
                self._add_earlier_row(parse_row(line))
                self.num_bytes += len(line)
        os.ftruncate(self._fd, self.num_bytes)

    def _add_earlier_row(self, row: Row | None) -> None:
        """Note a row at the journal's end, unless it is damaged or to be tried again."""
        if row is None:
            self.num_damaged += 1
        elif row.number in self:  # twice: where there are no locks
            return
        elif row.is_ours:
            places, _ = self._pages[row.number // PAGE]
            self.num_tried += places[row.number % PAGE] == 0
            places[row.number % PAGE] = TRIED
        else:
            self._note_row(row, self.num_bytes)
            self.kept.add(is_error=row.is_error, tokens=row.tokens)

    def _write_head(self, fingerprint: Fingerprint) -> None:
        head = make_head_line(fingerprint)
        os.ftruncate(self._fd, 0)
        write_all(self._fd, head, 0)
        self.num_bytes = len(head)
        os.fsync(self._fd)
        sync_folder(self.path.parent)

    def _note_row(self, row: Row, place: int) -> None:
        self.num_rows += 1
        self.last_number = max(self.last_number, row.number)
        self.vector_bytes = self.vector_bytes or len(row.vector)
        places, input_crcs = self._pages[row.number // PAGE]
        places[row.number % PAGE] = place
        input_crcs[row.number % PAGE] = row.input_crc

    def _sync_often(self) -> None:
        while not self._stop.wait(SYNC_EVERY_S):
            if self._dirty:
                self._dirty = False
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    # The next row raises it: the disk may have lost some.
                    self._failure = error
                    return


def _is_empty(first: bytes, output: Path) -> bool:
    """Tell whether a journal, whose first row this is, can be dropped: no row, and no output."""
    return not first.endswith(b"\n") and not output.exists()


def count_rows_from(output: Path, first: int) -> RowCounts:
    """Count the rows of an output's journal that begin at some byte or later."""
    path = journal_path(output)
    if not path.exists():
        return RowCounts()
    with path.open("rb") as file:
        file.seek(first)
        rows = [row.is_error for row in map(parse_row, file) if row is not None]
    return RowCounts(len(rows), sum(rows))


def check_journal_settings(output: Path, fingerprint: Fingerprint) -> None:
    """Raise a UsageError if an output's journal is of another run than this, over any input.

    It locks nothing and reads only two lines, so it is quick for a whole folder.
    """
    path = journal_path(output)
    with raising_disk_errors(path):
        old = find_fingerprint(output, needs_row=not output.exists())
    if old is not None:
        check_settings(path, old, fingerprint)


def find_fingerprint(output: Path, *, needs_row: bool = False) -> Fingerprint | None:
    """Read what the rows of an output's journal depend on; None: the journal does not say."""
    path = journal_path(output)
    # Its owner may remove it at any moment, and other machines see that late.
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        head = file.readline()
        first = file.readline()
        is_said = head.endswith(b"\n") and (first.endswith(b"\n") or not needs_row)
        return parse_fingerprint(path, head) if is_said else None
    return None


def inspect_journal(
    output: Path, fingerprint: Fingerprint, *, restart: bool, takes_over: bool = False
) -> JournalOwner | None:
    """Return whose rows an output's journal has; None: it has no journal.

    Raises:
        UsageError, OutputError: as `Journal` does. If this run `takes_over`, rows of another
            input raise none. Nothing is written.
    """
    path = journal_path(output)
    # NFS locks only files that are open for writing.
    with (
        raising_disk_errors(path),
        contextlib.suppress(FileNotFoundError),
        path.open("rb+") as file,
    ):
        lock_file(file.fileno(), path, output)
        head = file.readline()
        if head.endswith(b"\n") and not restart:
            old = parse_fingerprint(path, head)
            if not _is_empty(file.readline(), output):
                if takes_over and is_of_other_input(old, fingerprint):
                    return "other input"
                check_fingerprint(path, old, fingerprint)
        return "mine"
    return None

"""Counts how often a value was seen among any number of lines, by digest, in bounded memory.

The counts are in a temporary SQLite database. Most of it is in a file that the system deletes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator

from fminfer.core.errors import MachineError

MAX_RECENT = 1 << 16  # counts in memory before they are written together, about 8 MB
FILTER_BITS = 1 << 26  # 8 MB
_FIND = "SELECT count FROM seen WHERE digest = ?"
_KEEP = "INSERT OR REPLACE INTO seen VALUES (?, ?)"


class SeenCounts:
    """Counts of 16-byte digests."""

    def __init__(self) -> None:
        self._database: sqlite3.Connection | None = None  # made with the first that are written
        self._recent: dict[bytes, int] = {}  # newer than those in the database
        self._may_be_stored = bytearray()  # a bit for each of FILTER_BITS; clear: surely not

    def add(self, digest: bytes, times: int = 1) -> int:
        """Count a digest some times more; return how often it was counted before.

        Raises:
            MachineError: the disk for temporary files is full or gone.
        """
        count = self._recent.get(digest)
        if count is None:
            count = 0 if self._database is None else self._find(digest)
        self._recent[digest] = count + times
        if len(self._recent) >= MAX_RECENT:
            self._write()
        return count

    def clear(self) -> None:
        """Forget all."""
        self._recent.clear()
        self._may_be_stored = bytearray()
        if self._database is not None:
            self._database.close()
            self._database = None

    def _find(self, digest: bytes) -> int:
        assert self._database is not None
        number = _number_of(digest)
        if not self._may_be_stored[number >> 3] & 1 << (
            number & 7
        ):  # most are new, and need no look into the file
            return 0
        with _told():
            row = self._database.execute(_FIND, (digest,)).fetchone()
        return 0 if row is None else int(row[0])

    def _write(self) -> None:
        """Write the recent counts together, in order, which is far faster than one by one."""
        with _told():
            if self._database is None:
                self._database = self._open()
                self._may_be_stored = bytearray(FILTER_BITS // 8)
            self._database.executemany(_KEEP, sorted(self._recent.items()))
        for number in map(_number_of, self._recent):
            self._may_be_stored[number >> 3] |= 1 << (number & 7)
        self._recent.clear()

    @staticmethod
    def _open() -> sqlite3.Connection:
        # "": a temporary file
        database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA cache_size = -16000")  # kB
        database.execute(
            "CREATE TABLE seen (digest BLOB PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID"
        )
        database.execute("BEGIN")  # never committed: each count would be, by itself
        return database


def _number_of(digest: bytes) -> int:
    """Return the number of a digest's bit in the filter."""
    return int.from_bytes(digest[:4], "little") % FILTER_BITS


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn SQLite's errors into ours, which say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise MachineError(
            f"a temporary file cannot be written: {error}. Finished rows are kept; make room in "
            f"{tempfile.gettempdir()}, or set TMPDIR to a folder with room, and run the same "
            "command again"
        ) from error

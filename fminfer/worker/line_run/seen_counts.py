"""Counts how often a value was seen among any number of lines, by digest, in bounded memory.

The counts are in a temporary SQLite database. Most of it is in a file that the system deletes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator

from fminfer.core.errors import MachineError


class SeenCounts:
    """Counts of 16-byte digests."""

    def __init__(self) -> None:
        self._database: sqlite3.Connection | None = None  # made with the first count

    def add(self, digest: bytes) -> int:
        """Count a digest once more; return how often it was counted before.

        Raises:
            MachineError: the disk for temporary files is full or gone.
        """
        with _told():
            if self._database is None:
                self._database = self._open()
            found = self._database.execute("SELECT count FROM seen WHERE digest = ?", (digest,))
            row = found.fetchone()
            if row is None:
                self._database.execute("INSERT INTO seen VALUES (?, 1)", (digest,))
                return 0
            self._database.execute("UPDATE seen SET count = count + 1 WHERE digest = ?", (digest,))
            return int(row[0])

    def clear(self) -> None:
        """Forget all."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @staticmethod
    def _open() -> sqlite3.Connection:
        # "": a temporary file
        database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode = OFF")
        database.execute(
            "CREATE TABLE seen (digest BLOB PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID"
        )
        database.execute("BEGIN")  # never committed: each count would be, by itself
        return database


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

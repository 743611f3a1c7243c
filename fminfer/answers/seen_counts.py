"""Counts how often a value was seen, by digest; most counts are in a temporary file."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator

from fminfer.core.errors import MachineError

MAX_IN_MEMORY = 1 << 17  # about 16 MB
_MAKE = (
    "CREATE TABLE seen (digest BLOB PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID"
)
_FIND = "SELECT count FROM seen WHERE digest = ?"
_PUT = "INSERT OR REPLACE INTO seen VALUES (?, ?)"


class SeenCounts:
    """Counts of 16-byte digests."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        # of digests that are not in memory
        self._database: sqlite3.Connection | None = None

    def add(self, digest: bytes, times: int = 1) -> int:
        """Count a digest some times more; return how often it was counted before.

        Raises:
            MachineError: the disk for temporary files is full or gone.
        """
        count = self._counts.get(digest, 0)
        if count or len(self._counts) < MAX_IN_MEMORY:
            self._counts[digest] = count + times
            return count
        with _raising_machine_errors():
            if self._database is None:
                self._database = _open_database()
            row = self._database.execute(_FIND, (digest,)).fetchone()
            count = 0 if row is None else int(row[0])
            self._database.execute(_PUT, (digest, count + times))
            return count

    def add_text(self, text: str) -> int:
        """Count a text; return how often it was counted before."""
        data = text.encode("utf-8", "surrogatepass")
        return self.add(hashlib.blake2b(data, digest_size=16).digest())

    def clear(self) -> None:
        """Forget all."""
        self._counts.clear()
        if self._database is not None:
            self._database.close()
            self._database = None


def _open_database() -> sqlite3.Connection:
    # "": a temporary file
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA cache_size = -16000")  # kB
    database.execute(_MAKE)
    database.execute("BEGIN")  # never committed: each count would be, by itself
    return database


@contextlib.contextmanager
def _raising_machine_errors() -> Iterator[None]:
    """Turn SQLite's errors into ours, which say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise MachineError(
            f"a temporary file cannot be written: {error}. Finished rows are kept; make room in "
            f"{tempfile.gettempdir()}, or set TMPDIR to a folder with room, and run the same "
            "command again"
        ) from error

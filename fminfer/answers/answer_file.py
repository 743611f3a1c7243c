"""The SQLite file of answers: bytes by their key, each with a checksum.

Where room is short, the least recently used answers are removed first.
Several processes may use one file, also on a network file system. So its journal is rolled back:
a write-ahead log needs memory that all of them share.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

APPLICATION = 0x666D696E  # "fmin"; SQLite keeps it in the file's header
VERSION = 1  # of the tables, and of the form of what they hold
OPEN_S = 5.0
READ_S = 0.25
WRITE_S = 5.0  # to wait for another process's lock
COMPRESS_BYTES = 1024  # values from this size on are compressed
ROW_BYTES = 160  # what a row takes beside its value: key, checksum, two indices
TOUCH_AFTER_S = 600  # a use is noted if the last one that was noted is this old
BATCH_BYTES = 8 * 2**20  # of one transaction, which must be short
TABLES = {
    "answers": "CREATE TABLE answers (key BLOB PRIMARY KEY, used INTEGER NOT NULL, "
    "checksum BLOB NOT NULL, value BLOB NOT NULL)",
    "by_use": "CREATE INDEX by_use ON answers (used)",
}


class DamagedError(Exception):
    """The file is none of ours, or no longer what was written."""


class AnswerFile:
    """One connection, of one thread at a time; the file is made if it is not there.

    Raises:
        DamagedError: the file is none of ours, or damaged. All methods raise it.
        sqlite3.Error, OSError: it cannot be opened, read or written; nothing has changed.
    """

    def __init__(self, path: Path, wait_s: float) -> None:
        _make_private(path)
        self.path = path
        self._database = sqlite3.connect(
            path, timeout=OPEN_S, isolation_level=None, check_same_thread=False
        )
        try:
            with self._raising_damage():
                self._prepare_tables()
            self._database.execute(f"PRAGMA busy_timeout = {round(wait_s * 1000)}")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def read(self, key: bytes) -> tuple[bytes, int] | None:
        """Return what is kept under a key, and when its last use was noted; None: nothing."""
        with self._raising_damage():
            row = self._database.execute(
                "SELECT value, checksum, used FROM answers WHERE key = ?", (key,)
            ).fetchone()
        if row is None:
            return None
        value, checksum, used = row
        is_whole = isinstance(value, bytes) and checksum == _checksum(key, value)
        if not (is_whole and isinstance(used, int)):
            raise DamagedError("an answer in it has a wrong checksum")
        return _decompress(value), used

    def write(
        self,
        values: Iterable[tuple[bytes, bytes]],
        uses: Iterable[bytes],
        now: int,
        max_bytes: int,
    ) -> None:
        """Add values by their keys, and note that others were used; the oldest make room."""
        if touched := [(now, key) for key in uses]:
            with self._raising_damage(), self._transaction():
                self._database.executemany(
                    "UPDATE answers SET used=? WHERE key=?", touched
                )
        packed = ((key, _compress(value)) for key, value in values)
        for batch in _split_rows(packed, min(BATCH_BYTES, max_bytes // 8)):
            with self._raising_damage(), self._transaction():
                self._make_room(
                    sum(len(value) + ROW_BYTES for _, value in batch), max_bytes
                )
                self._database.executemany(
                    "INSERT OR IGNORE INTO answers (key, used, checksum, value) VALUES "
                    "(?,?,?,?)",
                    [(key, now, _checksum(key, value), value) for key, value in batch],
                )
        with self._raising_damage():
            self._shrink_file(max_bytes)

    def _prepare_tables(self) -> None:
        run = self._database.execute
        run("PRAGMA cell_size_check = ON")
        run("PRAGMA trusted_schema = OFF")
        is_empty = not self._read_pragma("application_id") and not self._read_tables()
        run("PRAGMA journal_mode = TRUNCATE")
        run("PRAGMA synchronous = NORMAL")
        if is_empty:
            run("PRAGMA auto_vacuum = INCREMENTAL")  # so that it can shrink
            self._make_tables()
        if self._read_pragma("application_id") != APPLICATION:
            raise DamagedError("it is a database of another program")
        if (version := self._read_pragma("user_version")) != VERSION:
            raise DamagedError(
                f"its form is version {version}, and this fminfer has {VERSION}"
            )
        if self._read_tables() != TABLES:
            raise DamagedError("its tables are not those of this fminfer")

    def _make_tables(self) -> None:
        with self._transaction():
            if self._read_tables():
                return  # another process was faster
            for table in TABLES.values():
                self._database.execute(table)
            self._database.execute(f"PRAGMA application_id = {APPLICATION}")
            self._database.execute(f"PRAGMA user_version = {VERSION}")

    def _read_tables(self) -> dict[str, str]:
        select = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex_%'"
        return dict(self._database.execute(select).fetchall())

    def _make_room(self, needed: int, max_bytes: int) -> None:
        """Remove what was not used for longest, until so many bytes are free."""
        # so that not every write has to remove some
        target = max_bytes - max_bytes // 50
        while (excess := self._used_bytes() + needed - target) > 0:
            oldest: list[tuple[int]] = []
            select = "SELECT rowid, length(value) FROM answers ORDER BY used, rowid"
            with closing(self._database.execute(select)) as rows:
                while excess > 0 and (row := rows.fetchone()) is not None:
                    oldest.append(row[:1])
                    excess -= row[1] + ROW_BYTES
            if not oldest:
                return
            self._database.executemany("DELETE FROM answers WHERE rowid = ?", oldest)

    def _shrink_file(self, max_bytes: int) -> None:
        """Free disk space that an earlier and larger limit allowed."""
        excess = self._read_pragma("page_count") - max_bytes // self._read_pragma(
            "page_size"
        )
        if excess > 0:
            # `execute` would free one page
            self._database.executescript(f"PRAGMA incremental_vacuum({excess})")

    def _used_bytes(self) -> int:
        num_pages = self._read_pragma("page_count") - self._read_pragma(
            "freelist_count"
        )
        return num_pages * self._read_pragma("page_size")

    def _read_pragma(self, pragma: str) -> int:
        return int(self._database.execute(f"PRAGMA {pragma}").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._database:  # which ends it: whole, or not at all
            self._database.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _raising_damage(self) -> Iterator[None]:
        """Raise a DamagedError if the file is damaged; one that is busy or full is not."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise DamagedError("a text in it is none") from error
        except sqlite3.Error as error:
            # SQLITE_CORRUPT and SQLITE_NOTADB are of this very class, the machine's
            # errors are not.
            is_damaged = type(error) is sqlite3.DatabaseError
            if is_damaged or any(
                words in str(error) for words in ("file format", "decode")
            ):
                raise DamagedError(str(error)) from error
            # Its header says so and the system does not; or another file is in its place by now.
            if "readonly" in str(error) and self._may_write():
                raise DamagedError(
                    "it cannot be written, although it may be"
                ) from error
            raise

    def _may_write(self) -> bool:
        return os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)


def _make_private(path: Path) -> None:
    """Make the file, for this user alone; SQLite gives its journal the same rights."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        if not path.is_file():
            raise DamagedError("it is no file") from None


def _split_rows(
    rows: Iterable[tuple[bytes, bytes]], max_bytes: int
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Split rows into batches of at most so many bytes; larger rows are left out."""
    batch: list[tuple[bytes, bytes]] = []
    num_bytes = 0
    for key, value in rows:
        size = len(value) + ROW_BYTES
        if size > max_bytes:
            continue
        if num_bytes + size > max_bytes:
            yield batch
            batch = []
            num_bytes = 0
        batch.append((key, value))
        num_bytes += size
    if batch:
        yield batch


def _checksum(key: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(value, key=key, digest_size=16).digest()


def _compress(value: bytes) -> bytes:
    """Return a value as it is stored; the first byte tells whether it is compressed."""
    return (
        b"z" + zlib.compress(value, 1) if len(value) >= COMPRESS_BYTES else b"-" + value
    )


def _decompress(stored: bytes) -> bytes:
    return zlib.decompress(stored[1:]) if stored[:1] == b"z" else stored[1:]

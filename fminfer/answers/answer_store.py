"""Answers that are kept from run to run: found at once, and written by a thread."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fminfer.answers.answer_file import (
    READ_S,
    TOUCH_AFTER_S,
    WRITE_S,
    AnswerFile,
    DamagedError,
)
from fminfer.answers.cache_place import CachePlace
from fminfer.files.disk import holding_lock

FILE = "answers.sqlite"
LOCK = "answers.lock"
WRITE_EACH_S = 1.0  # between writes
# of answers that wait for the disk; further ones are not kept
MAX_PENDING_BYTES = 64 * 2**20
# times in turn that another process keeps the file locked, before it is given up
MAX_BUSY = 20
MAX_SET_ASIDE = 2  # damaged files that one process puts aside
CLOSE_S = 15.0  # for the last write

Identity = tuple[int, int] | None  # of a file: device and inode; None: it is not there


class AnswerStore:
    """The answers in a folder. Any thread may call it; it raises no error, but warns."""

    def __init__(
        self,
        place: CachePlace,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = place.folder / FILE
        self._max_bytes = place.max_bytes
        self._warn = warn
        self._now = now
        # of what waits; nobody holds it and waits for the disk
        self._lock = threading.Lock()
        self._pending: dict[bytes, bytes] = {}  # answers that are not written yet
        self._pending_bytes = 0
        self._used: set[bytes] = set()  # keys whose use is not noted yet
        self._file_lock = threading.Lock()  # of all that follows; it is taken first
        self._reader: AnswerFile | None = None  # None: nothing is read
        self._writer: AnswerFile | None = None  # used by the thread
        self._may_write = True
        self._identity: Identity = None  # of the file that is open
        self._damage = ""  # that was met, and is to be dealt with
        self._num_busy = self._num_set_aside = 0
        self.trouble = ""  # why it no longer does all of its work
        self._open_file()
        self._has_news = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=self._write_each_second, name="answers", daemon=True
        )
        self._thread.start()

    def find(self, key: bytes) -> bytes | None:
        """Return what is kept under a key; None: nothing."""
        with self._lock:
            waiting = self._pending.get(key)
        if waiting is not None:
            return waiting
        with self._file_lock:
            row = self._read_row(key)
        if row is None:
            return None
        value, used = row
        if self._may_write and self._now() - used >= TOUCH_AFTER_S:
            with self._lock:
                self._used.add(key)
            self._has_news.set()
        return value

    def add(self, key: bytes, value: bytes) -> None:
        """Add a value, which is written within a second or two. It never waits for the disk."""
        with self._lock:
            has_room = self._pending_bytes + len(value) <= MAX_PENDING_BYTES
            if not self._may_write or not has_room or key in self._pending:
                return
            self._pending[key] = value
            self._pending_bytes += len(value)
        self._has_news.set()

    def close(self) -> None:
        """Write what waits, and let go of the file; wait for a disk that hangs only so long."""
        self._is_closing.set()
        self._has_news.set()
        self._thread.join(CLOSE_S)
        with self._file_lock:
            if self._pending or self._thread.is_alive():
                self._stop_using_file("the last answers could not be written in time")
            self._may_write = False
            if not self._thread.is_alive():
                self._close_files()

    # With the lock of the file held:

    def _read_row(self, key: bytes) -> tuple[bytes, int] | None:
        if self._reader is None:
            return None
        try:
            row = self._reader.read(key)
        except (DamagedError, sqlite3.Error) as error:
            self._note_failure(error)
            return None
        self._num_busy = 0
        return row

    def _note_damage(self, damage: str) -> None:
        """Read no more of this file; the thread puts another one into its place."""
        self._damage = self._damage or damage
        self._close_reader()
        self._has_news.set()

    def _note_failure(self, error: Exception) -> None:
        """Note that the file could not be read or written; a lock may be gone soon."""
        if isinstance(error, DamagedError):
            self._note_damage(str(error))
            return
        self._num_busy += 1
        if "locked" not in str(error) or self._num_busy >= MAX_BUSY:
            self._stop_using_file(str(error))

    def _stop_using_file(self, reason: str) -> None:
        """Go on without the file, or with what can be read of it."""
        can_read = self._reader is not None and (
            "readonly" in reason or "full" in reason
        )
        if not can_read:
            self._close_reader()
        # `close` closes the writer, which the thread may be using
        self._may_write = False
        with self._lock:
            self._pending.clear()
            self._used.clear()
            self._pending_bytes = 0
        if not self.trouble:
            self.trouble = reason
            rest = (
                "Answers are taken from it, and none is added"
                if can_read
                else "This process goes on without it"
            )
            self._warn(
                f"Warning: --result-cache {self._path.parent}: {reason}. {rest}."
            )

    def _open_file(self) -> None:
        """Open the file; put one that is damaged aside, and begin a new one."""
        while self._num_set_aside <= MAX_SET_ASIDE:
            self._identity = _identity_of(self._path)
            try:
                self._writer = AnswerFile(self._path, WRITE_S)
                self._reader = AnswerFile(self._path, READ_S)
                self._identity = self._identity or _identity_of(self._path)
                return
            except DamagedError as error:
                self._close_files()
                if not self._move_aside(str(error)):
                    return
            except (sqlite3.Error, OSError) as error:
                self._close_files()
                self._stop_using_file(str(error))
                return
        self._stop_using_file("it is damaged again and again")

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _close_files(self) -> None:
        self._close_reader()
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _move_aside(self, damage: str) -> bool:
        """Rename a damaged file, unless another process has; False: it cannot."""
        number = f"{self._now():.0f}-{os.getpid()}-{self._num_set_aside}"
        aside = self._path.with_name(f"{FILE}.damaged-{number}")
        try:
            with holding_lock(self._path.with_name(LOCK)):
                if _identity_of(self._path) != self._identity:
                    return True
                self._num_set_aside += 1
                journal = self._path.with_name(f"{FILE}-journal")
                # first: no new file may meet it
                with contextlib.suppress(FileNotFoundError):
                    journal.rename(f"{aside}-journal")
                self._path.rename(aside)
        except OSError as error:
            self._stop_using_file(
                f"{FILE} is damaged ({damage}), and cannot be moved: {error}"
            )
            return False
        self._warn(
            f"Warning: {self._path} is damaged: {damage}. It is kept as {aside.name}, "
            "and a new one takes its place."
        )
        return True

    # In its own thread:

    def _write_each_second(self) -> None:
        is_last = False
        # the last write, too, goes into a new file then
        while not is_last or self._damage:
            self._has_news.wait()
            is_last = self._is_closing.wait(WRITE_EACH_S)
            self._has_news.clear()
            self._write_pending()

    def _write_pending(self) -> None:
        with self._file_lock:
            if self._damage:
                damage = self._damage
                self._damage = ""
                self._close_files()
                if self._move_aside(damage):
                    self._open_file()
            writer = self._writer
        with self._lock:
            values = self._pending.copy()
            used = self._used
            self._used = set()
        if writer is None or not (values or used):
            return  # all was given up
        try:
            writer.write(values.items(), used, int(self._now()), self._max_bytes)
        except (DamagedError, sqlite3.Error, OSError) as error:
            with self._file_lock:
                self._note_failure(error)
                if self._may_write:
                    self._has_news.set()  # so that it is tried again
            return
        self._num_busy = 0
        with self._lock:
            for key in values:
                self._pending_bytes -= len(self._pending.pop(key, b""))


def _identity_of(path: Path) -> Identity:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

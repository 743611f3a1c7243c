"""The folder in which a server keeps what must outlive it: files, batches, and who owns them.

lock            held by the server that uses the folder
salt            of the digests by which owners are known
uploads/        files that are still coming; what a start finds is removed, or moved to files/
deleted         where deleted files stood in the lists of their owners
files/          ID.json says what a file is; ID.jsonl is what a client sent
batches/ID/     batch.json says how a batch stands; output.jsonl and its journal are its rows
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from functools import partial
from pathlib import Path

from fminfer.core.errors import InUseError, OutputError, UsageError
from fminfer.files.disk import (
    DiskFault,
    find_disk_fault,
    lock_file,
    raising_disk_errors,
    replacing_file,
)

ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
LOCK = "lock"
SALT = "salt"
NEW_SALT = "salt.new"
SALT_BYTES = 32
PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
HINTS: dict[DiskFault, str] = {
    "disk_full": "make room on the disk of --state",
    "state_not_writable": "see that the folder of --state can be written to",
    "disk_failed": "see that the disk of --state is there and sound",
}


class StateFolder:
    """An open state folder, which no other server opens.

    Args:
        path: is made if it is not there.

    Raises:
        UsageError: another server has it, it holds other things, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uploads = path / "uploads"
        self.files = path / "files"
        self.batches = path / "batches"
        self.was_narrowed = False  # others could read it until now
        try:
            self._prepare_folder()
            self._lock_fd = self._lock_folder()
            try:
                self._salt = self._read_salt()
                for folder in (self.uploads, self.files, self.batches):
                    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise UsageError(
                f"--state {path} cannot be used: {error.strerror or error} ({error.filename}). "
                "Give a folder on a local disk that you may write to"
            ) from error

    def owner_of(self, key: str | None) -> str:
        """Return the name of a key in this folder, a digest; "": there are no keys."""
        if key is None:
            return ""
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=16).hexdigest()

    def close(self) -> None:
        """Unlock the folder for another server."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _prepare_folder(self) -> None:
        """Make the folder, or raise if it is no state folder that only its owner may read."""
        if not self.path.exists():
            self.path.mkdir(mode=PRIVATE_FOLDER, parents=True)
            return
        names = set(os.listdir(self.path)) - {LOCK}
        # of one that died
        others = {each for each in names if not each.startswith(NEW_SALT)}
        if others and SALT not in others:
            raise UsageError(
                f"--state {self.path} holds other things, such as {min(others)}; give a new or "
                f"empty folder, or one that a server made, with its file {SALT}"
            )
        if (owner := self.path.stat().st_uid) != os.geteuid():
            raise UsageError(
                f"--state {self.path} is the folder of user {owner}, who could read and change "
                "what is in it; give one of your own"
            )
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(PRIVATE_FOLDER)
            self.was_narrowed = True

    def _lock_folder(self) -> int:
        fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        try:
            has_locks = lock_file(fd, self.path, self.path)
        except InUseError:
            os.close(fd)
            raise UsageError(
                f"--state {self.path} is in use by another server; end that one, or "
                "give this one a folder of its own"
            ) from None
        if not has_locks:
            os.close(fd)
            raise UsageError(
                f"--state {self.path} is on a file system without locks, so two "
                "servers could use it at once; give a folder on a local disk"
            )
        return fd

    def _read_salt(self) -> bytes:
        path = self.path / SALT
        if not path.exists():
            write_durably(path, secrets.token_bytes(SALT_BYTES))
        salt = path.read_bytes()
        if len(salt) != SALT_BYTES:
            raise UsageError(
                f"{path} is damaged. Without it nobody knows who owns what in --state "
                f"{self.path}: put it back, or give another folder"
            )
        return salt


def make_random_id(kind: str) -> str:
    """Return an id that nobody can guess: `file-` or `batch_`, and 128 random bits."""
    return kind + secrets.token_hex(16)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file, which is on the disk, whole, when this returns; else it is as it was."""
    with replacing_file(path, mode=PRIVATE_FILE) as file:
        file.write(data)


def state_write_error(path: Path, error: OSError) -> OutputError:
    """Return an OutputError for an error on a file of the state folder."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return OutputError(
        f"{path} cannot be written: {reason}; {HINTS[find_disk_fault(error)]}"
    )


writing_state = partial(raising_disk_errors, make_error=state_write_error)

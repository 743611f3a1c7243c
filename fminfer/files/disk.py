"""What the disk has to do: names of files, locks, whole writes; and its errors, in words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from fminfer.core.errors import InUseError, OutputError

NEW = ".new"  # added to the name of a file while it is being written
MOST_BYTES = 255  # of a file's name, on nearly every file system
HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
DiskFault = Literal["disk_full", "state_not_writable", "disk_failed"]
HINTS: dict[DiskFault, str] = {
    "disk_full": "make room (the output needs as much again while it is put in order)",
    "state_not_writable": "see that the folder can be written to, or give another --output",
    "disk_failed": "see that the disk is there and sound",
}


def path_beside(path: Path, ending: str, *, without: str = "") -> Path:
    """Return `path` with `ending` added to its name, in place of `without`."""
    return path.with_name(fit_file_name(path.name.removesuffix(without), ending))


def fit_file_name(start: str, ending: str) -> str:
    """Join a name; cut one that is too long, and add a digest that tells it from others."""
    if len(os.fsencode(start + ending)) <= MOST_BYTES:
        return start + ending
    raw = os.fsencode(start)
    end = f"~{hashlib.blake2b(raw, digest_size=6).hexdigest()}{ending}"
    return raw[: MOST_BYTES - len(end)].decode(errors="ignore") + end


def lock_file(fd: int, path: Path, output: Path) -> bool:
    """Lock a file until it is closed; return False where the file system has no locks.

    Raises:
        InUseError: another process has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HAS_NO_LOCKS:
            return False
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise InUseError(
            f"{path} is in use: another process writes {output}. Wait for it or end it; its "
            "finished rows are kept"
        ) from None
    return True


def unlock_file(fd: int) -> None:
    """Let other processes lock a file.

    To close it is not enough: a process that was forked may share it.
    """
    with contextlib.suppress(OSError):  # as above: the file system cannot
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def holding_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file that serves for locking alone, where locks are."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        unlock_file(fd)
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems cannot
            raise
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Write all files in a folder, at any depth, through to the disk."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))


@contextlib.contextmanager
def opening_draft(usual: Path, mode: int = 0o666) -> Iterator[tuple[Path, BinaryIO]]:
    """Open an empty draft that no other process writes; remove it, unless it was renamed.

    Its name is `usual`, or a spare one while another process writes that file.
    """
    spares = [path_beside(usual, f"-{number}") for number in range(2, 10)]
    for name in (usual, *spares):
        # A pipe in its place is not waited for.
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, mode)
        if _lock_draft(fd, name):
            break
        os.close(fd)
    else:
        raise InUseError(
            f"{usual} is being written by other processes; wait for them or end them"
        )
    # The lock lasts until the draft has its name. The file is closed before: some disks
    # say only then that they are full.
    with open(fd, "wb", buffering=0) as locked:
        try:
            with open(os.dup(fd), "wb") as file:
                locked.truncate(0)
                yield name, file
            # Processes that were killed, or could not lock one, may have left them.
            for spare in filter(os.path.exists, spares if name == usual else ()):
                with contextlib.suppress(InUseError, OSError), opening_draft(spare):
                    pass
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), name.lstat()):
                    name.unlink()
            unlock_file(fd)


def _lock_draft(fd: int, path: Path) -> bool:
    """Lock a draft where locks are; tell whether no other process has it or its name."""
    try:
        lock_file(fd, path, path)
        return os.path.samestat(os.fstat(fd), path.lstat())
    except (InUseError, FileNotFoundError):
        return False
    except OSError:  # the disk cannot tell
        return True


@contextlib.contextmanager
def replacing_file(
    path: Path, draft: Path | None = None, *, is_durable: bool = True, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Write a draft, and put it in a file's place, whole; if that fails, the old file stays.

    Its usual name is `draft`. `mode`, less the umask, says who may use the file.
    """
    with opening_draft(draft or path_beside(path, NEW), mode) as (name, file):
        yield file
        sync_and_close(file, is_durable=is_durable)
        os.replace(name, path)
    if is_durable:
        sync_folder(path.parent)


def sync_and_close(file: BinaryIO, *, is_durable: bool = True) -> None:
    """Write what is left of a file, and close it."""
    file.flush()
    if is_durable:
        os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def making_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder under a temporary name; rename it once the disk has all of it.

    Raises:
        OutputError: the disk is full or gone, or the name is in use.
    """
    draft = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # a killed command may have left it
        draft.mkdir()
        yield draft
        sync_tree(draft)
        os.replace(draft, folder)  # an empty folder may be there
        sync_folder(folder.parent)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error}. Mend that, or name another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_all(fd: int, data: bytes, place: int) -> None:
    """Write at a place; a disk that takes only a part is asked again, so that it says why."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, place)
        view = view[count:]
        place = place + count


def disk_error(path: Path, error: OSError) -> OutputError:
    """Say what the system's error on a file means for a run."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ENOENT:
        return OutputError(
            f"{path} cannot be written: {reason}. Its folder was moved or removed, and finished "
            "rows with it; put it back, and run the same command again"
        )
    hint = HINTS[find_disk_fault(error)]
    return OutputError(
        f"{path} cannot be written: {reason}. Finished rows are kept; {hint}, and run the same "
        "command again"
    )


@contextlib.contextmanager
def raising_disk_errors(
    path: Path, make_error: Callable[[Path, OSError], OutputError] = disk_error
) -> Iterator[None]:
    """Turn the system's errors into ours, which say what to do."""
    try:
        yield
    except OSError as error:
        raise make_error(path, error) from error


def find_disk_fault(error: OSError) -> DiskFault:
    """Say what is wrong with a disk, by an error on one of its files."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "state_not_writable"
    return "disk_failed"

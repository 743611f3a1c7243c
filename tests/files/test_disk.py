"""Names that fit, locks, whole writes, and what the system's errors mean."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import InUseError, OutputError
from fminfer.files import disk


def test_names_that_are_too_long_are_cut_and_differ() -> None:
    assert disk.fit_file_name("a" * 250, ".json") == "a" * 250 + ".json"
    names = [disk.fit_file_name("é" * 130 + each, ".jsonl") for each in ("x", "y")]
    assert names[0] != names[1] == disk.fit_file_name("é" * 130 + "y", ".jsonl")
    for name in names:
        assert len(os.fsencode(name)) in (254, 255) and name.endswith(".jsonl")
        assert name.startswith("é" * 100) and name[-19] == "~", (
            "runs of earlier versions are found"
        )
    beside = disk.path_beside(Path("/d/a.jsonl"), ".journal", without=".jsonl")
    assert beside == Path("/d/a.journal")
    assert disk.path_beside(Path("/d/a.jsonl"), ".new") == Path("/d/a.jsonl.new")


def test_a_lock_is_held_until_it_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "j"
    output = tmp_path / "out.jsonl"
    with path.open("w") as one, path.open("w") as other:
        assert disk.lock_file(one.fileno(), path, output)
        with pytest.raises(
            InUseError, match=r"j is in use: another process writes .*out\.jsonl"
        ):
            disk.lock_file(other.fileno(), path, output)
        disk.unlock_file(one.fileno())
        assert disk.lock_file(other.fileno(), path, output)


@pytest.mark.parametrize("number", [*disk.HAS_NO_LOCKS, errno.EIO, errno.EACCES])
def test_a_file_system_without_locks_is_no_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "x")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "j").open("w") as file:
        disk.unlock_file(file.fileno())
        if number in disk.HAS_NO_LOCKS:
            assert not disk.lock_file(file.fileno(), tmp_path, tmp_path)
        else:
            with pytest.raises(InUseError if number == errno.EACCES else OSError):
                disk.lock_file(file.fileno(), tmp_path, tmp_path)
    with disk.holding_lock(tmp_path / "k"):
        assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600


def test_only_one_is_alone(tmp_path: Path) -> None:
    alone = disk.holding_lock(tmp_path / "k")
    with alone, (tmp_path / "k").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "k").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EIO])
def test_a_folder_that_cannot_be_synced(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(number, "x")

    monkeypatch.setattr(os, "fsync", fail)
    held = os.listdir("/proc/self/fd")
    if number == errno.EIO:
        with pytest.raises(OSError, match="x"):
            disk.sync_folder(tmp_path)
    else:
        disk.sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(held)


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("draft", [None, "d"])
def test_a_file_is_replaced_whole_or_stays(
    draft: str | None, is_durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    path = tmp_path / "a"
    how: dict[str, Any] = {
        "draft": draft and tmp_path / draft,
        "is_durable": is_durable,
    }
    with disk.replacing_file(path, mode=0o640, **how) as file:
        file.write(b"old")
        assert not path.exists()
        assert (tmp_path / (draft or "a.new")).exists()
    assert path.read_bytes() == b"old" and path.stat().st_mode & 0o777 == 0o640
    assert synced == (
        [str(tmp_path / (draft or "a.new")), str(tmp_path)] if is_durable else []
    )
    with pytest.raises(ZeroDivisionError), disk.replacing_file(path, **how) as file:
        file.write(b"new")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), disk.replacing_file(path, **how):
        (tmp_path / (draft or "a.new")).unlink()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["a"] and path.read_bytes() == b"old"


def test_drafts_that_could_not_be_locked_go_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spare draft of a command that failed stayed, but for the first."""
    path = tmp_path / "a"
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_lock_draft", lambda *_: False)
        with (
            pytest.raises(InUseError, match="written by other processes"),
            disk.replacing_file(path),
        ):
            pass
    assert len(os.listdir(tmp_path)) == 9
    with disk.replacing_file(path) as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_takes_a_part_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, place: pwrite(fd, data[:3], place)
    )
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    with path.open("r+b") as file:
        disk.write_all(file.fileno(), b"abcdefg", 2)
    assert path.read_bytes() == b"01abcdefg9"


@pytest.mark.parametrize(
    ("number", "fault", "told"),
    [
        (errno.ENOSPC, "disk_full", "make room"),
        (errno.EDQUOT, "disk_full", "make room"),
        (errno.EROFS, "state_not_writable", "give another --output"),
        (errno.EACCES, "state_not_writable", "can be written to"),
        (errno.EPERM, "state_not_writable", "can be written to"),
        (errno.EIO, "disk_failed", "the disk is there and sound"),
        (errno.ENOENT, "disk_failed", "Its folder was moved or removed"),
    ],
)
def test_what_an_error_of_the_system_means(number: int, fault: str, told: str) -> None:
    error = OSError(number, "words of its own")
    assert disk.find_disk_fault(error) == fault
    with pytest.raises(OutputError) as caught, disk.raising_disk_errors(Path("/d/a")):
        raise error
    message = str(caught.value)
    assert message.startswith(f"/d/a cannot be written: {os.strerror(number)}. ")
    assert told in message and "run the same command again" in message
    assert caught.value.__cause__ is error
    assert "kept" in message or number == errno.ENOENT
    assert "cannot be written: torn. " in str(
        disk.disk_error(Path("a"), OSError("torn"))
    )

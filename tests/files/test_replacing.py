"""Files get their names whole: one writer a draft, which the disk has before it is renamed."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import OutputError, UsageError
from fminfer.files.disk import HAS_NO_LOCKS, making_folder, replacing_file
from fminfer.files.ordered_output import draft_path, errors_path, writing_together
from fminfer.files.own_files import SUMMARY, replace_own_file


def test_two_writers_of_one_file_are_both_whole(tmp_path: Path) -> None:
    """Both wrote into one draft, and the file held lines of the two."""
    path = tmp_path / "a.html"
    with replacing_file(path) as first:
        first.write(b"first " * 1000)
        with replacing_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"end")
    assert path.read_bytes() == b"first " * 1000 + b"end"
    assert os.listdir(tmp_path) == ["a.html"], "no draft is left"


def test_the_umask_says_who_may_read_a_file_and_nobody_may_run_it(
    tmp_path: Path,
) -> None:
    before = os.umask(0o002)
    try:
        with replacing_file(tmp_path / "a.html") as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.html").stat().st_mode) == 0o664


def test_the_draft_of_a_killed_writer_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "a.html.new").write_bytes(b"what a killed one has left")
    with replacing_file(tmp_path / "a.html") as file:
        assert os.listdir(tmp_path) == ["a.html.new"]
        file.write(b"new")
    assert (tmp_path / "a.html").read_bytes() == b"new" and os.listdir(tmp_path) == [
        "a.html"
    ]


@pytest.mark.parametrize("number", [*HAS_NO_LOCKS, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["flock", "lstat"])
def test_a_disk_that_cannot_lock_or_does_not_answer_keeps_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Each run left one beside a complete output: it did not take its own draft for its own."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.html"
    if number in HAS_NO_LOCKS:
        (tmp_path / "a.html.new").write_bytes(b"what a killed one has left")
    monkeypatch.setattr(
        *((fcntl, "flock") if call == "flock" else (Path, "lstat")), fail
    )
    with replacing_file(path) as file:
        file.write(b"new")
        assert os.listdir(tmp_path) == ["a.html.new"]
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a.html"]


def test_what_a_killed_second_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.html.new-2").write_bytes(b"what a killed one has left")
    with replacing_file(tmp_path / "a.html") as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == ["a.html"]


def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"another's")
    (tmp_path / "a.html.new").symlink_to("there")
    with replacing_file(tmp_path / "a.html") as file:
        file.write(b"new")
    assert (tmp_path / "a.html").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["a.html", "a.html.new", "there"]
    assert (tmp_path / "there").read_bytes() == b"another's"


def test_a_draft_that_was_taken_for_a_dead_ones_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saw it before it was locked, and removed it."""
    flock = fcntl.flock
    path = tmp_path / "a.html"

    def remove_first(fd: int, kind: int) -> None:
        if kind == fcntl.LOCK_EX:
            (tmp_path / "a.html.new").unlink(missing_ok=True)
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with replacing_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a.html"]


def test_a_pipe_in_the_place_of_a_draft_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.html.new")
    with (
        pytest.raises(OSError, match="No such device"),
        replacing_file(tmp_path / "a.html"),
    ):
        pass


def test_a_failing_close_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems tell only then that they are full."""
    path = tmp_path / "a.html"
    path.write_bytes(b"old")

    class Full(io.FileIO):
        def close(self) -> None:
            is_open = not self.closed
            super().close()
            if is_open:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def open_full(file: Any, mode: str, **options: Any) -> Any:
        return (
            open(file, mode, **options)
            if options
            else io.BufferedWriter(Full(file, "w"))
        )

    monkeypatch.setattr("fminfer.files.disk.open", open_full, raising=False)
    with (
        pytest.raises(OSError, match="quota"),
        replacing_file(path, is_durable=False) as file,
    ):
        file.write(b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.html"]


def test_a_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fminfer quantize` synced nothing: after a power cut zeros may have answered."""
    synced = []
    folder = tmp_path / "model"
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    with making_folder(folder) as draft:
        (draft / "config.json").write_text("{}")
        (draft / "parts").mkdir()
        (draft / "parts" / "weights").write_text("1")
    before = [
        draft / "config.json",
        draft / "parts" / "weights",
        draft / "parts",
        draft,
    ]
    assert set(synced[:-1]) == {str(path) for path in before} and synced[-1] == str(
        tmp_path
    )
    assert (folder / "parts" / "weights").read_text() == "1" and os.listdir(
        tmp_path
    ) == ["model"]


def test_a_folder_that_came_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(OutputError, match="not empty"), making_folder(folder) as draft:
        (draft / "config.json").write_text("{}")
        folder.mkdir()
        (folder / "mine").touch()
    assert os.listdir(folder) == ["mine"] and os.listdir(tmp_path) == ["model"]


def test_an_output_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"

    def write(data: bytes, came: bytes) -> None:
        with writing_together(output, errors_path(output), is_new=True) as files:
            files[0].write(data)
            output.write_bytes(came)

    with pytest.raises(UsageError, match="exists; move it away"):
        write(b"mine", b"theirs")
    assert output.read_bytes() == b"theirs" and os.listdir(tmp_path) == ["a.jsonl"]
    write(b"same", b"same")
    assert output.read_bytes() == b"same" and not draft_path(output).exists()


def test_a_summary_is_replaced_whole_and_a_device_is_written_into(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stats.json"
    text = b'{\n  "model": "m", "dtype": 1}'
    replace_own_file(path, SUMMARY, "--stats", text)
    replace_own_file(path, SUMMARY, "--stats", text)
    assert path.read_bytes() == text
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left"):
        replace_own_file(Path("/dev/full"), SUMMARY, "--stats", text)
    path.write_text("of another program")
    with pytest.raises(UsageError, match="fminfer replaces nothing else"):
        replace_own_file(path, SUMMARY, "--stats", text)

"""What the fault loops found once: errors without a sentence, and what a power cut leaves."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fminfer.cli import process, status_command
from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files import status_file
from fminfer.files.journal_rows import Counts
from fminfer.files.status_file import StatusFile
from fminfer.files.streams import read_chunks
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.report.scanning import Place, RowsFile, Scan

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/data/answers.jsonl")


def test_an_error_of_the_system_ends_a_command_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise STALE

    monkeypatch.setattr(status_command, "find_overviews", fail)
    done = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert "/data/answers.jsonl: Stale file handle" in done.stderr


def test_only_a_verbose_run_shows_the_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert process.print_error(STALE) == process.EXIT_FAILED
    assert "Traceback" not in capsys.readouterr().err
    process.print_error(OSError(errno.EIO, "Input/output error"), is_verbose=True)
    assert "OSError: [Errno 5] Input/output error" in capsys.readouterr().err


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_file_that_fails_while_others_are_answered_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_quiet: bool
) -> None:
    """A quiet run over a folder ended with status 2 and not a word."""
    begin = JournaledInput.begin

    def fail(file: JournaledInput) -> None:
        if file.path.name == "b.jsonl":
            raise UsageError(f"{file.path} cannot be read: Input/output error")
        begin(file)

    monkeypatch.setattr(JournaledInput, "begin", fail)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x", "max_tokens": 1}\n')
    words = ["run", str(tmp_path), "--dtype", "float32", "--kernels", "off"]
    done = CliRunner().invoke(main, [*words, *["-q"] * is_quiet])
    assert done.exit_code == 2
    assert done.stderr.count("b.jsonl cannot be read: Input/output error") == 1
    assert (tmp_path / "output_a.jsonl").exists()


def test_a_close_that_fails_costs_a_file_that_was_read_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 100_000)

    class Raw(io.BufferedReader):
        def close(self) -> None:
            if not self.closed:
                super().close()
                raise STALE

    monkeypatch.setattr(Path, "open", lambda path, _: Raw(io.FileIO(path)))
    assert b"".join(read_chunks(path)) == b"x" * 100_000
    begun: Any = read_chunks(path)
    next(begun)
    begun.close()


@pytest.mark.parametrize("has_vectors", [True, False])
def test_vectors_get_their_name_once_the_status_file_owns_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_vectors: bool
) -> None:
    """After a power cut the next run took them for another program's, and refused for ever."""
    synced = []

    @contextlib.contextmanager
    def replacing(_: Path, *, is_durable: bool) -> Iterator[io.BytesIO]:
        synced.append(is_durable)
        yield io.BytesIO()

    monkeypatch.setattr(status_file, "replacing_file", replacing)
    status = StatusFile(
        tmp_path / "a.jsonl", tmp_path / "out.jsonl", "model", {}, Counts()
    )
    status.has_vectors = has_vectors
    status.set_status("finalizing")
    status.set_status("completed")
    assert synced == [has_vectors, True]


def test_a_report_says_which_row_cannot_be_read_again(tmp_path: Path) -> None:
    """It left the row out in silence."""
    path = tmp_path / "out.jsonl"
    scan = Scan(sources=[RowsFile(path, 0, "answers")])
    with pytest.raises(UsageError, match=r"out\.jsonl cannot be read: No such file"):
        scan.read_row(Place(0, 1, 0, 10))


def test_a_report_without_what_its_status_tells_is_none(tmp_path: Path) -> None:
    """The page lacked runs, speed and settings, and nothing said so."""
    output = tmp_path / "out.jsonl"
    output.write_text('{"request":{"prompt":"x"},"result":{"choices":[]}}\n')
    (tmp_path / "out.status.json").write_text('{"object": "batch", "status"')
    done = CliRunner().invoke(main, ["report", str(output)])
    assert (
        done.exit_code == 2
        and "out.status.json cannot be read, or is damaged" in done.stderr
    )
    assert not output.with_name("out.report.html").exists()


def test_a_report_is_on_the_disk_when_it_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page of zeros after a power cut was no page of ours, and was never replaced."""
    output = tmp_path / "out.jsonl"
    output.write_text('{"request":{"prompt":"x"},"result":{"choices":[]}}\n')
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    done = CliRunner().invoke(main, ["report", str(output)])
    assert done.exit_code == 0, done.output
    assert synced == [f"{tmp_path}/out.report.html.new", str(tmp_path)]

"""A pipe in the place of a file that fminfer writes or looks for itself is not waited for."""

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli import app
from fminfer.cli.app import main
from fminfer.core.errors import InUseError, OutputError, UsageError
from fminfer.files.journal import Journal, journal_path
from fminfer.files.split_folders import is_split_folder
from fminfer.files.status_file import read_sound_status, read_status, status_path
from fminfer.files.streams import find_split_folder
from fminfer.job.file_job import TraceFile
from fminfer.split.manifest import read_manifest, read_part_paths


def test_a_pipe_in_the_place_of_a_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert find_split_folder(tmp_path / "request_0.jsonl") is None
    # a run over a folder without requests waited for ever
    assert not is_split_folder(tmp_path)
    assert read_part_paths(tmp_path) == set()
    with pytest.raises(UsageError, match=r"holds no manifest.json"):
        read_manifest(tmp_path)


def test_a_pipe_in_the_place_of_a_status_file_or_a_journal(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    os.mkfifo(status_path(output))
    os.mkfifo(journal_path(output))
    assert read_status(output) is None
    with pytest.raises(OutputError, match="cannot be written: Invalid argument"):
        Journal(output, {})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"status": "completed"}'])
def test_a_status_that_cannot_be_read_is_not_none(tmp_path: Path, data: bytes) -> None:
    """Merge took answers as those of an older tool, which writes none, and so as complete."""
    output = tmp_path / "a.jsonl"
    assert read_sound_status(output) is None
    status_path(output).write_bytes(data)
    with pytest.raises(UsageError, match="cannot be read, or is damaged"):
        read_sound_status(output)


def test_a_trace_on_a_full_disk_and_of_two_runs(tmp_path: Path) -> None:
    """They were tracebacks, and events of two runs in one file."""
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left"):
        TraceFile(Path("/dev/full"), 1).close()
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        TraceFile(tmp_path, 1)
    trace = TraceFile(tmp_path / "trace.json", 1)
    with pytest.raises(InUseError, match="is in use"):
        TraceFile(tmp_path / "trace.json", 1)
    trace.close()
    again = TraceFile(tmp_path / "trace.json", 1)
    again.close()
    assert (tmp_path / "trace.json").read_bytes() == b"[\n{}]\n"


def test_an_error_of_the_system_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a `stat` on a network disk that is gone: it was a traceback."""
    error = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/net/a.jsonl")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(app, "cap_libraries", fail)
    found = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert found.exit_code == 1
    assert found.stderr.startswith(
        "Error: /net/a.jsonl: Stale file handle. Finished rows are kept"
    )

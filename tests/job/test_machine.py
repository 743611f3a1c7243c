"""Trouble of the machine in the middle of a run: it ends the run and is no row's error."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import MachineError
from fminfer.engine.prompt_fit import PromptFit
from fminfer.files.journal import journal_path
from fminfer.files.ordered_output import errors_path
from fminfer.runtime.lines.runner import LOOKAHEAD
from tests.conftest import run_files

NUM_ROWS = 2_000


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off")
    yield engine
    engine.close()


def shrink_temporary_disk(patch: pytest.MonkeyPatch) -> None:
    """Give SQLite's temporary files room for a few hundred digests."""
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def connect_small(*arguments: Any, **options: Any) -> sqlite3.Connection:
        database = connect(*arguments, **options)
        database.execute("PRAGMA max_page_count = 4")
        return database

    patch.setattr("fminfer.answers.seen_counts.sqlite3.connect", connect_small)


def write_batch(path: Path) -> Path:
    body = {"prompt": "x", "max_tokens": 0}
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_full_temporary_disk_ends_the_run_and_keeps_its_rows(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Each line became an `internal_error`, and the run "completed" with a third of
    them lost."""
    source = write_batch(tmp_path / "a.jsonl")
    output = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        shrink_temporary_disk(patch)
        patch.setattr("fminfer.answers.seen_counts.MAX_IN_MEMORY", 16)
        patch.setattr(
            "fminfer.job.file_job.WINDOW", LOOKAHEAD
        )  # rows are answered before it is full
        with pytest.raises(
            MachineError, match=r"temporary .* full.*TMPDIR.*same command"
        ):
            run_files(engine, [source], [output])
        assert not output.exists() and journal_path(output).stat().st_size > 100
        # Lines that are kept are counted, too.
        with pytest.raises(MachineError, match="TMPDIR"):
            run_files(engine, [source], [output])
    summary = run_files(engine, [source], [output])
    assert (
        summary.num_kept_rows > 0
        and summary.num_rows + summary.num_kept_rows == NUM_ROWS
    )
    assert summary.num_errors == 0 and not errors_path(output).exists()
    found = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert found == [str(i) for i in range(NUM_ROWS)]


@pytest.mark.parametrize("trouble", [MemoryError(), OSError(5, "Input/output error")])
def test_no_trouble_of_the_machine_is_a_row_s_error(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """Any exception while a line was prepared became the line's `internal_error`."""

    def fail(self: PromptFit, *arguments: Any) -> Any:
        raise trouble

    monkeypatch.setattr(PromptFit, "encode", fail)
    with pytest.raises(MachineError, match="line 1"):
        list(engine.run([{"prompt": "x"}]))

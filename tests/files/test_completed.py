"""An output that is complete: whose it is, whether it was edited, and what is left of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import UsageError
from fminfer.files import completed
from fminfer.files.completed import (
    find_completed,
    find_edit,
    is_complete,
    require_completed,
)
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import CLOCK, INPUT
from fminfer.files.line_reader import identify_input
from fminfer.files.ordered_output import errors_path, read_seal
from fminfer.files.own_files import require_own_outputs
from fminfer.files.status_file import read_status, status_path
from fminfer.files.streams import A_PIPE, read_changed_ns

RETRYABLE_ROW = b'{"line":2,"error":{"code":"nan_logits"}}\n'


class Folder:
    """An input of two lines, and the files of a run that has answered it."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "a.jsonl"
        self.source.write_bytes(b'{"prompt":"x"}\n{"prompt":"y"}\n')
        self.output = folder / "output_a.jsonl"
        self.output.write_bytes(b'{"request":{},"result":{}}\n')
        self.errors = errors_path(self.output)
        self.write()

    def write(
        self, *, num_failed: int = 0, limit: int | None = None, **changes: Any
    ) -> None:
        """Write the status file last, as a run does."""
        written = {"output": read_seal(self.output), "errors": read_seal(self.errors)}
        own = {
            "written": written,
            "input_changed_ns": read_changed_ns(self.source),
            "limit": limit,
        }
        fields: dict[str, Any] = {
            "status": "completed",
            "completed_at": 1000,
            "request_counts": {
                "total": 2,
                "completed": 2 - num_failed,
                "failed": num_failed,
            },
            "metadata": {
                INPUT: identify_input(self.source),
                CLOCK: "noon",
                "--seed": "1",
            },
            "fminfer": own | changes.pop("own", {}),
        }
        status_path(self.output).write_text(json.dumps(fields | changes))
        soon = self.output.stat().st_mtime_ns + 10**9
        os.utime(status_path(self.output), ns=(soon, soon))

    def found(self) -> completed.CompletedOutput:
        found = find_completed(self.output)
        assert found is not None
        return found

    def edit(self, *, is_read: bool = False) -> str:
        edit = find_edit(self.output, read_status(self.output) or {}, is_read=is_read)
        return f"{edit.path.name} {edit.what}" if edit else ""


@pytest.fixture
def made(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_what_is_known_of_a_complete_output(made: Folder) -> None:
    made.write(num_failed=1, limit=2)
    found = made.found()
    assert (
        found.counts.num_rows,
        found.counts.num_completed,
        found.counts.num_failed,
    ) == (2, 1, 1)
    assert found.limit == 2 and found.fingerprint["--seed"] == "1"
    assert found.is_of_input_changed_at(read_changed_ns(made.source))
    assert not found.is_of_input_changed_at(1)
    assert found.ended_before(1001.5) and not found.ended_before(1000.9)
    found.check_settings(found.fingerprint | {INPUT: "another"})
    with pytest.raises(UsageError, match="--seed was 1, is 2"):
        found.check_settings(found.fingerprint | {"--seed": "2"})
    made.write(status="in_progress")
    assert find_completed(made.output) is None
    status_path(made.output).unlink()
    assert find_completed(made.output) is None


@pytest.mark.parametrize(
    ("own", "asked", "is_left"),
    [
        (None, 5, False),
        (None, None, False),
        (2, 2, False),
        (2, 1, False),
        (2, 3, True),
        (2, None, True),
    ],
)
def test_a_run_with_a_higher_limit_goes_on(
    own: int | None, asked: int | None, is_left: bool, made: Folder
) -> None:
    made.write(limit=own)
    assert made.found().has_rows_left(asked, 0) is is_left


def test_failed_rows_are_tried_again_by_a_later_run(made: Folder) -> None:
    made.errors.write_bytes(RETRYABLE_ROW)
    made.write(num_failed=1)
    later = status_path(made.output).stat().st_mtime + 1
    assert made.found().has_rows_left(None, later)
    assert not made.found().has_rows_left(None, later - 2), (
        "a run beside it has just tried them"
    )
    made.errors.write_bytes(RETRYABLE_ROW.replace(b"nan_logits", b"out_of_range"))
    made.write(num_failed=1)
    assert not made.found().has_rows_left(None, later)
    made.errors.write_bytes(b"edited\n")
    assert made.found().has_rows_left(None, later), "the run says that it was edited"
    made.errors.unlink()
    assert not made.found().has_rows_left(None, later), (
        "removed, to leave the output as it is"
    )
    made.write()
    assert not made.found().has_rows_left(None, later)


def test_an_edit_is_named(made: Folder) -> None:
    assert made.edit() == made.edit(is_read=True) == ""
    length = len(made.output.read_bytes())
    made.output.write_bytes(b"x" * (length + 1))
    assert (
        made.edit()
        == f"{made.output.name} it was {length} bytes then, and is {length + 1} bytes now"
    )
    with pytest.raises(
        UsageError, match=r"output_a\.jsonl is not as it was.*move it away.*--restart"
    ):
        made.found().check_unedited()
    made.output.write_bytes(b"x" * length)
    assert "other ones" in made.edit(), "it is younger than the status file"
    os.utime(made.output, (1, 1))
    assert "other ones" in made.edit(is_read=True)
    made.output.unlink()
    assert "is no file now" in made.edit()


def test_an_errors_file_that_is_gone_or_new(made: Folder) -> None:
    made.errors.write_bytes(RETRYABLE_ROW)
    assert made.edit().startswith(f"{made.errors.name} it was no file then")
    made.write()
    assert made.edit() == ""
    made.errors.unlink()
    assert made.edit() == "" and "is no file now" in made.edit(is_read=True)
    made.write(own={"written": None})
    made.output.write_bytes(b"x")
    assert made.edit(is_read=True) == "", "an older version wrote no seals"


def test_an_output_of_an_older_version_may_be_replaced(made: Folder) -> None:
    """Its status file has no seals, and the lines may have another form."""
    made.write(own={"written": None})
    status = status_path(made.output)
    status.write_text(status.read_text().replace("{", '{"id": "batch_0", ', 1))
    made.output.write_bytes(b'{"answer":1}\n')
    made.errors.write_bytes(b'{"wrong":1}\n')
    require_own_outputs(made.output)
    status.unlink()
    with pytest.raises(UsageError, match="replaces nothing else"):
        require_own_outputs(made.output)


def test_a_refusal_says_what_may_stay(made: Folder) -> None:
    edit = completed.Edit(made.errors, "x")
    plain = str(completed.edited_error(made.output, edit))
    assert f"move {made.output.name} away" in plain and "--limit" not in plain
    can_stay = str(completed.edited_error(made.output, edit, can_stay=True))
    assert f"remove {made.errors.name} and keep the --limit" in can_stay


@pytest.mark.parametrize(
    ("change", "is_done"),
    [
        (lambda made: None, True),
        (lambda made: made.output.unlink(), False),
        (lambda made: journal_path(made.output).touch(), False),
        (lambda made: made.source.write_bytes(b"another\n"), False),
        (
            lambda made: made.source.write_bytes(b"z" * made.source.stat().st_size),
            False,
        ),
        (lambda made: os.utime(made.source, (1, 1)), True),
        (lambda made: made.source.unlink(), True),
        (lambda made: made.write(metadata={INPUT: A_PIPE}), True),
        (lambda made: status_path(made.output).unlink(), True),
    ],
)
def test_an_output_is_complete_while_its_input_is_the_same(
    change: Callable[[Folder], None], is_done: bool, made: Folder
) -> None:
    change(made)
    assert is_complete(made.output, made.source) is is_done


def test_an_edited_output_is_not_complete(made: Folder) -> None:
    made.output.write_bytes(b"x")
    with pytest.raises(UsageError, match="not as it was written"):
        is_complete(made.output, made.source)


def test_whose_an_output_is(made: Folder) -> None:
    own = made.found().fingerprint
    assert require_completed(made.output, made.source, own).output == made.output
    with pytest.raises(UsageError, match="--seed was 1, is 2"):
        require_completed(made.output, made.source, own | {"--seed": "2"})
    with pytest.raises(UsageError, match=r"is not known before it is read.*--restart"):
        require_completed(made.output, made.source, own | {INPUT: A_PIPE})
    other = own | {INPUT: "another"}
    assert require_completed(made.output, made.source, other, takes_over=True)
    with pytest.raises(UsageError, match="belongs to a run that differs"):
        require_completed(made.output, made.source, other)
    with pytest.raises(UsageError, match="differs"):
        require_completed(
            made.output, made.source, other | {"--seed": "2"}, takes_over=True
        )
    status_path(made.output).unlink()
    with pytest.raises(
        UsageError, match=r"nothing tells which run wrote it.*--restart"
    ):
        require_completed(made.output, made.source, own)


def test_the_clock_of_an_output(made: Folder) -> None:
    assert completed.find_clock(made.output) == "noon"
    head = {"fminfer_journal": 1, "fingerprint": {CLOCK: "midnight"}}
    journal_path(made.output).write_text(json.dumps(head) + "\n")
    assert completed.find_clock(made.output) == "midnight"
    journal_path(made.output).write_text(json.dumps(head))
    assert completed.find_clock(made.output) is None, "it breaks off"
    journal_path(made.output).unlink()
    status_path(made.output).unlink()
    assert completed.find_clock(made.output) is None


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (RETRYABLE_ROW, True),
        (RETRYABLE_ROW.replace(b"nan_logits", b"out_of_range"), False),
        (
            b'{"id":"batch_req_1","response":{"body":{"error":{"code":"nan_logits"}}}}',
            True,
        ),
        (b'{"result":{}}', False),
        (b'{"error":5}', False),
        (b"no JSON", False),
        (b"[1]", False),
    ],
)
def test_which_errors_another_run_may_not_meet(record: bytes, expected: bool) -> None:
    assert completed.is_retryable(record) is expected

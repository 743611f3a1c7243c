"""Rows that failed through the run or the machine: the same command answers them, in place."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import ErrorCode, RequestError, UsageError
from fminfer.files.claims import Claims, read_claims
from fminfer.files.completed import is_retryable
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import RowCounts
from fminfer.files.ordered_output import draft_path, errors_path
from fminfer.files.output_paths import OutputPaths
from fminfer.files.status_file import read_status, status_path
from fminfer.job import journaled_input
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.overview import find_overviews
from fminfer.job.run_inputs import NamedFiles, open_files
from fminfer.job.shared_folder import SharedFiles
from tests.conftest import run_files
from tests.files.test_journal import kill_at

LINES = [
    b'{"prompt": "a"}',
    b'{"request": {"prompt": "b"}, "id": 7}',
    b"",
    b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "c"}}',
    b"no JSON",
    b'{"prompt": "\\ud800"}',
    b'{"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "d"}}',
    b'{"prompt": "z"}',
]
ALL = {1, 2, 4, 5, 6, 7, 8}
FAULTS: dict[int, ErrorCode] = {
    2: "out_of_memory",
    4: "nan_logits",
    6: "internal_error",
}
LASTING: dict[int, ErrorCode] = {5: "invalid_json", 7: "out_of_range"}


def record_of(line: Line, codes: dict[int, ErrorCode]) -> Record:
    if line.number in codes:
        error = RequestError(codes[line.number], "it failed")
        return Record(line, parse_envelope(line), error=error)
    details = {"cached_tokens": 1}
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": details,
    }
    result = {"choices": [], "said": line.number, "usage": usage}
    return Record(
        line,
        parse_envelope(line),
        result=result,
        num_prompt_tokens=3,
        num_cached_tokens=1,
        num_completion_tokens=2,
    )


def answer(file: JournaledInput, codes: dict[int, ErrorCode]) -> list[int]:
    """Answer what is left of a file; return the numbers of its lines."""
    lines = list(file.read_lines(lambda line: None))
    for line in lines[::-1]:
        assert file.add(record_of(line, codes))
    return [line.number for line in lines]


def open_one(source: Path, output: Path, seed: int = 0) -> JournaledInput:
    files = open_files([source], [output], RunTerms("m", {"--seed": str(seed)}))
    (file,) = files.files
    assert isinstance(files, NamedFiles) and isinstance(file, JournaledInput)
    return file


def open_shared(source: Path, output: Path) -> JournaledInput | None:
    plan = OutputPaths([source], [output])
    fingerprint = {"--seed": "0"}
    files = SharedFiles(lambda: plan, RunTerms("m", fingerprint), is_watching=False)
    return next(iter(files.iterate_files()), None) if files.scan() else None


def write_input(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join(LINES) + b"\n")
    return source, folder / "out.jsonl"


def read(output: Path) -> tuple[bytes, bytes]:
    errors = errors_path(output)
    return output.read_bytes(), errors.read_bytes() if errors.exists() else b""


@pytest.fixture
def expected(tmp_path: Path) -> tuple[bytes, bytes]:
    """Return what a run writes in which only those fail that always do."""
    source, output = write_input(tmp_path / "expected")
    answer(open_one(source, output), LASTING)
    return read(output)


def test_the_same_command_answers_them_in_place(
    tmp_path: Path, expected: tuple[bytes, bytes]
) -> None:
    """Once the output was complete the same command did nothing, whatever its --budget."""
    source, output = write_input(tmp_path / "a")
    assert answer(open_one(source, output), FAULTS | LASTING) == sorted(ALL)
    found = [json.loads(line) for line in errors_path(output).open()]
    assert [each.get("retryable") for each in found] == [True, None, False, True, None]
    with pytest.raises(UsageError, match="--seed was 0, is 1"):
        open_one(source, output, seed=1)
    assert not journal_path(output).exists(), "a refusal changes nothing"
    file = open_one(source, output)
    assert not file.is_finished
    assert (file.kept, file.num_tried_rows) == (RowCounts(4, 2), 3)
    (overview,) = find_overviews(output)
    assert overview.files[0].state == "stopped"
    assert answer(file, {4: "nan_logits"} | LASTING) == sorted(FAULTS)
    assert not journal_path(output).exists()
    assert answer(open_one(source, output), LASTING) == [4]
    assert read(output) == expected
    status: Any = read_status(output)
    assert status["status"] == "completed"
    assert status["request_counts"] == {"total": 7, "completed": 5, "failed": 2}
    assert status["usage"]["total_tokens"] == 25
    assert open_one(source, output).is_finished


def test_a_file_of_which_every_row_failed(
    tmp_path: Path, expected: tuple[bytes, bytes]
) -> None:
    """Its answers are an empty file, as those of another run that has just ended could be."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), dict.fromkeys(ALL, "out_of_memory"))
    assert answer(open_one(source, output), LASTING) == sorted(ALL)
    assert read(output) == expected


def test_it_can_be_killed_at_every_step(
    tmp_path: Path, expected: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each system call that changes a file: both files are the old ones, or the new ones.

    Killed between the removal of its journal and that of its claim, a run left the
    claim for ever: the next one found the output complete, and looked no further.
    """
    template = tmp_path / "template"
    source, output = write_input(template)
    answer(open_one(source, output), FAULTS | LASTING)
    before = read(output)
    for moment in range(0, 400, 2):  # the state after one call is that before the next
        folder = tmp_path / str(moment)
        shutil.copytree(template, folder)
        source = folder / "in.jsonl"
        output = folder / "out.jsonl"

        def work(source: Path = source, output: Path = output) -> None:
            answer(open_one(source, output), LASTING)

        was_killed = kill_at(moment, work, monkeypatch)
        if was_killed:
            close_all(journal_path(output))
            bury_claims(output)
            found = read(output)
            assert found[0] in (before[0], expected[0]) and found[1] in (
                before[1],
                expected[1],
            )
            assert found in (before, expected) or journal_path(output).exists()
            file = open_one(source, output)
            if not file.is_finished:
                answer(file, LASTING)
        assert read(output) == expected
        names = {path.name for path in folder.iterdir()}
        assert names == {
            "in.jsonl",
            "out.jsonl",
            "out.errors.jsonl",
            "out.status.json",
        }, moment
        if not was_killed:
            break
    assert moment > 20, "there are so many steps at least"


def close_all(path: Path) -> None:
    """Close a file wherever this process has it open, as the system does when it dies."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(path)):
                os.close(int(fd))
    if not path.exists():
        return
    # A process that another thread starts holds what was open until it has its program.
    for _ in range(100):
        with path.open("rb+") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)


def bury_claims(output: Path) -> None:
    """Make an output's claims those of a process that has ended."""
    for claim in read_claims(output):
        fields = json.loads(claim.path.read_bytes())
        claim.path.write_text(json.dumps(fields | {"started": "never"}))


@pytest.mark.parametrize("kind", ["named", "shared"])
@pytest.mark.parametrize("ending", ["complete", "in its journal", "not answered"])
def test_a_complete_output_has_nothing_of_killed_runs_beside_it(
    kind: str, ending: str, tmp_path: Path
) -> None:
    """A claim stayed where the next run had nothing to answer; the draft of a journal
    stayed too.

    A run had made the draft that wanted to answer more lines than the next one.
    """
    source, output = write_input(tmp_path)
    open_some = open_shared if kind == "shared" else open_one
    if ending == "complete":
        answer(open_one(source, output), LASTING)
    elif ending == "in its journal":
        killed = open_one(source, output)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(
                journaled_input, "write_ordered_output", lambda *given, **named: 1 / 0
            )
            answer(killed, LASTING)
        assert killed.journal is not None
        killed.journal.close()
        bury_claims(output)
    assert Claims().acquire(output) is not None
    draft = draft_path(journal_path(output))
    draft.write_text("half a jour")
    if ending == "complete":  # a living run is at work on it
        open_some(source, output)
        assert draft.exists() and len(read_claims(output)) == 1
    bury_claims(output)
    file = open_some(source, output)
    if file is not None and not file.is_finished:
        assert ending == "not answered"
        answer(file, LASTING)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in.jsonl", "out.jsonl", "out.errors.jsonl", "out.status.json"}


@pytest.mark.parametrize("kind", ["swapped", "cut", "more", "other"])
def test_an_output_that_was_changed_is_refused(kind: str, tmp_path: Path) -> None:
    """Whose each of its rows is would not be known."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), FAULTS | LASTING)
    records = output.read_bytes().splitlines(keepends=True)
    changed = {
        "swapped": records[::-1],
        "cut": records[:-1],
        "more": [*records, records[-1]],
        "other": [records[0].replace(b"prompt", b"other"), *records[1:]],
    }[kind]
    output.write_bytes(b"".join(changed))
    with pytest.raises(UsageError, match=r"not as it was written.*--restart"):
        open_one(source, output)
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "in.jsonl",
        "out.errors.jsonl",
        "out.jsonl",
        "out.status.json",
    ]
    errors_path(output).unlink()
    with pytest.raises(
        UsageError, match=r"not as it was written.*move it away, or give --restart"
    ):
        open_one(source, output)
    output.unlink()
    assert not open_one(source, output).is_finished


def test_an_output_that_another_run_has_replaced_is_not_tried_again(
    tmp_path: Path,
) -> None:
    """A run took the other's rows as its own if they came after it had looked at the output."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), FAULTS | LASTING)
    file = JournaledInput(source, 0, output, RunTerms("m", {"--seed": "0"}))
    terms = RunTerms("m", {"--seed": "1"}, restart=True)
    (other,) = open_files([source], [output], terms).files
    assert isinstance(other, JournaledInput)
    answer(other, FAULTS | LASTING)
    with pytest.raises(UsageError, match="--seed was 1, is 0"):
        file.begin()
    assert not journal_path(output).exists()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("cut", "line 8 of .*in.jsonl has no record"),
        ("more", "it has more records than .*in.jsonl has lines"),
        ("bare", "an answer has no usage"),
    ],
)
def test_one_of_an_older_version_is_checked_by_its_records(
    kind: str, what: str, tmp_path: Path
) -> None:
    """Its status file has no digests of what was written."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), FAULTS | LASTING)
    path = status_path(output)
    path.write_bytes(path.read_bytes().replace(b'"written"', b'"unwritten"'))
    records = output.read_bytes().splitlines(keepends=True)
    changed = {
        "cut": records[:-1],
        "more": [*records, records[-1]],
        "bare": [records[0].replace(b'"usage"', b'"used"'), *records[1:]],
    }[kind]
    output.write_bytes(b"".join(changed))
    with pytest.raises(UsageError, match=rf"out.jsonl is not as .*\({what}\).*--limit"):
        open_one(source, output)
    assert (
        output.read_bytes() == b"".join(changed) and not journal_path(output).exists()
    )
    output.write_bytes(b"".join(records))
    assert answer(open_one(source, output), LASTING) == sorted(FAULTS)


@pytest.mark.parametrize("of_errors", [True, False])
def test_an_edit_is_told_with_what_helps(of_errors: bool, tmp_path: Path) -> None:
    """Without its errors file an output counts as complete, unless it was edited itself."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), FAULTS | LASTING)
    edited = errors_path(output) if of_errors else output
    edited.write_bytes(edited.read_bytes() + b"\n")
    with pytest.raises(UsageError, match="not as it was written") as refused:
        open_one(source, output)
    assert ("To leave the output as it is, remove" in str(refused.value)) == of_errors
    errors_path(output).unlink()
    if of_errors:
        assert open_one(source, output).is_finished


EDITS = {
    "emptied": (b"", None),
    "cut": (b'{"request":', None),
    "said": (b'"said":9', b'"said":1'),  # of the same size
    "error": (b"it worked", b"it failed"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_a_complete_output_that_was_edited_is_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    """An output that was emptied counted as complete, with all of its rows."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), LASTING)
    new, old = EDITS[kind]
    edited = errors_path(output) if kind == "error" else output
    before = edited.read_bytes()
    edited.write_bytes(new if old is None else before.replace(old, new))
    assert edited.read_bytes() != before
    with pytest.raises(UsageError) as refused:
        open_one(source, output)
    assert str(edited) in str(refused.value) and "not as it was written" in str(
        refused.value
    )
    assert not journal_path(output).exists()
    (file,) = find_overviews(output)[0].files
    assert file.state == "stopped" and file.is_edited
    assert file.why is not None and f"{edited.name} was edited since" in file.why
    edited.write_bytes(before)
    assert open_one(source, output).is_finished, "it is as it was, if later"
    assert find_overviews(output)[0].files[0].state == "done"


def test_digests_are_read_only_of_files_that_are_newer_than_their_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run over a thousand complete files would read all of their answers."""
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), LASTING)
    status = status_path(output)
    errors = errors_path(output)
    whole = output.read_bytes()
    later = time.time() + 10
    os.utime(status, (later, later))
    with monkeypatch.context() as patch:
        patch.setattr("fminfer.files.completed.read_seal", lambda path: 1 / 0)
        assert open_one(source, output).is_finished
    output.write_bytes(whole.replace(b'"said":1', b'"said":9'))
    while output.stat().st_ctime_ns <= status.stat().st_ctime_ns:
        # put in its place by `cp -p`: an old time, and a new entry
        os.utime(output, (0, 0))
    with pytest.raises(UsageError, match=r"it still has .* bytes, but other ones"):
        open_one(source, output)
    output.write_bytes(whole)
    errors.unlink()
    assert open_one(source, output).is_finished, "removed, to leave the output as it is"
    errors.write_bytes(b"{}\n")
    with pytest.raises(
        UsageError, match=r"out\.errors\.jsonl is not as it was written"
    ):
        open_one(source, output)


@pytest.mark.parametrize("kind", ["answer", "error", "retryable"])
def test_what_was_edited_since_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """An edit inside an answer was kept as if the model had said it.

    Where every retryable error was taken out, the output counted as finished: those
    rows were lost.
    """
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), FAULTS | LASTING)
    errors = errors_path(output)
    before = read(output)
    if kind == "answer":
        output.write_bytes(before[0].replace(b'"said":1', b'"said":9'))
    elif kind == "error":
        errors.write_bytes(before[1].replace(b"it failed", b"it worked"))
    else:
        kept = [
            line
            for line in before[1].splitlines(keepends=True)
            if not is_retryable(line)
        ]
        errors.write_bytes(b"".join(kept))
    edited = output if kind == "answer" else errors
    with pytest.raises(
        UsageError,
        match=rf"{re.escape(str(edited))} is not as it was written .*--restart",
    ):
        open_one(source, output)
    assert not journal_path(output).exists()
    output.write_bytes(before[0])
    errors.write_bytes(before[1])
    assert not open_one(source, output).is_finished, "it is as it was"


def test_a_status_of_an_older_version_knows_no_digests(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "a")
    answer(open_one(source, output), FAULTS | LASTING)
    status = json.loads(status_path(output).read_text())
    del status["fminfer"]["written"]
    status_path(output).write_text(json.dumps(status))
    output.write_bytes(output.read_bytes().replace(b'"said":1', b'"said":9'))
    assert open_one(source, output).kept.num_rows == 4


def test_runs_over_one_folder_try_them_once_each(tmp_path: Path) -> None:
    """A run that began before a file was complete does not answer its failed rows again."""
    source, _ = write_input(tmp_path / "a")
    output = source.with_name("output_in.jsonl")

    def share() -> Any:
        return SharedFiles(
            lambda: OutputPaths([source], [output]),
            RunTerms("m", {}),
            is_watching=False,
        )

    first = share()
    beside = share()
    assert first.scan()
    for file in first.iterate_files():
        answer(file, FAULTS | LASTING)
    assert first.is_finished
    assert not beside.scan() and beside.kept.num_errors == 5
    time.sleep(0.02)
    later = share()
    assert later.scan()
    assert [answer(file, FAULTS | LASTING) for file in later.iterate_files()] == [
        sorted(FAULTS)
    ]
    assert later.is_finished and later.kept == RowCounts(4, 2)


def test_a_larger_budget_answers_what_did_not_fit(tmp_path: Path) -> None:
    """With an engine: `--budget 64`, then the same command with more."""
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    rows = [{"prompt": "x" * n, "max_tokens": 4, "temperature": 0} for n in (5, 200, 9)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for budget, numbers in (
        (64, (2, 1, 0, 0)),
        (2048, (1, 0, 2, 1)),
        (2048, (0, 0, 3, 0)),
    ):
        engine = fminfer.Engine(dtype="float32", kernels="off", budget=budget)
        summary = run_files(engine, [source], [output])
        engine.close()
        found = (
            summary.num_rows,
            summary.num_errors,
            summary.num_kept_rows,
            summary.num_tried_rows,
        )
        assert found == numbers
        is_hopeful = "the same command tries 1 failed row again" in summary.to_text()
        assert is_hopeful == (summary.num_errors > 0)
    prompts = [json.loads(line)["request"]["prompt"] for line in output.open()]
    assert (
        prompts == [row["prompt"] for row in rows] and not errors_path(output).exists()
    )

"""`fminfer status` tells what stands in folders of outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import RequestError, StoppedError
from fminfer.files.status_file import status_path
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.overview import FileState, find_overviews
from tests.shards.answer_shards import share

NUM_FILES = 4
NUM_LINES = 5


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    """One file done, one being answered, one stopped, one not begun."""
    for i in range(NUM_FILES):
        text = "".join(f'{{"prompt":"{i} {n}"}}\n' for n in range(NUM_LINES))
        (tmp_path / f"request_{i}.jsonl").write_text(text)
    turns = (file for file in share(tmp_path).iterate_files() if file is not None)
    done = next(turns)
    running = next(turns)
    stopped = next(turns)
    answer(done, NUM_LINES, num_bad=2)
    answer(running, 3, num_bad=1)
    answer(stopped, 2)
    stopped.abandon(StoppedError("Out of time.", "out_of_time"))
    return tmp_path


def answer(file: JournaledInput, num: int, num_bad: int = 0) -> None:
    for line in file.read_lines(lambda line: None):
        if line.number <= num:
            error = (
                RequestError("out_of_range", "too much")
                if line.number <= num_bad
                else None
            )
            file.add(
                Record(
                    line,
                    parse_envelope(line),
                    result=None if error else {},
                    error=error,
                )
            )
    file.status._write()


def by_name(files: list[FileState]) -> dict[str, FileState]:
    return {Path(file.output).name: file for file in files}


def test_a_folder(folder: Path) -> None:
    (overview,) = find_overviews(folder)
    files = by_name(overview.files)
    states = [files[f"output_request_{i}.jsonl"].state for i in range(NUM_FILES)]
    assert states == ["done", "running", "stopped", "waiting"]
    assert overview.num_rows == NUM_FILES * NUM_LINES
    counts = [
        (file.num_answered, file.num_failed, file.num_left) for file in overview.files
    ]
    assert counts == [(3, 2, 0), (2, 1, 2), (2, 0, 3), (0, 0, 5)]
    assert overview.failed_by_code == {"out_of_range": 3}
    assert files["output_request_2.jsonl"].why == "out of time"
    owner = files["output_request_1.jsonl"].owner
    assert owner is not None and "process" in owner


def test_the_time_left_counts_what_this_run_has_done(folder: Path) -> None:
    path = status_path(folder / "output_request_1.jsonl")
    status = json.loads(path.read_text())
    status["in_progress_at"] = 1000
    status["fminfer"]["kept_rows"] = 1
    path.write_text(json.dumps(status))
    (overview,) = find_overviews(folder, now_s=1010.0)  # 2 rows in 10 seconds
    running = by_name(overview.files)["output_request_1.jsonl"]
    assert running.rows_per_s == 0.2 and running.left_s == 10.0
    assert overview.left_s == (2 + 3 + 5) / 0.2


def test_a_run_that_answers_several_files_has_one_rate(folder: Path) -> None:
    """Each file was timed by itself, and those that waited behind others of their run
    were slow."""
    stopped, running = (
        status_path(folder / f"output_request_{i}.jsonl") for i in (2, 1)
    )
    facts = {"id": "a", "started_at": 900, "seconds": 99.0}
    line = {
        "every_s": 50.0,
        "fed": "1 1",
        "drawn": "1 1",
        "done": "1 5",
        "running": "4 4",
    }
    earlier = {"id": "b", "started_at": 1, "seconds": 9.0, "time_line": line}
    for path in (stopped, running):
        status = json.loads(path.read_text())
        status["in_progress_at"] = 998
        status["fminfer"]["runs"] = [earlier, facts | {"time_line": line}]
        path.write_text(json.dumps(status))
    claim = "output_request_2.jsonl.claim"
    shutil.copytree(folder / "output_request_1.jsonl.claim", folder / claim)

    (overview,) = find_overviews(folder, now_s=1000.0)
    assert overview.count("running") == 2
    assert {file.rows_per_s for file in overview.files if file.state == "running"} == {
        0.08
    }
    left = 2 + 3 + 5  # of them, 4 rows are half done
    assert overview.left_s == (left - 4 / 2) / 0.08

    status["fminfer"]["runs"] = [earlier]
    running.write_text(json.dumps(status))
    (overview,) = find_overviews(folder, now_s=1000.0)
    assert by_name(overview.files)["output_request_1.jsonl"].rows_per_s == 3 / 2


def test_rows_that_came_after_the_last_status_count(folder: Path) -> None:
    """A run that is killed has rows of a second more than its status tells; a resume
    keeps them."""
    path = status_path(folder / "output_request_2.jsonl")
    before = path.read_bytes()
    file = next(
        f
        for f in share(folder).iterate_files()
        if f and f.path.name == "request_2.jsonl"
    )
    lines = file.read_lines(lambda line: None)
    file.status._written_s = float("inf")
    for line in (next(lines), next(lines)):
        error = RequestError("out_of_range", "too much") if line.number == 4 else None
        file.add(
            Record(
                line, parse_envelope(line), result=None if error else {}, error=error
            )
        )
    path.write_bytes(before)
    (overview,) = find_overviews(folder)
    found = by_name(overview.files)["output_request_2.jsonl"]
    assert (found.num_answered, found.num_failed, found.num_left) == (3, 1, 1)
    path.unlink()
    (overview,) = find_overviews(folder)
    found = by_name(overview.files)["output_request_2.jsonl"]
    assert (found.num_answered, found.num_failed) == (3, 1)


def test_what_people_see(folder: Path) -> None:
    result = CliRunner().invoke(main, ["status", str(folder)])
    assert result.exit_code == 0
    assert "1 of 4 files done, 1 running, 1 stopped, 1 waiting" in result.stdout
    assert "10 of 20 rows, 3 of them in error (3 out_of_range)" in result.stdout
    assert "request_2.jsonl: stopped (out of time), 2 of 5 rows" in result.stdout
    assert "request_1.jsonl: 3 of 5 rows, by " in result.stdout


def test_json_has_every_file(folder: Path) -> None:
    result = CliRunner().invoke(main, ["status", "--json", str(folder)])
    found = json.loads(result.stdout)
    assert found["num_files"] == {"done": 1, "running": 1, "stopped": 1, "waiting": 1}
    assert (found["num_answered"], found["num_failed"], len(found["files"])) == (
        7,
        3,
        4,
    )
    assert [file["why"] for file in found["files"]] == [None, None, "out of time", None]


def test_one_output_its_input_and_an_output_folder(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("output_request_0.jsonl", "request_0.jsonl"):
        (overview,) = find_overviews(folder / name)
        assert [file.state for file in overview.files] == ["done"], name
    apart = tmp_path / "answers"
    apart.mkdir()
    for path in folder.glob("output_request_0*"):
        path.rename(apart / path.name)
    (overview,) = [each for each in find_overviews(tmp_path) if each.path == str(apart)]
    assert [(file.state, file.num_rows) for file in overview.files] == [
        ("done", NUM_LINES)
    ]


def test_each_file_that_a_run_passes_over_is_named(folder: Path) -> None:
    in_capitals = [folder / "ONE.JSONL", folder / "TWO.JSONL"]
    for path in in_capitals:
        path.write_text('{"prompt":"a"}\n')
    result = CliRunner().invoke(main, ["status", str(folder)])
    for path in in_capitals:
        assert f"  left out: {path}: an ending in capitals" in result.stdout


def test_a_run_that_was_killed_is_stopped(folder: Path) -> None:
    for path in folder.glob("*.claim"):
        shutil.rmtree(path)
    (overview,) = find_overviews(folder)
    running = by_name(overview.files)["output_request_1.jsonl"]
    assert (running.state, running.why) == ("stopped", "its run ended without a word")
    assert overview.left_s is None


def test_an_output_that_was_edited_is_not_done(folder: Path) -> None:
    for name in ("output_request_1.jsonl.claim", "output_request_2.jsonl.claim"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "output_request_0.jsonl").write_bytes(b"")
    found = CliRunner().invoke(main, ["status", str(folder)]).stdout
    assert "0 of 4 files done" in found
    assert (
        "request_0.jsonl: stopped (output_request_0.jsonl was edited since: it was "
        in found
    )
    assert "fminfer run refuses what was edited" in found
    found = CliRunner().invoke(main, ["status", "--json", str(folder)]).stdout
    edited = [
        file["output"] for file in json.loads(found)["files"] if file["is_edited"]
    ]
    assert edited == [str(folder / "output_request_0.jsonl")]


def test_nothing_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "missing.jsonl", tmp_path / "notes.txt"):
        result = CliRunner().invoke(main, ["status", str(path)])
        assert result.exit_code == 2 and "Error: " in result.stderr, path


def test_what_cannot_be_read_does_not_break_it(folder: Path) -> None:
    status_path(folder / "output_request_0.jsonl").write_text("{")
    (folder / "output_request_0.errors.jsonl").write_text('[]\n{\n{"error":3}\n')
    (overview,) = find_overviews(folder)
    assert by_name(overview.files)["output_request_0.jsonl"].state == "done"


def test_files_that_no_run_has_begun(tmp_path: Path) -> None:
    """ "No run is at work; the same command goes on" was told before there was any command."""
    (tmp_path / "a.jsonl").write_text('{"prompt":"a"}\n')
    found = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert "no run has begun; fminfer run answers them" in found.output

"""The status file beside an output: the OpenAI Batch object, at every moment of a run."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai.types
import pytest

import fminfer
from fminfer.core.errors import OutputError
from fminfer.files.journal_rows import Counts
from fminfer.files.line_reader import read_lines
from fminfer.files.status_file import StatusFile, status_path
from tests.conftest import run_files
from tests.line_bench import before_each_record

GOOD = '{"prompt":"x","max_tokens":2,"temperature":0,"ignore_eos":true}\n'
# equal ones draw differently
DIFFERENT = '{"prompt":"x","max_tokens":2,"ignore_eos":true}\n'


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=4)
    yield engine
    engine.close()


def read(path: Path) -> openai.types.Batch:
    """Parse it as the openai package does, types checked."""
    return openai.types.Batch.model_validate_json(path.read_bytes(), strict=True)


def run(engine: fminfer.Engine, path: Path) -> None:
    output = path.with_name(f"output_{path.name}")
    run_files(engine, [path], [output])


def test_a_completed_run(engine: fminfer.Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 3 + '{"prompt":5}\n')
    run(engine, path)
    batch = read(tmp_path / "output_a.status.json")
    assert batch.status == "completed" and batch.endpoint == "/v1/completions"
    assert batch.id.startswith("batch_") and batch.object == "batch"
    assert batch.input_file_id == str(path) and batch.errors is None
    assert batch.output_file_id == str(tmp_path / "output_a.jsonl")
    assert batch.error_file_id == str(tmp_path / "output_a.errors.jsonl")
    assert batch.request_counts is not None and batch.usage is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    answers = map(json.loads, (tmp_path / "output_a.jsonl").read_text().splitlines())
    usages = [answer["result"]["usage"] for answer in answers]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert (
        batch.usage.output_tokens
        == sum(usage["completion_tokens"] for usage in usages)
        == 6
    )
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    times = (
        batch.created_at,
        batch.in_progress_at,
        batch.finalizing_at,
        batch.completed_at,
    )
    assert None not in times and sorted(times) == list(times)  # type: ignore[type-var]
    assert batch.failed_at is None and batch.cancelled_at is None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "a.jsonl",
        "output_a.errors.jsonl",
        "output_a.jsonl",
        "output_a.status.json",
    ]


def test_an_empty_file_is_completed_too(engine: fminfer.Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    run(engine, path)
    batch = read(tmp_path / "output_a.status.json")
    assert batch.status == "completed" and batch.error_file_id is None
    assert batch.request_counts is not None and batch.request_counts.total == 0


@pytest.mark.parametrize(
    "fault, status",
    [
        (RuntimeError("the machine caught fire"), "failed"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_a_run_that_does_not_end(
    engine: fminfer.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    status: str,
) -> None:
    path = tmp_path / "a.jsonl"
    waiting = tmp_path / "b.jsonl"
    path.write_text(DIFFERENT * 2000)  # more than are read ahead
    waiting.write_text(GOOD * 7)
    seen: list[openai.types.Batch] = []

    def fail_later(count: int) -> None:
        if count == 10:
            seen.extend(read(tmp_path / f"{name}.status.json") for name in "xy")
            raise fault

    before_each_record(monkeypatch, fail_later)
    outputs = [tmp_path / "x.jsonl", tmp_path / "y.jsonl"]
    with pytest.raises(type(fault)):
        run_files(engine, [path, waiting], outputs)
    assert [batch.status for batch in seen] == ["in_progress", "validating"]
    for name, total, completed in (("x", 2000, 10), ("y", 7, 0)):
        batch = read(tmp_path / f"{name}.status.json")
        assert batch.status == status and batch.output_file_id is None
        assert getattr(batch, f"{status}_at") is not None and batch.completed_at is None
        counts = batch.request_counts
        assert counts is not None and (counts.total, counts.completed) == (
            total,
            completed,
        )
        if status == "failed":
            assert batch.errors is not None and batch.errors.data is not None
            assert (
                batch.errors.data[0].message == "RuntimeError: the machine caught fire"
            )
        else:
            assert batch.errors is None


def test_the_next_run_replaces_it(engine: fminfer.Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD)
    status = tmp_path / "output_a.status.json"
    status.write_text('{"id": "batch_0", "of": "an earlier run"}')
    run(engine, path)
    assert read(status).status == "completed"


def test_it_is_written_once_a_second_and_at_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    counts = Counts(num_rows=9)
    status = StatusFile(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "model", {}, counts)
    status.set_status("validating")
    status.set_status("in_progress")
    seen = []
    for step in range(7):
        counts.num_completed = step
        now_s = 100.0 + step * 0.4
        status.update()
        seen.append(read(status_path(tmp_path / "b.jsonl")).request_counts)
    assert [found and found.completed for found in seen] == [0, 0, 0, 3, 3, 3, 6]


def test_rows_of_earlier_runs_are_counted_before_the_input_is_read(
    tmp_path: Path,
) -> None:
    earlier = Counts()
    earlier.add(is_error=False, tokens=(3, 1, 2))
    counts = Counts()
    counts.start_from(earlier)
    StatusFile(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "m", {}, counts).set_status(
        "validating"
    )
    found = read(status_path(tmp_path / "b.jsonl")).request_counts
    assert found is not None
    assert (found.total, found.completed, found.failed) == (0, 1, 0)


def test_a_file_of_unknown_length_counts_what_was_read(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .json file is not parsed twice, so its total grows until it is read to its end."""
    path = tmp_path / "a.json"
    path.write_text("[" + ",".join([DIFFERENT.strip()] * 300) + "]")
    totals: list[int] = []

    def watch(count: int) -> None:
        if not count:  # nothing is written yet
            return
        counts = read(tmp_path / "x.status.json").request_counts
        assert counts is not None
        totals.append(counts.total)

    before_each_record(monkeypatch, watch)
    monkeypatch.setattr("fminfer.files.status_file.WRITE_EVERY_S", 0.0)
    run_files(engine, [path], [tmp_path / "x.jsonl"])
    assert 0 < totals[0] < 300 and totals[-1] == 300 and totals == sorted(totals)
    assert sum(1 for _ in read_lines(path, 0)) == 300


def test_the_end_is_told_also_on_a_full_disk(tmp_path: Path) -> None:
    def refuse(*names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "out.jsonl"
    status = StatusFile(Path("in.jsonl"), output, "m", {}, Counts())
    status.set_status("in_progress")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", refuse)
        with pytest.raises(OutputError, match="No space left"):
            status.set_status("finalizing")
        status.set_status("failed", "the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["out.status.json"]
    assert read(status_path(output)).status == "failed"


def test_a_folder_that_vanishes_has_taken_the_rows_along(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    status = StatusFile(Path("in.jsonl"), folder / "out.jsonl", "m", {}, Counts())
    status.set_status("in_progress")
    shutil.rmtree(folder)
    with pytest.raises(
        OutputError, match="moved or removed, and finished rows with it"
    ):
        status.set_status("finalizing")

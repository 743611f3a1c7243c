"""Runs that are killed, stopped and repeated: every row once, in order, as in a run left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.errors import StoppedError, UsageError
from fminfer.job import open_files, run_job
from fminfer.output.summary import JobSummary
from fminfer.stopping import Stopper, check_times, parse_duration
from tests.conftest import run_files

NUM_ROWS = 60


def write_rows(folder: Path) -> Path:
    """Write rows of many kinds; equal unseeded ones draw by their number, so order matters."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for number in range(NUM_ROWS):
            row: dict[str, Any] = {"prompt": f"room {number % 5}", "max_tokens": 8 + number % 40}
            row |= {"ignore_eos": True, "temperature": 0.9 if number % 2 else 0}
            file.write(json.dumps(row) + "\n")
        file.write('{"prompt": 5}\n\nno json\n')
    return path


def command(source: Path, output: Path, *more: object) -> list[str]:
    start = [sys.executable, "-m", "fminfer", "run", source, "--output", output, "--max-rows", 8]
    return [str(part) for part in (*start, *more)]


def texts(output: Path) -> list[Any]:
    records = map(json.loads, output.read_text().splitlines())
    return [(r["request"], [c["text"] for c in r["result"]["choices"]]) for r in records]


def kept_records(output: Path) -> list[bytes]:
    """Return the records of a journal that a killed run has left."""
    lines = Path(f"{output}.journal").read_bytes().splitlines(keepends=True)[1:]
    return [line[line.index(b'"record":') + 9 : -2] for line in lines if line.endswith(b"}\n")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the input, and the output of a run that was left alone."""
    folder = tmp_path_factory.mktemp("alone")
    source, output = write_rows(folder), folder / "alone.jsonl"
    done = subprocess.run(command(source, output), capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    return source, output


@pytest.mark.parametrize(
    "number, status, state",
    [
        (signal.SIGINT, 130, "cancelled"),
        (signal.SIGTERM, 143, "cancelled"),
        (signal.SIGUSR2, 75, "expired"),
        (signal.SIGKILL, -9, "in_progress"),
    ],
)
def test_the_same_command_goes_on_where_it_was_stopped(
    alone: tuple[Path, Path],
    tmp_path: Path,
    number: signal.Signals,
    status: int,
    state: str,
) -> None:
    source, whole = alone
    output = tmp_path / "out.jsonl"
    journal = Path(f"{output}.journal")
    run = subprocess.Popen(
        command(source, output, "--grace", 0),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while run.poll() is None and not (journal.exists() and len(kept_records(output)) > 15):
        time.sleep(0.02)
    run.send_signal(number)
    _, said = run.communicate(timeout=30)
    assert run.returncode == status, said
    assert json.loads((tmp_path / "out.status.json").read_text())["status"] == state
    kept = kept_records(output)
    assert 15 < len(kept) < NUM_ROWS and not output.exists()
    done = subprocess.run(command(source, output), capture_output=True, text=True)
    assert done.returncode == 3 and f"{len(kept)} kept from earlier runs" in done.stderr
    assert texts(output) == texts(whole)
    errors = tmp_path / "out.errors.jsonl"
    finished = set(output.read_bytes().splitlines()) | set(errors.read_bytes().splitlines())
    assert set(kept) <= finished, "byte for byte"
    assert errors.read_bytes() == whole.with_name("alone.errors.jsonl").read_bytes()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.errors.jsonl", "out.jsonl", "out.status.json"]


def test_a_second_signal_ends_it_at_once(alone: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    rows = tmp_path / "long.jsonl"
    row = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
    rows.write_text((json.dumps(row) + "\n") * 500)
    run = subprocess.Popen(
        command(rows, output, "--grace", "1h"),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    journal = Path(f"{output}.journal")
    while run.poll() is None and not journal.exists():
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    time.sleep(1)
    assert run.poll() is None, "rows that run may go on"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=10)
    assert run.returncode == 130 and "Interrupted" in said


def test_a_deadline(tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    row = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
    rows.write_text((json.dumps(row) + "\n") * 3000)
    started = time.monotonic()
    done = subprocess.run(
        command(rows, tmp_path / "out.jsonl", "--deadline", "16", "--grace", "2"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75 and "Out of time" in done.stderr, done.stderr
    assert 13 < time.monotonic() - started < 19


def test_stdin_with_a_file_for_answers(tmp_path: Path, alone: tuple[Path, Path]) -> None:
    """Its lines are compared one by one with those that were answered."""
    source, _ = alone
    output = tmp_path / "out.jsonl"
    lines = source.read_bytes().splitlines(keepends=True)
    run = subprocess.Popen(command(Path("-"), output), stdin=subprocess.PIPE, text=False)
    assert run.stdin is not None
    run.stdin.write(b"".join(lines[:40]))
    run.stdin.flush()
    journal = Path(f"{output}.journal")
    while run.poll() is None and not (journal.exists() and len(kept_records(output)) > 5):
        time.sleep(0.02)
        if run.poll() is None and journal.exists():
            run.stdin.write(b"\n" * 5)  # blank lines keep it reading
            run.stdin.flush()
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 143, "although it waits for a line"
    run.stdin.close()


def test_a_line_that_changed_is_refused(alone: tuple[Path, Path], tmp_path: Path) -> None:
    engine = fminfer.Engine(dtype="float32", attention="eager", max_rows=4)
    source, output = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    row = '{"prompt":"x","max_tokens":2,"temperature":0,"user":"%d"}\n'
    source.write_text("".join(row % n for n in range(9)))
    answer = engine.run

    def stop_early(lines: Any) -> Any:
        for count, record in enumerate(answer(lines)):
            if count == 5:
                raise StoppedError("enough", "cancelled", 130)
            yield record

    engine.run = stop_early  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        run_files(engine, [source], [output])
    engine.run = answer  # type: ignore[method-assign]
    before = source.read_text()
    source.write_text(before + row % 99)
    with pytest.raises(UsageError, match=r"the input was [0-9a-f]{16}, is [0-9a-f]{16}.*--restart"):
        run_files(engine, [source], [output])
    source.write_text(before)
    summary = run_files(engine, [source], [output])
    assert (summary.num_rows, summary.num_kept_rows) == (4, 5)
    files = open_files([source], [output], {}, model="m", restart=False)
    again = run_job(None, files, JobSummary("m", "d", [source], [output]), is_quiet=True)
    assert (again.num_rows, again.num_kept_rows) == (0, 9) and "9 kept" in again.to_text()
    with pytest.raises(UsageError, match="--seed was None, is 5"):
        open_files([source], [output], {"--seed": "5"}, model="m", restart=False)
    engine.close()


def test_a_run_that_was_killed_while_it_finished_needs_no_model(tmp_path: Path) -> None:
    source, output = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt":"x","max_tokens":2,"temperature":0}\n' * 3)
    engine = fminfer.Engine(dtype="float32", attention="eager")
    run_files(engine, [source], [output])
    engine.close()
    from fminfer.output.journal import Journal, Row

    output.rename(tmp_path / "answers")
    records = (tmp_path / "answers").read_bytes().splitlines()
    files = open_files([source], [tmp_path / "other.jsonl"], {}, model="m", restart=False)
    fingerprint = files[0]._fingerprint  # type: ignore[union-attr]
    journal = Journal(output, fingerprint)
    for number, record in enumerate(records, 1):
        journal.append(Row(number, False, (1, 0, 2), 0, record))
    journal.close()
    (tmp_path / "out.jsonl.ordered").write_bytes(records[0][:9])
    files = open_files([source], [output], {}, model="m", restart=False)
    assert all(file.is_finished for file in files)
    assert output.read_bytes() == (tmp_path / "answers").read_bytes()
    assert not (tmp_path / "out.jsonl.ordered").exists()


def test_durations() -> None:
    shown = {"90": 90, "1.5m": 90, "2h": 7200, "3:50:00": 13800, "45:00": 2700, "1-00:00:10": 86410}
    for text, seconds in shown.items():
        assert parse_duration(text) == seconds
    for text in ("", "x", "-3", "1:75", "1:2:3:4", "3h20"):
        with pytest.raises(ValueError, match="is no duration"):
            parse_duration(text)
    check_times(10, 11)
    for grace_s, deadline_s in ((-1, None), (10, 10)):
        with pytest.raises(UsageError, match="--"):
            check_times(grace_s, deadline_s)


def test_a_signal_while_the_model_loads_ends_it(tmp_path: Path) -> None:
    stopper = Stopper(5.0)
    with pytest.raises(StoppedError, match="Terminated"), stopper.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

"""Runs that are killed, stopped and repeated: every row once, in order, as in a run
left alone."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.answers.carrying_over import RunTerms
from fminfer.cli.process import exit_status_of
from fminfer.core.config import EngineConfig
from fminfer.core.errors import StoppedError, UsageError
from fminfer.files.journal import Journal, journal_path
from fminfer.files.journal_rows import Row
from fminfer.files.streams import STDIN
from fminfer.job.file_job import run_job
from fminfer.job.run_inputs import open_files
from fminfer.job.run_summary import JobSummary
from fminfer.machine.stopper import (
    REPEAT_CTRL_C_S,
    WARNINGS,
    Stopper,
    check_times,
    is_repeated_signal,
    list_stop_signals,
    parse_duration,
)
from fminfer.models.checkpoint import open_checkpoint
from fminfer.plan.planning import plan_ahead
from tests.conftest import run_files
from tests.faults.torture import (
    NUM_ROWS,
    Reference,
    command,
    kept_records,
    one_round,
    run_alone,
    texts,
)
from tests.forked import COMMAND, Forked, run_forked
from tests.line_bench import before_each_record


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Give a run that was left alone; that and the torture's others are forked."""
    forks = SimpleNamespace(
        Popen=lambda words, stderr: Forked(words[len(COMMAND) :]),
        run=lambda words, **how: run_forked(words[len(COMMAND) :]),
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.faults.torture.subprocess", forks)
        yield run_alone(tmp_path_factory.mktemp("alone"), 1)


def start(rows: Path, output: Path, *flags: str, stdin: int | None = None) -> Forked:
    words = command(rows, output, 1)[len(COMMAND) :]
    return Forked([*words, *flags], files=(stdin, None, None))


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
    alone: Reference,
    tmp_path: Path,
    number: signal.Signals,
    status: int,
    state: str,
) -> None:
    source = alone.source
    whole = alone.output
    output = tmp_path / "out.jsonl"
    journal = Path(f"{output}.journal")
    run = start(source, output, "--grace", "0")
    while run.poll() is None and not (
        journal.exists() and len(kept_records(output)) > 15
    ):
        time.sleep(0.02)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == status, said
    assert json.loads((tmp_path / "out.status.json").read_text())["status"] == state
    kept = kept_records(output)
    assert 15 < len(kept) < NUM_ROWS and not output.exists()
    if number != signal.SIGKILL:  # Ctrl-C did not say how many rows are kept
        assert f"Rows that are finished and kept: {len(kept)}." in said
    again = start(source, output)
    assert again.wait(60) == 3 and f"{len(kept)} kept from earlier runs" in again.said()
    assert texts(output) == texts(whole)
    errors = tmp_path / "out.errors.jsonl"
    finished = set(output.read_bytes().splitlines()) | set(
        errors.read_bytes().splitlines()
    )
    assert set(kept) <= finished, "byte for byte"
    assert errors.read_bytes() == whole.with_name("whole.errors.jsonl").read_bytes()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.errors.jsonl", "out.jsonl", "out.status.json"]


def test_runs_that_are_killed_at_random_moments_lose_nothing(
    alone: Reference, tmp_path: Path
) -> None:
    """`scripts/torture` does a hundred of these, in processes that are not forked."""
    print(one_round(7, alone, tmp_path, 2, Counter()))


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    rows = tmp_path / "long.jsonl"
    row = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    short = json.dumps(row | {"max_tokens": 1}) + "\n"  # once it is done, others run
    rows.write_text(short + (json.dumps(row) + "\n") * 500)
    flags = ["--grace", "1h", "--max-rows", "64", "--kernels", "off"]
    run = start(rows, output, *flags)
    while run.poll() is None and not kept_records(output):
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    time.sleep(1.2 * REPEAT_CTRL_C_S)  # sooner it would be taken for the same one
    assert run.poll() is None, "rows that run may go on"
    kept = kept_records(output)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    # It did not say how many rows are kept, nor that the same command goes on.
    assert (
        f"Interrupted. Rows that are finished and kept: {len(kept)}. The same command"
        in said
    )
    assert "have 3600 s to finish (--grace). What" in said, "they need less"
    assert run.returncode == 130
    assert kept_records(output) == kept, "those that ran did not go on"


def test_rows_that_run_may_end_within_the_grace(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    rows.write_text((json.dumps(row) + "\n") * 500)
    run = start(rows, output)
    while run.poll() is None and not kept_records(output):
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 143, said
    assert len(kept_records(output)) >= 8, "as many as ran together"


def test_a_deadline(tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    row = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    rows.write_text((json.dumps(row) + "\n") * 3000)
    started = time.monotonic()
    run = start(rows, tmp_path / "out.jsonl", "--deadline", "7", "--grace", "1")
    assert run.wait(90) == 75 and "Out of time (--deadline)" in run.said(), run.said()
    assert 1 <= time.monotonic() - started < 90


def test_a_run_that_waits_for_stdin_can_be_stopped(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    stdin, rows = os.pipe()
    run = start(Path("-"), output, stdin=stdin)
    os.close(stdin)
    os.write(rows, b'{"prompt": "x", "max_tokens": 2}\n')
    while run.poll() is None and not Path(f"{output}.journal").exists():
        time.sleep(0.05)
    time.sleep(1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(10) == 143
    os.close(rows)


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=4)
    yield engine
    engine.close()


ROW = '{"prompt":"x","max_tokens":2,"temperature":0,"user":"%d"}\n'


def stop_after(
    engine: fminfer.Engine, count: int, inputs: list[Path], outputs: list[Path]
) -> None:
    """Answer files up to so many records."""

    def stop_early(number: int) -> None:
        if number == count:
            raise StoppedError("enough")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        before_each_record(patch, stop_early)
        run_files(engine, inputs, outputs)


def test_an_input_that_changed_is_refused(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    text = "".join(ROW % n for n in range(9))
    source.write_text(text)
    stop_after(engine, 5, [source], [output])
    source.write_text(text + ROW % 99)
    with pytest.raises(
        UsageError, match=r"the input was \d+ bytes .*, is \d+ bytes .*--restart"
    ):
        run_files(engine, [source], [output])
    source.write_text(text)
    summary = run_files(engine, [source], [output])
    assert (summary.num_rows, summary.num_kept_rows) == (4, 5)
    files = open_files([source], [output], RunTerms("m", {}))
    again = run_job(
        None, files, JobSummary("m", "d", [source], [output]), is_quiet=True
    )
    assert (again.num_rows, again.num_kept_rows) == (
        0,
        9,
    ) and "9 kept" in again.to_text()
    with pytest.raises(UsageError, match="--seed was not given, is 5"):
        open_files([source], [output], RunTerms("m", {"--seed": "5"}))


def test_lines_of_stdin_are_compared_one_by_one(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is not known before it is read."""
    output = tmp_path / "out.jsonl"
    numbers = list(range(9))

    def feed(numbers: list[int]) -> None:
        data = "".join(ROW % n for n in numbers).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    feed(numbers)
    stop_after(engine, 5, [STDIN], [output])
    feed([77, *numbers[1:]])
    with pytest.raises(
        UsageError, match="line 1 of - is not the one that an earlier run"
    ):
        run_files(engine, [STDIN], [output])
    feed(numbers[:3])
    with pytest.raises(UsageError, match="has answered 5 lines of -, and now it has 3"):
        run_files(engine, [STDIN], [output])
    feed(numbers)
    summary = run_files(engine, [STDIN], [output])
    assert (summary.num_rows, summary.num_kept_rows) == (4, 5)
    users = [json.loads(line)["request"]["user"] for line in output.open()]
    assert users == [str(number) for number in numbers]


def test_a_journal_of_the_commit_before_is_taken_up(tmp_path: Path) -> None:
    """It was killed; its rows are kept byte for byte when packages, plan and kernels moved.

    The folder has its input and its journal.
    """
    earlier = Path(__file__).parent.parent / "data" / "earlier_run"
    for name in ("in.jsonl", "out.jsonl.journal"):
        (tmp_path / name).write_bytes((earlier / name).read_bytes())
    kept = [
        json.loads(line)
        for line in (earlier / "out.jsonl.journal").read_text().splitlines()
    ]
    words = ["run", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    run = Forked([*words, "--dtype", "float32", "--device", "cpu", "--budget", "4096"])
    assert run.wait(60) == 3 and "4 kept from earlier runs" in run.said()
    answers = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert len(answers) == 3
    (answer,) = [row["record"] for row in kept[1:] if row["kind"] == "answer"]
    assert answer in answers
    errors = (tmp_path / "out.errors.jsonl").read_text()
    assert all(
        json.dumps(row["record"]["error"]["message"]) in errors for row in kept[1:4]
    )


def test_equal_lines_draw_by_their_number_also_when_some_are_kept(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        '{"prompt":"room","max_tokens":12,"temperature":1.5,"ignore_eos":true}\n' * 20
    )
    run_files(engine, [source], [tmp_path / "whole.jsonl"])
    stop_after(engine, 7, [source], [tmp_path / "parts.jsonl"])
    run_files(engine, [source], [tmp_path / "parts.jsonl"])
    whole = texts(tmp_path / "whole.jsonl")
    assert len({str(text) for text in whole}) > 10
    assert texts(tmp_path / "parts.jsonl") == whole


def test_rows_that_were_damaged_are_told_and_answered_again(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    source.write_text("".join(ROW % n for n in range(9)))
    stop_after(engine, 5, [source], [output])
    journal = journal_path(output)
    head, first, *rest = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([head, first.replace(b'"text"', b'"test"'), *rest]))
    summary = run_files(engine, [source], [output])
    assert (summary.num_rows, summary.num_kept_rows, summary.num_damaged_rows) == (
        5,
        4,
        1,
    )
    assert "answered again: 1 row of earlier runs" in summary.to_text()
    assert len(output.read_bytes().splitlines()) == 9


def test_weights_that_changed_are_another_model(
    llama_checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """In the middle of one tensor, and at the end of another; the file's size is the same."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama_checkpoint[0] / name).read_bytes())
    file = tmp_path / "model.safetensors"
    tensors = load_file(llama_checkpoint[0] / file.name)
    config = EngineConfig(model=str(tmp_path))

    def digest() -> str:
        save_file(tensors, file, metadata={"format": "pt"})
        return plan_ahead(config, open_checkpoint(str(tmp_path))).fingerprint()[
            "the model"
        ]

    found = {digest()}
    for name in list(tensors)[::3]:
        flat = tensors[name].view(-1)
        flat[len(flat) // 2] += 1
        found.add(digest())
        flat[-1] += 1
        found.add(digest())
    assert len(found) == 1 + 2 * len(list(tensors)[::3])


def test_a_run_that_was_killed_while_it_finished_needs_no_model(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    source.write_text('{"prompt":"x","max_tokens":2,"temperature":0}\n' * 3)
    run_files(engine, [source], [output])
    output.rename(tmp_path / "answers")
    records = (tmp_path / "answers").read_bytes().splitlines()
    files = open_files([source], [tmp_path / "other.jsonl"], RunTerms("m", {}))
    fingerprint = files.files[0]._fingerprint  # type: ignore[union-attr]
    journal = Journal(output, fingerprint)
    for number, record in enumerate(records, 1):
        journal.append(Row(number, False, (1, 0, 2), 0, record))
    journal.close()
    (tmp_path / "out.jsonl.ordered").write_bytes(records[0][:9])
    files = open_files([source], [output], RunTerms("m", {}))
    assert files.is_finished
    assert output.read_bytes() == (tmp_path / "answers").read_bytes()
    assert not (tmp_path / "out.jsonl.ordered").exists()


def test_durations() -> None:
    shown = {
        "90": 90,
        "1.5m": 90,
        "2h": 7200,
        "3:50:00": 13800,
        "45:00": 2700,
        "1-00:00:10": 86410,
    }
    shown |= {"1h30m": 5400, "2d1s": 172801}
    for text, seconds in shown.items():
        assert parse_duration(text) == seconds
    for text in ("", "x", "-3", "1:75", "3:99:00", "1:2:3:4", "3h20", "5m1h"):
        with pytest.raises(ValueError, match="is no duration"):
            parse_duration(text)
    check_times(10, 16)
    for grace_s, deadline_s in ((-1, None), (10, 15)):
        with pytest.raises(UsageError, match="--"):
            check_times(grace_s, deadline_s)


@pytest.fixture
def own_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_open", [None, 3])
def test_a_signal_says_at_once_what_it_waits_for(
    number: int,
    num_open: int | None,
    is_quiet: bool,
    own_signals: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It was silent for up to 15 s, so that users pressed it again and lost the rows that ran.

    SIGTERM went on to be silent, and a server spoke of rows.
    """
    stopper = Stopper(7.0, is_quiet=is_quiet)
    told = []
    if num_open is not None:
        stopper.num_open = lambda: num_open
    with stopper.listening(), stopper.forwarding_stop(told.append):
        os.kill(os.getpid(), number)
    what = "open requests (3)" if num_open else "rows that run"
    said = f"Ending: {what} have 7 s to finish" in (err := capfd.readouterr().err)
    assert told == [7.0] and said != is_quiet
    assert (
        f"Ctrl-C{' again' * (number == signal.SIGINT)} ends at once." in err
    ) is said


@pytest.mark.parametrize("needed_s", [None, 0.2, 23.4])
def test_ctrl_c_says_how_long_rows_need_if_that_is_longer_than_the_grace(
    needed_s: float | None, own_signals: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run waited 10 s for rows that needed 23, and kept none. "May need 0 s" said nothing."""
    stopper = Stopper(7.0, is_quiet=False)
    with (
        stopper.listening(),
        stopper.forwarding_stop(lambda grace_s: None, lambda: needed_s),
    ):
        os.kill(os.getpid(), signal.SIGINT)
    needs = "; all of them may need 23 s" if needed_s == 23.4 else ""
    assert f"7 s to finish (--grace){needs}. What is finished" in capfd.readouterr().err


def test_a_signal_that_comes_twice_is_one_but_ctrl_c_is_soon_another() -> None:
    """A second Ctrl-C within a second did nothing, and nothing was said."""
    assert is_repeated_signal(signal.SIGINT, 0.1) and not is_repeated_signal(
        signal.SIGINT, 0.5
    )
    assert is_repeated_signal(signal.SIGTERM, 0.5) and not is_repeated_signal(
        signal.SIGTERM, 1.5
    )
    assert is_repeated_signal(signal.SIGUSR2, 100.0), "schedulers repeat their warnings"


@pytest.mark.parametrize(
    ("number", "word", "status"),
    [
        (signal.SIGTERM, "Terminated", 143),
        (signal.SIGHUP, "Hung up", 129),
        (signal.SIGUSR1, r"Out of time \(SIGUSR1\)", 75),
    ],
)
def test_a_signal_while_the_model_loads_ends_it(
    number: signal.Signals, word: str, status: int, own_signals: None
) -> None:
    stopper = Stopper(5.0)
    with pytest.raises(StoppedError, match=word) as stopped, stopper.listening():
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert exit_status_of(stopped.value) == status
    assert signal.getsignal(number) == signal.SIG_IGN, "the process ends"
    assert signal.SIGHUP not in list_stop_signals(), "as under nohup"

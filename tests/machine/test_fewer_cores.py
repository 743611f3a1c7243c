"""A run is right and ends when cores are taken from it, when it is stopped, and in half a core.

Right means equal, to the last bit, to a run that was left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fminfer.machine.control_groups import find_group_folders
from tests.conftest import more
from tests.faults.torture import children_of

NUM_ROWS = 48
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
# Answers rows twice; the second time all cores but one are taken between two steps, and
# later given back.
CUT = """
import json, os, sys, time
import torch
import fminfer
from fminfer.machine import threads

cores = os.sched_getaffinity(0)

def move(to):  # as `taskset -a -p` does
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), to)
    time.sleep(1.2 * threads.CHECK_INTERVAL_S)

def answer(rows, moves):
    engine = fminfer.Engine(max_rows=8)
    run, numbers = engine.pipeline.stages._run, []

    def step(step):
        if len(numbers) in moves:
            move(moves[len(numbers)])
        result = run(step)
        numbers.append(torch.get_num_threads())
        return result

    engine.pipeline.stages._run = step
    records = sorted(engine.run(rows), key=lambda record: record.line.number)
    engine.close()
    return numbers, [record.to_dict()["result"]["choices"] for record in records]

rows = json.load(sys.stdin)
print(json.dumps([answer(rows, {}), answer(rows, {20: {min(cores)}, 60: cores})]))
"""


def make_rows() -> list[dict[str, Any]]:
    """Return rows of several kinds, which share steps."""
    return [
        {
            "prompt": f"room {i % 5} " * (1 + i % 7),
            "max_tokens": 8 + i % 60,
            "logprobs": 2,
        }
        | {
            "ignore_eos": True,
            "temperature": 0.9 if i % 2 else 0,
            "seed": i,
            "echo": i % 3 == 0,
        }
        for i in range(NUM_ROWS)
    ]


def environ() -> dict[str, str]:
    """Return the variables of a run that chooses its number of threads."""
    return {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    return path


def command(rows: Path, output: Path, *flags: str) -> list[str]:
    start = [sys.executable, "-m", "fminfer", "run", str(rows), "--output", str(output)]
    return [*start, "--max-rows", "8", *flags]


def choices(output: Path) -> list[Any]:
    return [
        json.loads(line)["result"]["choices"]
        for line in output.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def alone(rows: Path) -> list[Any]:
    """Return the answers of a run that was left alone."""
    output = rows.with_name("alone.jsonl")
    subprocess.run(command(rows, output, "-q"), env=environ(), check=True, timeout=120)
    found = choices(output)
    assert len(found) == NUM_ROWS
    return found


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
def test_cores_are_taken_in_the_middle_and_given_back() -> None:
    """Threads went on as before: those of one core waited for each other."""
    done = subprocess.run(
        [sys.executable, "-c", CUT],
        input=json.dumps(make_rows()),
        env=environ(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (numbers, answers), (cut_numbers, cut_answers) = json.loads(
        done.stdout.splitlines()[-1]
    )
    most = numbers[0]
    assert set(numbers) == {most} and most > 1 and len(numbers) > 80
    assert cut_numbers == [most] * 20 + [1] * 40 + [most] * (len(numbers) - 60)
    assert cut_answers == answers


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=more), 2])
def test_a_run_that_is_stopped_and_continued(
    num_ranks: int, rows: Path, alone: list[Any], tmp_path: Path
) -> None:
    """All its processes stop, as a job that Slurm suspends, longer than a rank may be silent."""
    output = tmp_path / "out.jsonl"
    flags = ["--rank-timeout", "1", "--world-size", "2"] if num_ranks == 2 else []
    run = subprocess.Popen([*command(rows, output, *flags), "-q"], env=environ())
    try:
        wait_for_a_row(run, Path(f"{output}.journal"))
        ranks = children_of(run.pid)
        assert len(ranks) == num_ranks - 1
        for pid in (run.pid, *ranks):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5 if num_ranks == 2 else 0.5)
        assert run.poll() is None and not output.exists(), "stopped in the middle"
        for pid in (run.pid, *ranks):
            os.kill(pid, signal.SIGCONT)
        assert run.wait(timeout=120) == 0
    finally:
        run.kill()  # its ranks end with it
        run.wait()
    assert choices(output) == alone


def wait_for_a_row(run: subprocess.Popen[bytes], journal: Path) -> None:
    """Wait until a run has journaled its first answer."""
    end = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """Yield a control group of half a core; skip where none can be made."""
    reason = "this process sees no control group for cores"
    for folder, version in find_group_folders("cpu"):
        group = folder / f"fminfer-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reason = f"no control group can be made: {error}"
            continue
        try:
            limit_to_half(group, version)
            yield group
            return
        except OSError as error:
            reason = f"a control group cannot be limited: {error}"
        finally:
            remove(group)
    pytest.skip(reason)


def limit_to_half(group: Path, version: int) -> None:
    if version == 2:
        # there only if its parent hands cores on
        with (group / "cpu.max").open("r+") as file:
            file.write("50000 100000")
    else:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("50000")


def remove(group: Path) -> None:
    """Remove a group once the system has taken note that its processes have ended."""
    end = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_a_run_in_half_a_core(
    half_a_core: Path, rows: Path, alone: list[Any], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    join = f'echo $$ > {half_a_core}/cgroup.procs && exec "$@"'
    words = ["sh", "-c", join, "sh", *command(rows, output, "-q")]
    subprocess.run(words, env=environ(), check=True, timeout=240)
    stat = dict(
        line.split() for line in (half_a_core / "cpu.stat").read_text().splitlines()
    )
    assert int(stat["nr_throttled"]) > 0
    assert choices(output) == alone

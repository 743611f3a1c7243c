"""A rank that dies, throws or falls silent ends the whole run within seconds, and is named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IS_ALL
from tests.forked import Forked, run_forked

FAULTS = Path(__file__).parent.parent / "faults"
QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries"
RANK_TIMEOUT_S = 3
KINDS = ("raise", "kill", "stop")
PHASES = ("load", "prefill", "decode")


def faults(num_ranks: int) -> list[str]:
    ranks = range(num_ranks)
    return [
        f"{kind} {rank} {phase}" for kind in KINDS for rank in ranks for phase in PHASES
    ]


TWO = faults(2)
FOUR = faults(4)
# Of two ranks a third of the faults, every kind and phase with either rank; of two stages of two
# ranks each kind and phase once, and the last rank killed. scripts/test --all runs all.
SOME = [(fault, 1) for fault in TWO[0::7] + TWO[3::7]]
SOME += [(fault, 2) for fault in [*FOUR[2::14], "kill 3 decode"]]
ALL = [*((fault, 1) for fault in TWO), *((fault, 2) for fault in FOUR)]


def command(folder: Path, num_shards: int) -> list[str]:
    start = ["run", str(QUERIES / "plain.jsonl"), "--output", str(folder / "out.jsonl")]
    ranks = ["--pipeline-group-size", "2", "--tensor-parallel-size", str(num_shards)]
    return [*start, *ranks, "--dtype", "float32", "--rank-timeout", str(RANK_TIMEOUT_S)]


def texts_of(folder: Path) -> list[list[str]]:
    lines = (folder / "out.jsonl").read_text().splitlines()
    return [
        [choice["text"] for choice in json.loads(line)["result"]["choices"]]
        for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What a run of one process answers."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ["--output", str(folder / "out.jsonl"), "--dtype", "float32"]
    done = run_forked(["run", QUERIES / "plain.jsonl", *flags])
    assert done.returncode == 0, done.stderr
    return texts_of(folder)


def ranks_of(folder: Path) -> list[int]:
    """List the processes that run in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def no_process_is_left(folder: Path) -> bool:
    deadline = time.monotonic() + 20
    while ranks_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not ranks_of(folder)


@pytest.mark.parametrize(("fault", "num_shards"), ALL if IS_ALL else SOME)
def test_a_rank_that_fails_ends_all(
    fault: str, num_shards: int, whole: list[list[str]], tmp_path: Path
) -> None:
    """And the same command, without the fault, then answers the rest as a run alone does."""
    kind, rank, phase = fault.split()
    rows = tmp_path / "out.jsonl.journal"
    moment = tmp_path / "moment"
    environ = os.environ | {
        "FAULT": fault,
        "FAULT_ROWS": str(rows),
        "FAULT_TIME": str(moment),
    }
    environ["PYTHONPATH"] = f"{FAULTS}:{os.environ.get('PYTHONPATH', '')}"
    process = Forked(command(tmp_path, num_shards), environ, tmp_path)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    took_s = time.time() - float(moment.read_text())
    # Nobody is left to give a run another status whose own process is killed, by us or
    # by rank 1.
    is_first_gone = rank == "0" and kind in ("kill", "stop")
    assert process.returncode == (-signal.SIGKILL if is_first_gone else 1), err
    assert out == ""
    assert "How do you go" not in err, "prompts are not for logs"
    assert no_process_is_left(tmp_path), "a rank outlives the run"
    err = process.said()  # what rank 1 says when rank 0 is gone
    assert re.search(rf"\brank {rank}\b", err), err
    if kind == "raise":
        assert (
            "RuntimeError: a fault that the test wants" in err and "in _fail" in err
        ), err
        others = {*range(2 * num_shards)} - {int(rank)}
        assert not any(f"rank {other} failed" in err for other in others), err
    if kind == "kill" and rank != "0":
        assert "SIGKILL" in err, err
    if phase == "decode":
        kept = [json.loads(line) for line in rows.read_text().splitlines()]
        assert len(kept) > 1, "finished rows stay"
    assert took_s < 10 + RANK_TIMEOUT_S * (kind == "stop")
    done = run_forked(command(tmp_path, num_shards), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    if phase == "decode":
        assert f"{len(kept) - 1} kept from earlier runs" in done.stderr, done.stderr
    assert texts_of(tmp_path) == whole
    print(f"{fault}: {took_s:.1f} s")


@pytest.mark.parametrize(
    ("fault", "flags"),
    [
        pytest.param("hang 1 decode", ["--pipeline-group-size", 2], id="stage"),
        pytest.param("hang 1 decode", ["--tensor-parallel-size", 2], id="shard"),
        pytest.param("hang 0 decode", [], id="alone"),
    ],
)
def test_a_step_that_hangs_ends_the_run(
    fault: str, flags: list[object], tmp_path: Path
) -> None:
    """A GPU that hangs was never noticed: its rank's beat has a thread of its own."""
    done, took_s = run_with(fault, flags, tmp_path)
    assert done.returncode == 1, done.stderr
    assert (
        "so a step hangs: a device, its driver or a disk does not answer" in done.stderr
    )
    assert "Rows that are finished and kept: " in done.stderr
    assert took_s < 20 and no_process_is_left(tmp_path)


def test_others_answer_what_a_pipeline_that_hangs_has(tmp_path: Path) -> None:
    done, _ = run_with("hang 1 decode", ["--data-group-size", 2], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Pipeline 1 failed: no result came for" in done.stderr
    assert "the others go on" in done.stderr and no_process_is_left(tmp_path)


def run_with(fault: str, flags: list[object], folder: Path) -> tuple[Any, float]:
    """Run the queries with a fault; return what became of it, and its seconds after the
    fault."""
    moment = folder / "moment"
    output = folder / "out.jsonl"
    environ = os.environ | {"FAULT": fault, "FAULT_ROWS": f"{output}.journal"}
    environ |= {"FAULT_TIME": str(moment)}
    environ["PYTHONPATH"] = f"{FAULTS}:{os.environ.get('PYTHONPATH', '')}"
    words = [
        "run",
        QUERIES / "plain.jsonl",
        "--output",
        output,
        "--dtype",
        "float32",
        *flags,
    ]
    done = run_forked(words, environ=environ, folder=folder)
    return done, time.time() - float(moment.read_text())

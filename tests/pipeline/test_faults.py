"""A rank that dies, throws or falls silent ends the whole run within seconds, and is named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import IS_ALL
from tests.forked import Forked

FAULTS = Path(__file__).parent.parent / "faults"
QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries"
RANK_TIMEOUT_S = 3
KINDS, PHASES = ("raise", "kill", "stop"), ("load", "prefill", "decode")
ALL = [f"{kind} {rank} {phase}" for kind in KINDS for rank in (0, 1) for phase in PHASES]
# A third of them, every kind and phase with either rank; scripts/test --all runs all.
SOME = ALL[0::7] + ALL[3::7]


def command(folder: Path) -> list[str]:
    start = ["run", str(QUERIES / "plain.jsonl"), "--output", str(folder / "out.jsonl")]
    return [*start, "--world-size", "2", "--restart", "--rank-timeout", str(RANK_TIMEOUT_S)]


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


@pytest.mark.parametrize("fault", ALL if IS_ALL else SOME)
def test_a_rank_that_fails_ends_all(fault: str, tmp_path: Path) -> None:
    kind, rank, phase = fault.split()
    rows, moment = tmp_path / "out.jsonl.journal", tmp_path / "moment"
    environ = os.environ | {"FAULT": fault, "FAULT_ROWS": str(rows), "FAULT_TIME": str(moment)}
    environ["PYTHONPATH"] = f"{FAULTS}:{os.environ.get('PYTHONPATH', '')}"
    process = Forked(command(tmp_path), environ, tmp_path)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    took_s = time.time() - float(moment.read_text())
    # Nobody is left to give a run another status whose own process is killed, by us or by rank 1.
    is_first_gone = rank == "0" and kind in ("kill", "stop")
    assert process.returncode == (-signal.SIGKILL if is_first_gone else 1), err
    assert out == ""
    assert "How do you go" not in err, "prompts are not for logs"
    assert no_process_is_left(tmp_path), "a rank outlives the run"
    err = process.said()  # what rank 1 says when rank 0 is gone
    assert re.search(rf"\brank {rank}\b", err), err
    if kind == "raise":
        assert "RuntimeError: a fault that the test wants" in err and "in _fail" in err, err
        assert "rank " + str(1 - int(rank)) + " failed" not in err, err
    if kind == "kill" and rank == "1":
        assert "SIGKILL" in err, err
    if phase == "decode":
        kept = [json.loads(line) for line in rows.read_text().splitlines()]
        assert len(kept) > 1, "finished rows stay"
    assert took_s < 10 + RANK_TIMEOUT_S * (kind == "stop")
    print(f"{fault}: {took_s:.1f} s")

"""Phase 8: whole runs from a file beside transformers' own, by `benchmarks/peers.py`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, expect
from benchmarks.gpu.processes import run_within

PEERS = Path(__file__).parent.parent / "peers.py"
LEAST_S = {"cuda": 60.0, "cpu": 10.0}  # below which a comparison is not begun


@dataclass(slots=True, frozen=True)
class Comparison:
    """One model and workload, by the names of peers.py, and which side stands beside ours."""

    model: str
    workload: str
    beside: str
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.model} {self.workload} beside {self.beside}"


COMPARISONS = {
    "cuda": (
        Comparison("llama-8b", "256x512+64", "generate_batch"),
        Comparison("bloom-7b1", "batch-64", "transformers"),
    ),
    "cpu": (Comparison("llama-tiny", "3x8+4", "transformers", "float32"),),
}


def cases(setting: Setting) -> Iterator[Case]:
    end_s = time.monotonic() + setting.seconds
    for comparison in COMPARISONS[setting.device]:
        yield Case(str(comparison), partial(compare, setting, comparison, end_s))


def compare(setting: Setting, comparison: Comparison, end_s: float) -> Figures:
    """Run both sides, in what is left of the phase's time."""
    left_s = end_s - time.monotonic() - 5
    if left_s < LEAST_S[setting.device]:
        raise Skipped(f"{left_s:.0f} s were left")
    command = [sys.executable, str(PEERS), "--model", comparison.model]
    command += ["--workload", comparison.workload, "--dtype", comparison.dtype]
    command += ["--device", setting.device, "--folder", str(setting.scratch / "peers")]
    command += ["--side", "fminfer", "--side", comparison.beside]
    found = run_within(command, left_s)
    if found.status is None:
        raise Skipped(f"not done after {left_s:.0f} s: {found.err[-300:]}")
    expect(found.status == 0, found.err[-1500:])
    told = json.loads(found.out.splitlines()[-1])
    sides = told["workloads"][comparison.workload]
    missing = {"fminfer", comparison.beside} - {*sides}
    expect(not missing, f"no answer of {', '.join(missing)}: {found.err[-800:]}")
    ours = sides["fminfer"]
    theirs = sides[comparison.beside]
    return {
        "ratio": theirs["run_s"] / ours["run_s"],
        "our run s": ours["run_s"],
        "their run s": theirs["run_s"],
        "limit s": told["limit_s"][comparison.workload],
        "our job s": ours["job_s"],
        "their job s": theirs["job_s"],
    }

"""scripts/try_gpu: nothing that a phase finds is lost, and its quick phases pass without a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import check_attention, check_draws, results, time_kernels
from benchmarks.gpu.cases import Setting
from benchmarks.gpu.phases import PHASES, Phase
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.summary import has_passed, latest, to_text
from benchmarks.gpu.worker import run_case

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTY = Phase(9, "tests.faults.gpu_phase", 1, 4, 1, "all that can happen")


def test_whatever_happens_in_a_phase_is_written_down(tmp_path: Path) -> None:
    """A process that dies, hangs or breaks the GPU's context costs the case that it is at."""
    path = tmp_path / "results.jsonl"
    setting = Setting("cuda", path, None, tmp_path, 60.0)
    started = time.monotonic()
    Runner(setting, tmp_path / "log.txt", started + 60).run(FAULTY)
    assert time.monotonic() - started < 30
    lines = results.read(path)
    assert {name: line["state"] for name, line in latest(lines, FAULTY).items()} == {
        "right": "passed",
        "wrong": "wrong",
        "fails": "failed",
        "breaks the GPU": "failed",
        "dies": "crashed",
        "skipped": "skipped",
        "hangs": "out of time",
        "never begins": "not reached",
    }
    assert "gpu_phase.py" in (tmp_path / "log.txt").read_text(), "where it hung"
    again = {line["case"] for line in lines if line.get("again") and "case" in line}
    assert again == {"wrong", "fails", "breaks the GPU", "dies"}
    text = to_text(lines, [FAULTY])
    assert "GB/s 12.5" in text and "illegal memory access" in text
    assert "CUDA_LAUNCH_BLOCKING" in text
    assert not has_passed(lines, [FAULTY])


def test_a_phase_for_which_no_time_is_left_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    setting = Setting("cpu", path, None, tmp_path, 60.0)
    Runner(setting, tmp_path / "log.txt", time.monotonic()).run(FAULTY)
    assert "1 not reached" in to_text(results.read(path), [FAULTY])
    assert not has_passed(results.read(path), [FAULTY])


def test_half_a_line_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    roof = {"phase": 0, "case": "roof copy", "state": "passed", "figures": {"roof": 3e12}}
    results.append(path, roof)
    with path.open("a") as file:
        file.write('{"phase": 1, "ca')
    assert results.read(path) == [roof]
    assert results.find_roof(path, "copy") == 3e12
    assert results.find_roof(path, "bfloat16") is None


def test_a_phase_without_results_has_not_passed() -> None:
    assert not has_passed([], PHASES[:1])
    done = {"phase": 0, "case": "imports", "state": "passed", "figures": {}, "text": ""}
    assert has_passed([done], PHASES[:1])
    assert not has_passed([done, done | {"state": "not reached", "case": "roof"}], PHASES[:1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off in this process")
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (check_attention, {"4/2x16 float16 blocks of 8", "the highest blocks"}),
        (check_draws, set()),
        (time_kernels, {"decode 2 x 20", "product of 8 rows"}),
    ],
)
def test_cases_pass_without_a_gpu(
    module: Any, names: set[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The day that a GPU is there, no time is left to mend the phases themselves."""
    if module is not check_draws:  # the others have kernels
        request.getfixturevalue("interpreter")
    setting = Setting("cpu", tmp_path / "results.jsonl", None, tmp_path, 60.0)
    cases = [case for case in module.cases(setting) if not names or case.name in names]
    assert len(cases) >= max(1, len(names))
    for case in cases:
        found = run_case(case)
        assert found["state"] == "passed", (case.name, found)


def test_a_quick_phase_passes_without_a_gpu(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.gpu.command", "--cpu", "--out", str(tmp_path), "--phase", "2"]
    found = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "7 passed" in found.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "summary.txt", "log.txt"}


def test_the_phases_are_shown() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.command", "--list"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and len(found.stdout.splitlines()) == len(PHASES)

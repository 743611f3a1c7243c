"""scripts/try_gpu: nothing that a phase finds is lost, and its quick phases pass
without a GPU."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fminfer
from benchmarks.gpu import (
    check_attention,
    check_draws,
    family_answers,
    machine,
    results,
    time_kernels,
    time_model,
)
from benchmarks.gpu.cases import Setting
from benchmarks.gpu.phases import PHASES, Phase, turns_of, visit_turns
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.summary import has_passed, latest, to_text
from benchmarks.gpu.worker import run_case
from fminfer.forward.transformer import Transformer

ROOT = Path(__file__).resolve().parent.parent.parent
LACKING = (
    "openai",
    "litellm",
    "instructor",
    "schemathesis",
    "lm_eval",
    "ray",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "multipart",
    "swagger_ui_bundle",
    "jsonschema",
    "backports",
    "mypy",
)
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


def test_the_next_phase_imports_beside_this_one(tmp_path: Path) -> None:
    """On a GPU every second counts: processes that have imported get the job, others end."""
    path = tmp_path / "results.jsonl"
    setting = Setting("cuda", path, None, tmp_path, 60.0)
    first, second = (
        Phase(number, "tests.faults.gpu_quick_phase", 1, 30, 2, "") for number in (8, 9)
    )
    runner = Runner(setting, tmp_path / "log.txt", time.monotonic() + 60)
    runner.run(first, after=second)
    waiting = [*runner._waiting[second.module]]
    runner.run(second, after=first)
    unused = [*runner._waiting[first.module]]
    runner.close()
    found = latest(results.read(path), second)
    assert {line["figures"]["process"] for line in found.values()} == {
        p.pid for p in waiting
    }
    assert [process.returncode for process in waiting] == [0, 0]
    assert [process.returncode for process in unused] == [-signal.SIGKILL] * 2


def test_a_phase_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    setting = Setting("cuda", path, None, tmp_path, 60.0)
    phase = Phase(9, "tests.faults.no_such_phase", 1, 30, 1, "")
    Runner(setting, tmp_path / "log.txt", time.monotonic() + 60).run(phase)
    (line,) = latest(results.read(path), phase).values()
    assert line["state"] == "failed" and "no_such_phase" in line["text"]


def test_phases_run_in_the_order_given() -> None:
    assert [turn.phase.number for turn in turns_of((6, 0, 6))] == [6, 0]
    assert [turn.phase for turn in turns_of(())] == [*PHASES]


def test_a_visit_has_all_phases_but_the_last_within_its_seconds() -> None:
    turns = visit_turns(235)
    assert [turn.phase.number for turn in turns] == [0, 6, 5, 1, 4, 3, 7, 2]
    ends = [65, 65, 85, 125, 137.5, 192.5, 215, 235]
    assert [turn.end_s for turn in turns] == pytest.approx(ends)


def test_a_summary_fits_in_what_is_shown_of_an_output() -> None:
    """What went wrong comes before figures, once for all cases, and what is left out is told."""
    base = {"phase": 9, "state": "passed", "text": "", "figures": {"us": 1.5}}
    lines = [base | {"case": f"case {number} {'x' * 90}"} for number in range(300)]
    trouble = "Traceback\n" + "\n".join(f"line {number} " * 9 for number in range(50))
    for number in range(60):
        text = f"{trouble}\nwrong {number // 2}"  # each twice
        lines.append(base | {"case": f"bad {number}", "state": "failed", "text": text})
    text = to_text(lines, [FAULTY])
    assert len(text) <= 8000
    assert "9 bad 0: failed; 9 bad 1: failed" in text and text.count("wrong 0") == 1
    wrong, figures = text.split("What went wrong:")[1].split("Figures:")
    assert "more, in results.jsonl" in wrong and "more, in results.jsonl" in figures


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("first" + 5000 * "x" + "last")
    results.cut_middle(path, 1000)
    text = path.read_text()
    assert len(text) <= 1000 and text.startswith("first") and text.endswith("last")
    results.cut_middle(path, 1000)
    assert path.read_text() == text


def test_prepared_answers_are_those_of_rounded_weights(tmp_path: Path) -> None:
    """A checkpoint has half the size, and transformers gives the same answers with it."""
    answers = family_answers.prepare("llama", tmp_path).answers
    folder = tmp_path / "llama"
    weights = load_file(folder / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.bfloat16}
    where = torch.float32, torch.device("cpu")
    found = family_answers.score_with_transformers(folder, answers[:4], *where)
    for ours, answer in zip(found, answers, strict=False):
        assert ours == pytest.approx(answer.logprobs, abs=1e-5)


def test_an_engine_of_the_phase_leaves_nothing_behind() -> None:
    """The next model would have no room beside its weights."""
    gc.collect()
    before = _count_networks()  # of tests of other files in this process
    held = time_model.Held()
    held.take("engine", lambda: fminfer.Engine(budget=64))
    assert _count_networks() == before + 1
    held.take("other", lambda: "something")
    assert _count_networks() == before


def _count_networks() -> int:
    return sum(type(each) is Transformer for each in gc.get_objects())


def test_phases_import_nothing_that_a_machine_with_torch_may_lack() -> None:
    """The extras of tests and servers, and the tools of development, are not there."""
    text = f"""
import importlib, sys
sys.modules |= dict.fromkeys({LACKING!r})
for name in {[phase.module for phase in PHASES] + list(machine.OWN)!r}:
    importlib.import_module(name)
"""
    found = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_a_phase_for_which_no_time_is_left_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    setting = Setting("cpu", path, None, tmp_path, 60.0)
    Runner(setting, tmp_path / "log.txt", time.monotonic()).run(FAULTY)
    assert "1 not reached" in to_text(results.read(path), [FAULTY])
    assert not has_passed(results.read(path), [FAULTY])


def test_half_a_line_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    roof = {
        "phase": 0,
        "case": "roof copy",
        "state": "passed",
        "figures": {"roof": 3e12},
    }
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
    assert not has_passed(
        [done, done | {"state": "not reached", "case": "roof"}], PHASES[:1]
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off in this process"
)
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
    command = [
        "-m",
        "benchmarks.gpu.command",
        "--cpu",
        "--out",
        str(tmp_path),
        "--phase",
        "2",
    ]
    found = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "7 passed" in found.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.jsonl",
        "summary.txt",
        "log.txt",
    }


def test_the_phases_are_shown() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.command", "--list"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and len(found.stdout.splitlines()) == len(PHASES)

"""Progress, as a run tells it: rows go through the engine's own loop, on a simulated clock."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fminfer.batch.progress import ProgressBar
from fminfer.batch.time_left import TimeLeft
from fminfer.contract.line import Line
from fminfer.core.config import EngineConfig, StepSizes
from fminfer.core.messages import Step, StepResult, StepTrace
from fminfer.engine.answer import AnswerForm
from fminfer.engine.facts import Facts
from fminfer.engine.intake import Intake, Limits
from fminfer.engine.packing import PlannedStep, pack
from fminfer.engine.start import Starter
from fminfer.engine.stats import EngineStats
from fminfer.estimate.cost_model import CostModel, StepWork
from fminfer.estimate.simulation import PretendPipeline
from fminfer.text.tokenizer import Tokenizer
from fminfer.worker.assembly import build_loop
from fminfer.worker.line_run.runner import WINDOW
from tests.forked import Forked
from tests.line_bench import over_lines

END_ID = 7
# About a llama of 12 × 768 on two cores, in bfloat16 and in float32; and a GPU, which takes about
# the same for a step of few rows as for one of many.
MACHINES = {
    "bfloat16": (20e-3, 0.35e-3, 0.55e-3, 0, 0, 0.2e-3, 0.2e-3, 0.25e-3, 2e-6, 1e-3, 0.2e-3, 0),
    "float32": (45e-3, 1.2e-3, 1.5e-3, 0, 0, 0.6e-3, 0.6e-3, 0.9e-3, 5e-6, 1e-3, 0.3e-3, 0),
    "gpu": (20e-3, 0.01e-3, 0.03e-3, 0, 0, 0.02e-3, 0.02e-3, 0.02e-3, 1e-8, 0, 0.01e-3, 0),
}
WEIGHT_BYTES, KEY_BYTES = 110_000_000 * 4, 12 * 2 * 768 * 4  # of such a llama in float32


class Clock:
    """Stands in the place of the `time` that the bar asks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class DrawingPipeline(PretendPipeline):
    """Draws the end token with a probability, from a position on."""

    def __init__(self, stop_rate: float, stops_from: int) -> None:
        super().__init__(32)
        self._rng, self._stop_rate, self._stops_from = random.Random(5), stop_rate, stops_from

    def collect(self) -> StepResult:
        step, result = self._steps[0], super().collect()
        at = [row.position + place for row in step.rows for place in range(len(row.token_ids))]
        for place, index in enumerate(step.sampling.token_index):
            if at[index] >= self._stops_from and self._rng.random() < self._stop_rate:
                result.sampled.ids[place] = END_ID
        return result


def rows_of(workload: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield those of benchmarks/against_transformers.py, or ones whose lengths grow."""
    rng = random.Random(3)

    def ids(number: int) -> list[int]:
        return [rng.randrange(8, 250) for _ in range(number)]

    heads = [ids(600), ids(600)]
    for number in range(count):
        if workload == "generate":
            yield {"prompt": ids(rng.randint(16, 191)), "max_tokens": rng.randint(16, 128)}
        elif workload == "score":
            how = {"max_tokens": 0, "echo": True, "logprobs": 1}
            yield {"prompt": ids(rng.randint(64, 511)), **how}
        elif workload == "prefixes":
            yield {"prompt": heads[number % 2] + ids(rng.randint(40, 99)), "max_tokens": 8}
        elif workload == "short":
            yield {"prompt": ids(30), "max_tokens": rng.randint(16, 32)}
        elif workload == "few long":
            yield {"prompt": ids(40), "max_tokens": 600 if number in (3, 8) else 60}
        elif workload == "uneven":
            yield {"prompt": ids(30), "max_tokens": int(8 * 2 ** rng.uniform(0, 6))}
        elif workload == "chats":
            yield {"prompt": ids(rng.randint(35, 45)), "max_tokens": 800}
        elif workload == "short, then long":
            is_long = number >= count // 2
            length, max_tokens = (80, 60) if is_long else (20, 8)
            yield {"prompt": ids(length), "max_tokens": max_tokens}
        else:  # candidates
            yield {"prompt": ids(40), "max_tokens": 60, "n": 1 + number % 4, "temperature": 1}


def run(
    monkeypatch: pytest.MonkeyPatch, rows: Iterator[dict[str, Any]], total: int, **how: Any
) -> list[tuple[float, float | None]]:
    """Answer rows; return, for each step, the seconds since the start and those said to be left."""
    clock = Clock()
    monkeypatch.setattr("fminfer.batch.progress.time", clock)
    costs = CostModel(MACHINES[how.get("machine", "float32")], 0.0)

    def asked_while_packing(*args: Any) -> PlannedStep:
        """Rows were in no list for a moment, and a signal then found none."""
        while_packing.append(sum(loop.running_rows.num_left))
        return pack(*args)

    while_packing: list[int] = []
    monkeypatch.setattr("fminfer.engine.scheduler.pack", asked_while_packing)
    tokenizer = Tokenizer(None)
    limits = Limits(2048, 256, 100, eos_ids=frozenset({END_ID}))
    loop = build_loop(
        EngineConfig(),
        Starter(tokenizer, limits.eos_ids, seed=1),
        DrawingPipeline(how.get("stop_rate", 0.0), how.get("stops_from", 0)),
        AnswerForm(tokenizer, "auto"),
        sizes=EngineConfig(max_rows=how.get("max_rows")).step_sizes("cpu", 1),
        num_blocks=how.get("num_blocks", 4096),
        num_stages=1,
    )
    device = "cuda:0" if how.get("machine") == "gpu" else "cpu"
    sizes = (256, 4096, WEIGHT_BYTES, KEY_BYTES)
    facts = Facts(device, "float32", "float32", 2, True, *sizes, True, "", "")
    bar = ProgressBar(total, TimeLeft.of(facts, 1), is_quiet=True)
    told: list[tuple[float, float | None]] = []

    def on_step(trace: StepTrace) -> None:
        step: Step = trace.step
        clock.now_s += costs.predict_s(StepWork.of(step).counts)
        bar.add_work(loop.stats, trace.num_prompt_tokens, len(step.sampling.token_index))
        told.append((clock.now_s, bar.left_s(loop)))

    loop.on_step = on_step
    base = {"temperature": 0, "user": ""}
    lines = (Line(0, i, json.dumps(base | row).encode()) for i, row in enumerate(rows, 1))
    for record in over_lines(loop, Intake(tokenizer, limits), read_ahead=WINDOW).run(lines):
        assert record.error is None
    return told


def errors_at(told: list[tuple[float, float | None]], shares: list[float]) -> list[float]:
    """Return how far off the total was that was told at some shares of the run."""
    end_s = told[-1][0]
    errors = []
    for share in shares:
        now_s, left_s = next(each for each in told if each[0] >= share * end_s)
        assert left_s is not None, f"nothing was told at {share:.0%}"
        errors.append((now_s + left_s) / end_s - 1)
    return errors


@pytest.mark.parametrize("machine", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("workload", "count", "stop_rate"),
    [
        *(("generate", 64, 0.0), ("generate", 600, 0.0), ("score", 96, 0.0)),
        *(("prefixes", 128, 0.0), ("candidates", 200, 0.0)),
        *(("generate", 600, 0.02), ("generate", 600, 0.1)),
    ],
)
def test_the_time_left_is_right_after_a_twentieth(
    monkeypatch: pytest.MonkeyPatch, workload: str, count: int, stop_rate: float, machine: str
) -> None:
    """Told from finished rows it was unknown until the first had ended, maybe half-way."""
    how = {"machine": machine, "stop_rate": stop_rate}
    told = run(monkeypatch, rows_of(workload, count), count, **how)
    errors = errors_at(told, [0.05, 0.1, 0.25, 0.5, 0.75, 0.9])
    assert max(map(abs, errors)) < 0.2, errors


def test_where_a_step_takes_the_same_for_few_rows_only_long_files_are_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: how few rows run at the end is not foreseen, so a short file takes longer."""
    long = errors_at(run(monkeypatch, rows_of("generate", 600), 600, machine="gpu"), [0.25, 0.5])
    short = errors_at(run(monkeypatch, rows_of("generate", 64), 64, machine="gpu"), [0.25, 0.5])
    assert max(map(abs, long)) < 0.1 and -0.4 < min(short) < max(short) < -0.2


def test_scarce_memory_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room the prefix cache does less than the best possible one, as a run soon sees."""
    rows = list(rows_of("prefixes", 128))
    told = run(monkeypatch, iter(rows), 128, num_blocks=26)
    assert max(map(abs, errors_at(told, [0.25, 0.5, 0.9]))) < 0.25


def test_nothing_is_said_of_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without tokens ended the run with a division by zero, on a terminal only."""
    monkeypatch.setattr("fminfer.batch.progress.time", Clock())
    bar, stats = ProgressBar(3, is_quiet=True), EngineStats()
    assert bar.left_s(stats) is None
    stats.read.num_rows = 3
    assert work_left(stats, 3) == (0.0, 0.0) and bar.left_s(stats) is None
    assert ProgressBar(None, is_quiet=True).left_s(stats) is None
    assert Pace().seconds(1, 1) is None


@pytest.mark.parametrize("columns", [0, 100])
def test_a_terminal_sees_what_happens_from_the_start(columns: int, tmp_path: Path) -> None:
    """It saw nothing until the model was ready, and with 0 columns, as in a container, no bar."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "max_tokens": 200, "ignore_eos": true}\n' * 99)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (columns and 24, columns))
    said: list[bytes] = []
    run = Forked(["run", str(rows), "--kernels", "off"], files=(None, None, theirs))
    os.close(theirs)
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(ours, 4096):
            said.append(data)
    os.close(ours)
    assert run.wait(60) == 0
    text = b"".join(said).decode()
    assert "Loading fminfer-demo (" in text and "Ready after" in text
    assert re.search(r"fminfer: +\d+%\|.*\| \d+/99 rows, [\d,]+ tokens, [\d,]+ tok/s", text), text


def test_what_running_rows_may_still_draw_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waited 10 s for rows that needed longer, and did not know it."""
    told: list[int] = []

    class Asked(PretendPipeline):
        def collect(self) -> StepResult:
            told.append(sum(loop.running_rows.num_left))
            return super().collect()

    def asked_while_packing(*args: Any) -> PlannedStep:
        """Rows were in no list for a moment, and a signal then found none."""
        while_packing.append(sum(loop.running_rows.num_left))
        return pack(*args)

    while_packing: list[int] = []
    monkeypatch.setattr("fminfer.engine.scheduler.pack", asked_while_packing)
    tokenizer = Tokenizer(None)
    limits = Limits(2048, 256, 100, eos_ids=frozenset({END_ID}))
    loop = build_loop(
        EngineConfig(),
        Starter(tokenizer, limits.eos_ids, seed=1),
        Asked(32),
        AnswerForm(tokenizer, "auto"),
        sizes=StepSizes(chunk_size=512, max_rows=2),
        num_blocks=4096,
        num_stages=1,
    )
    rows = [{"prompt": [9, 10, 11 + i], "max_tokens": n} for i, n in enumerate((5, 9, 30))]
    lines = (Line(0, i, json.dumps(row).encode()) for i, row in enumerate(rows, 1))
    assert not loop.running_rows.num_left
    assert len(list(over_lines(loop, Intake(tokenizer, limits)).run(lines))) == 3
    # While each step is computed: long rows first, two at once, the third when one has ended.
    assert told[:10] == [39, 37, 35, 33, 31, 29, 27, 25, 23, 21 + 5] and told[-1] == 1, told
    assert while_packing == told
    bar = ProgressBar(None, is_quiet=True)
    assert bar.drawing_s(10) is None, "nothing was computed yet"
    bar.add_step(0, 5)
    assert (bar.drawing_s(10) or 0) > 0 and bar.drawing_s(0) is None

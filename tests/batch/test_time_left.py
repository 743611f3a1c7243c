"""The time left, as a run tells it: rows go through the engine's own loop, on a simulated clock."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fminfer.batch.progress import ProgressBar
from fminfer.batch.rows_left import MOST_UNREAD, MOST_WAITING, Places, RowLengths, work_left
from fminfer.batch.time_left import StepCosts, TimeLeft
from fminfer.contract.line import Line
from fminfer.core.config import EngineConfig
from fminfer.core.messages import Step, StepResult, StepTrace
from fminfer.engine.answer import AnswerForm
from fminfer.engine.engine_core import Facts
from fminfer.engine.intake import Intake, Limits
from fminfer.engine.packing import PlannedStep, pack
from fminfer.engine.start import Starter
from fminfer.engine.stats import EngineStats, RowEnds, RunningRows
from fminfer.estimate.cost_model import CostModel, StepWork
from fminfer.estimate.simulation import PretendPipeline
from fminfer.text.tokenizer import Tokenizer
from fminfer.worker.assembly import build_loop
from fminfer.worker.line_run.runner import WINDOW
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


@dataclass
class Told:
    """An engine that says what it is told to."""

    stats: EngineStats
    running_rows: RunningRows


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


@pytest.mark.parametrize("machine", [*MACHINES])
@pytest.mark.parametrize(
    ("workload", "count", "max_rows"),
    [
        *(("few long", 12, None), ("uneven", 40, 8), ("uneven", 40, None), ("uneven", 300, None)),
        *(("short, then long", 96, 16), ("candidates", 200, None)),
    ],
)
def test_long_rows_are_foreseen(
    monkeypatch: pytest.MonkeyPatch, workload: str, count: int, max_rows: int | None, machine: str
) -> None:
    """The time of a token was the same for 2 rows as for 12: 0.4 of the total was told."""
    told = run(monkeypatch, rows_of(workload, count), count, machine=machine, max_rows=max_rows)
    errors = errors_at(told, [0.1, 0.25, 0.5, 0.75, 0.9])
    assert max(map(abs, errors)) < 0.2, errors


@pytest.mark.parametrize("machine", [*MACHINES])
@pytest.mark.parametrize(("workload", "count"), [("generate", 64), ("short", 96)])
def test_short_files_are_foreseen_once_prompts_are_fed(
    monkeypatch: pytest.MonkeyPatch, workload: str, count: int, machine: str
) -> None:
    """On a GPU half of the run was not: there, steps of few rows take as long as those of many."""
    told = run(monkeypatch, rows_of(workload, count), count, machine=machine)
    assert max(map(abs, errors_at(told, [0.1, 0.2]))) < 0.35
    assert max(map(abs, errors_at(told, [0.4, 0.5, 0.75, 0.9]))) < 0.2


@pytest.mark.parametrize("stops_from", [0, 120])
def test_rows_that_stop_early_are_learned(monkeypatch: pytest.MonkeyPatch, stops_from: int) -> None:
    """How long they are is known once some have stopped, not after a tenth: that is chance."""
    how = {"stop_rate": 0.05 if stops_from else 0.02, "stops_from": stops_from, "max_rows": 8}
    told = run(monkeypatch, rows_of("chats", 40), 40, **how)
    assert max(map(abs, errors_at(told, [0.25, 0.5, 0.75, 0.9]))) < 0.35
    if stops_from:
        assert errors_at(told, [0.1])[0] > 1, "nobody can know that no row draws 800 tokens"


def test_rows_that_are_not_read_yet_count_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of it: only the first 1,024 lines of 3,000 were read, and the others are longer."""
    told = run(monkeypatch, rows_of("short, then long", 3000), 3000)
    early, late = errors_at(told, [0.1, 0.6])
    assert early < -0.3 and abs(late) < 0.2


def test_several_pipelines_share_the_rows() -> None:
    """Each reports its steps at once: twice as many as one row takes."""
    stats, running = EngineStats(max_rows=8, num_prompt_tokens=8), RunningRows([10] * 8, [100] * 8)
    stats.read.num_rows = 8
    stats.read.add(8, 8, 110)
    one, two = TimeLeft(num_ranks=1), TimeLeft(num_ranks=2)
    for _ in range(4):
        stats.num_steps += 10
        one.add(1.0, stats, 0, 80)
        two.add(0.5, stats, 0, 40)
    told = [each.all_s(Told(stats, running), 8) for each in (one, two)]
    assert told == [pytest.approx(10.0), pytest.approx(10.0)]


def test_costs_are_fitted_to_steps() -> None:
    costs, rng = StepCosts("cpu"), random.Random(1)
    costs.add(99.0, 1, 500, 0)
    assert costs.fit() is None, "the first step says nothing of others"
    for _ in range(2000):
        num_fed, num_drawn = rng.choice([0, 0, 100]), rng.randint(1, 64)
        costs.add(0.05 + 0.001 * num_fed + 0.002 * num_drawn, 1, num_fed, num_drawn)
    assert costs.fit() == pytest.approx((0.05, 0.001, 0.002), rel=0.05), "the first one counts"


@pytest.mark.parametrize("num_drawn", [0, 1, 2, 3, 4, 7, 8, 100])
def test_draws_are_counted_by_their_place(num_drawn: int) -> None:
    ends, places = RowEnds(), [0] * 40
    ends.spread(num_drawn, places)
    expected = [0] * 40
    for place in range(1, num_drawn + 1):
        expected[place.bit_length()] += 1
    assert places == expected


def test_lengths_follow_the_rows_that_ended() -> None:
    """Rows of which each draw is the last one in 50 draw 50 on average, at any age."""
    ends, rng = RowEnds(), random.Random(2)
    ends.add(3000, 1000)
    for _ in range(3000):
        ends.end(min(1000, 1 + int(rng.expovariate(1 / 50))), 1000)
    lengths = RowLengths(ends, RunningRows(), 400)
    new = [lengths.next(0, 1000) for _ in range(200)]
    old = [lengths.next(70, 930) for _ in range(200)]
    assert sum(new) / 200 == pytest.approx(50, rel=0.15)
    assert sum(old) / 200 == pytest.approx(50, rel=0.15)
    assert max(new) > 200 and lengths.next(0, 20) <= 20
    assert RowLengths(RowEnds(), RunningRows([5], [10]), 1).next(5, 10) == 10, "none has stopped"


def test_scarce_memory_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room the prefix cache does less than the best possible one, as a run soon sees."""
    rows = list(rows_of("prefixes", 128))
    told = run(monkeypatch, iter(rows), 128, num_blocks=26)
    assert max(map(abs, errors_at(told, [0.25, 0.5, 0.9]))) < 0.25


def test_many_choices_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of lines with a large n waits: the others are as those that are looked at."""
    stats, looked_at = EngineStats(max_rows=256, max_rows_running=256, num_kv_tokens=10**6), 0
    for number in range(1024):
        stats.read.num_rows += 1
        stats.read.add(100, 128, 64 + number % 64)
    for _ in range(2000):
        stats.read.ends.end(20, 64)
    whole, enter = 1024 * 128 - 2000, Places.enter

    def count(places: Places, num_draws: float) -> None:
        nonlocal looked_at
        looked_at += 1
        enter(places, num_draws)

    monkeypatch.setattr(Places, "enter", count)
    found = []
    for most in (10**9, MOST_WAITING):
        monkeypatch.setattr("fminfer.batch.rows_left.MOST_WAITING", most)
        looked_at = 0
        left = work_left(stats, RunningRows(), 2048, 512)
        found.append((left.num_steps, left.num_fed, left.num_drawn, left.num_keys))
        assert looked_at <= min(whole, most) + MOST_UNREAD + 2
    assert found[1] == pytest.approx(found[0], rel=0.03)

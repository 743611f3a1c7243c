"""The time left, as a run tells it: rows go through the engine's own loop, on a
simulated clock."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fminfer.compute.values.step import Step, StepResult, StepTrace
from fminfer.contract.envelope import Line
from fminfer.core.config import EngineConfig
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.start import RequestStarter
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.estimate.cost_model import CostModel, StepWork
from fminfer.estimate.simulation import PretendPipeline
from fminfer.job.progress import ProgressBar, TimeLeft
from fminfer.runtime.lines.runner import WINDOW
from fminfer.runtime.load.assembly import build_loop
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import more
from tests.line_bench import over_lines

END_ID = 7
# About a llama of 12 × 768 on two cores, in bfloat16 and in float32; and a GPU, which
# takes about the same for a step of few rows as for one of many.
MACHINES = {
    "bfloat16": (
        20e-3,
        0.35e-3,
        0.55e-3,
        0,
        0,
        0.2e-3,
        0.2e-3,
        0.25e-3,
        2e-6,
        1e-3,
        0.2e-3,
        0,
    ),
    "float32": (
        45e-3,
        1.2e-3,
        1.5e-3,
        0,
        0,
        0.6e-3,
        0.6e-3,
        0.9e-3,
        5e-6,
        1e-3,
        0.3e-3,
        0,
    ),
    "gpu": (
        20e-3,
        0.01e-3,
        0.03e-3,
        0,
        0,
        0.02e-3,
        0.02e-3,
        0.02e-3,
        1e-8,
        0,
        0.01e-3,
        0,
    ),
}


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
    state: EngineState


def drawing(longest_row: int, num_running: int = 8) -> EngineState:
    """Return the state of an engine whose rows draw."""
    return EngineState(longest_row=longest_row, num_running=num_running)


class DrawingPipeline(PretendPipeline):
    """Draws the end token with a probability, from a position on."""

    def __init__(self, stop_rate: float, stops_from: int) -> None:
        super().__init__(32)
        self._rng = random.Random(5)
        self._stop_rate = stop_rate
        self._stops_from = stops_from

    def collect(self) -> StepResult:
        step = self._steps[0]
        result = super().collect()
        rows = zip(step.positions.tolist(), step.lengths.tolist(), strict=True)
        at = [position + place for position, length in rows for place in range(length)]
        for place, index in enumerate(step.draws["token_index"]):
            if at[index] >= self._stops_from and self._rng.random() < self._stop_rate:
                result.logprobs_of("tokens").ids[place] = END_ID
        return result


def rows_of(workload: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield those of benchmarks/against_transformers.py, or ones whose lengths grow."""
    rng = random.Random(3)

    def ids(number: int) -> list[int]:
        return [rng.randrange(8, 250) for _ in range(number)]

    heads = [ids(600), ids(600)]
    for number in range(count):
        if workload == "generate":
            yield {
                "prompt": ids(rng.randint(16, 191)),
                "max_tokens": rng.randint(16, 128),
            }
        elif workload == "score":
            how = {"max_tokens": 0, "echo": True, "logprobs": 1}
            yield {"prompt": ids(rng.randint(64, 511)), **how}
        elif workload == "prefixes":
            yield {
                "prompt": heads[number % 2] + ids(rng.randint(40, 99)),
                "max_tokens": 8,
            }
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
            yield {
                "prompt": ids(40),
                "max_tokens": 60,
                "n": 1 + number % 4,
                "temperature": 1,
            }


def run(
    monkeypatch: pytest.MonkeyPatch,
    rows: Iterator[dict[str, Any]],
    total: int,
    **how: Any,
) -> list[tuple[float, float | None]]:
    """Answer rows; return, for each step, the seconds since the start and those said to
    be left."""
    clock = Clock()
    monkeypatch.setattr("fminfer.job.progress.time", clock)
    costs = CostModel(MACHINES[how.get("machine", "float32")], 0.0)

    tokenizer = Tokenizer(None)
    limits = RequestLimits(2048, 256, eos_ids=frozenset({END_ID}))
    loop = build_loop(
        EngineConfig(),
        RequestStarter(tokenizer, limits.eos_ids, seed=1),
        DrawingPipeline(how.get("stop_rate", 0.0), how.get("stops_from", 0)),
        AnswerStyle(tokenizer, "auto"),
        sizes=EngineConfig(max_rows=how.get("max_rows")).choose_step_sizes("cpu", 1),
        num_blocks=how.get("num_blocks", 4096),
        num_stages=1,
    )
    device_type = "cuda" if how.get("machine") == "gpu" else "cpu"
    bar = ProgressBar(total, TimeLeft(device_type), is_quiet=True)
    told: list[tuple[float, float | None]] = []

    def on_step(trace: StepTrace) -> None:
        step: Step = trace.step
        factor = (
            how.get("factor", 1.0) if len(told) >= how.get("changes_at", 0) else 1.0
        )
        clock.now_s += factor * costs.predict_s(StepWork.of(step).counts)
        bar.add_work(loop.stats, trace.num_prompt_tokens, len(step.draws))
        told.append((clock.now_s, bar.predict_left_s(loop)))

    loop.on_step = on_step
    base = {"temperature": 0, "user": ""}
    lines = (
        Line(0, i, json.dumps(base | row).encode()) for i, row in enumerate(rows, 1)
    )
    for record in over_lines(
        loop, Intake(tokenizer, limits), read_ahead=how.get("read_ahead", WINDOW)
    ).run(lines):
        assert record.error is None
    return told


def errors_at(
    told: list[tuple[float, float | None]], shares: list[float]
) -> list[float]:
    """Return how far off the total was that was told at some shares of the run."""
    end_s = told[-1][0]
    errors = []
    for share in shares:
        now_s, left_s = next(each for each in told if each[0] >= share * end_s)
        assert left_s is not None, f"nothing was told at {share:.0%}"
        errors.append((now_s + left_s) / end_s - 1)
    return errors


MIDDLE = [1 / 3, 1 / 2, 3 / 4]


WORKLOADS: list[tuple[str, int, dict[str, Any]]] = [
    ("score", 96, {}),
    ("generate", 64, {}),
    ("generate", 600, {}),
    ("prefixes", 128, {}),
    ("few long", 12, {}),
    ("uneven", 40, {}),
    ("uneven", 300, {}),
    ("candidates", 200, {}),
    ("uneven", 40, {"max_rows": 8}),
    ("short, then long", 96, {"max_rows": 16}),
    ("generate", 600, {"stop_rate": 0.02}),
    ("prefixes", 128, {"num_blocks": 26}),  # the prefix cache has too little room
]


@pytest.mark.parametrize(
    ("workload", "count", "how", "machine"),
    # Many rows on one machine each, in turn; on the others they are more of the same.
    [
        pytest.param(*each, name, marks=more if each[1] > 64 and (i + j) % 3 else [])
        for i, each in enumerate(WORKLOADS)
        for j, name in enumerate(MACHINES)
    ],
)
def test_the_time_left_is_right_from_a_third_on(
    monkeypatch: pytest.MonkeyPatch,
    workload: str,
    count: int,
    how: dict[str, Any],
    machine: str,
) -> None:
    """Scoring, drawing, both. One time for all tokens told 0.6 of "few long" at a third."""
    told = run(monkeypatch, rows_of(workload, count), count, machine=machine, **how)
    errors = errors_at(told, MIDDLE)
    assert max(map(abs, errors)) < 0.25, errors


@pytest.mark.parametrize("stops_from", [0, 120])
def test_rows_that_stop_early_are_learned(
    monkeypatch: pytest.MonkeyPatch, stops_from: int
) -> None:
    """Rows of like lengths are taken for uneven ones, of which the longest comes last."""
    how = {
        "stop_rate": 0.05 if stops_from else 0.02,
        "stops_from": stops_from,
        "max_rows": 8,
    }
    told = run(monkeypatch, rows_of("chats", 40), 40, **how)
    errors = errors_at(told, MIDDLE)
    assert min(errors) > -0.25 and max(errors) < (1.0 if stops_from else 0.25), errors
    if stops_from:
        assert errors_at(told, [0.1])[0] > 1, (
            "nobody can know that no row draws 800 tokens"
        )


@pytest.mark.parametrize(("factor", "count"), [(0.4, 600), (3.0, 330)])
def test_a_change_of_speed_is_seen(
    monkeypatch: pytest.MonkeyPatch, factor: float, count: int
) -> None:
    """All steps since the start counted alike: 0.58 of the time was told long after a
    slow-down."""
    how = {"factor": factor, "changes_at": 120}
    told = run(monkeypatch, rows_of("score", count), count, **how)
    changed_s = told[how["changes_at"]][0]
    later = [
        now_s + left_s for now_s, left_s in told if now_s > changed_s + 62 and left_s
    ]
    assert len(later) > 20
    assert [each / told[-1][0] for each in later] == pytest.approx(
        [1.0] * len(later), abs=0.03
    )


def test_the_time_left_of_a_last_long_row_only_falls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = run(monkeypatch, rows_of("few long", 12), 12)
    lefts = [left_s or 0.0 for now_s, left_s in told if now_s > told[-1][0] / 2]
    falls = [before - after for before, after in itertools.pairwise(lefts)]
    assert min(falls) > 0 and lefts[-1] < 0.1


def test_rows_that_are_not_read_yet_count_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of it: only the first third of the lines was read, and the others are longer."""
    told = run(monkeypatch, rows_of("short, then long", 750), 750, read_ahead=256)
    early, late = errors_at(told, [0.1, 0.6])
    assert early < -0.3 and abs(late) < 0.25


def test_several_pipelines_share_the_rows() -> None:
    """Each reports its steps at once: twice as many as one row takes."""
    stats = EngineStats(
        num_prompt_tokens=8, num_generated_tokens=80, max_rows_running=8
    )
    stats.read.num_rows = 8
    stats.read.add(8, 8, 110)
    one = TimeLeft(num_stages=1)
    two = TimeLeft(num_stages=2)
    for _ in range(4):
        stats.num_steps += 10
        one.add_steps(1.0, stats, 0, 80)
        two.add_steps(0.5, stats, 0, 40)
    told = [each.predict_all_s(Told(stats, drawing(100)), 8) for each in (one, two)]
    assert told == [pytest.approx(10.0), pytest.approx(10.0)]

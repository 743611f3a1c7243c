"""The engine's real loop over a pipeline with a clock of its own, and how busy its stages were.

It knows seconds, not what they are spent on: the stages' times are given.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from pipeline_costs import Link, Work

from fminfer.compute.values.step import Step, StepResult, TokenLogprobs
from fminfer.contract.envelope import Line
from fminfer.core.config import EngineConfig
from fminfer.engine import packing
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.blocks import BlockPool
from fminfer.engine.intake import Intake
from fminfer.engine.loop import EngineLoop
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.start import RequestStarter
from fminfer.runtime.lines.line_intake import LineIntake, RecordForm
from fminfer.runtime.lines.runner import LineRunner
from fminfer.text.tokenizer import Tokenizer

DEFAULTS = EngineConfig()
MAX_CONTEXT = 1 << 20  # longer than any row that is simulated
DRAWN_ID = 65  # any; the byte tokenizer spells it A


@dataclass(slots=True, frozen=True)
class Driver:
    """What the engine needs on rank 0 for a step, and for each token that was drawn in it."""

    step_s: float
    token_s: float


@dataclass(slots=True, frozen=True)
class StepTimes:
    """When a step was where, seconds on the simulated clock."""

    num_tokens: int
    num_draws: int
    starts: list[float]  # of each stage's work
    ends: list[float]
    collected: float


class SimulatedPipeline:
    """What the engine sees of a pipeline, with stages that only take time.

    Steps pass each stage in the order of their submission, so a step's whole way is
    known when it is submitted.

    Args:
        stages: how long each stage works on a step.
        hops: the link out of each stage, the last one's back to the engine.
        token_bytes: hidden states of a token.
    """

    def __init__(
        self,
        stages: list[Callable[[Work], float]],
        hops: list[Link],
        driver: Driver,
        token_bytes: int,
    ) -> None:
        assert len(stages) == len(hops), f"{len(stages)} stages, {len(hops)} links"
        self._stages = stages
        self._hops = hops
        self._driver = driver
        self._token_bytes = token_bytes
        self.clear()

    def clear(self) -> None:
        """Set the clock to zero."""
        self._now_s = 0.0  # the engine's own time
        self._free_s = [0.0] * len(self._stages)
        self._link_free_s = [0.0] * len(self._stages)
        self._in_flight: deque[tuple[Step, StepTimes]] = deque()
        self.num_in_flight = 0
        # by the row's slot, its own while it runs
        self._last_draw_s: dict[int, float] = {}
        self.steps: list[StepTimes] = []
        self.round_s: list[float] = []  # between two tokens of one row

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def submit(self, step: Step) -> None:
        """Take a step in and find when it is where."""
        self._now_s += self._driver.step_s
        work = measure_work(step)
        starts = []
        ends = []
        arrival = self._now_s
        for stage, time_s in enumerate(self._stages):
            starts.append(max(arrival, self._free_s[stage]))
            ends.append(starts[-1] + time_s(work))
            self._free_s[stage] = ends[-1]
            # only ids go back, which weigh nothing
            is_last = stage == len(self._stages) - 1
            sent_bytes = 0 if is_last else work.num_tokens * self._token_bytes
            arrival = self._send(stage, ends[-1], sent_bytes)
        times = StepTimes(work.num_tokens, work.num_draws, starts, ends, arrival)
        self._in_flight.append((step, times))
        self.num_in_flight += 1

    def collect(self) -> StepResult:
        """Wait, on the simulated clock, for the oldest step."""
        step, times = self._in_flight.popleft()
        self.num_in_flight -= 1
        self._now_s = max(self._now_s, times.collected)
        self.steps.append(dataclasses.replace(times, collected=self._now_s))
        self._note_rounds(step)
        self._now_s += self._driver.token_s * times.num_draws
        drawn = TokenLogprobs.empty(times.num_draws)
        drawn.ids[:] = DRAWN_ID
        drawn.logprobs[:] = 0.0
        return StepResult(step.step_id, {"tokens": drawn}, [])

    def drop_steps(self) -> None:
        """Forget the steps in flight."""
        self._in_flight.clear()
        self.num_in_flight = 0

    def _send(self, stage: int, ready_s: float, num_bytes: int) -> float:
        hop = self._hops[stage]
        sent = max(ready_s, self._link_free_s[stage]) + num_bytes / hop.bytes_per_s
        self._link_free_s[stage] = sent
        return sent + hop.latency_s

    def _note_rounds(self, step: Step) -> None:
        is_drawing = np.isin(step.lengths.cumsum() - 1, step.draws["token_index"])
        columns = (step.slots, step.positions, step.lengths)
        rows = zip(*(column[is_drawing].tolist() for column in columns), strict=True)
        for slot, position, length in rows:
            before = self._last_draw_s.get(slot)
            if before is not None and length == 1 and position > 0:
                self.round_s.append(self._now_s - before)
            self._last_draw_s[slot] = self._now_s


def measure_work(step: Step) -> Work:
    """Count what a step asks of a stage."""
    counts = step.lengths
    kv_read = int((step.positions + counts).sum())
    num_scores = int((counts * step.positions + counts * (counts + 1) // 2).sum())
    return Work(step.num_tokens, len(step.draws), kv_read, num_scores)


@dataclass(slots=True, frozen=True)
class Outcome:
    """What a simulated run came to."""

    generated_per_s: float
    tokens_per_s: float  # fed to the model: prompts and drawn ones
    busy: list[float]  # of each stage
    round_s: float  # median time between two tokens of a row
    tokens_a_step: float
    max_rows_running: int
    total_s: float  # the whole run, its beginning and end included
    loop_s: float  # real seconds that the engine's loop and the simulation took


@dataclass(slots=True, frozen=True)
class Workload:
    """Rows that are made up."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int
    spread: float = 0.5  # lengths lie within this share of those asked for, either way

    def lines(self) -> Iterator[Line]:
        """Yield the requests, the same ones each time."""
        rng = random.Random(2026)
        for number in range(1, self.num_requests + 1):
            lengths = [
                max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))
                for mean in (self.prompt_tokens, self.max_tokens)
            ]
            fields = {"prompt": [DRAWN_ID] * lengths[0], "max_tokens": lengths[1]}
            fields |= {"temperature": 0, "ignore_eos": True}
            yield Line(0, number, json.dumps(fields).encode())


@dataclass(slots=True, frozen=True)
class Engine:
    """What the engine is told."""

    kv_tokens: int
    micro_batches: int
    max_rows: int
    chunk_size: int = 512
    block_size: int = DEFAULTS.block_size
    min_share: int | None = None  # None: the scheduler's own


def run_engine(
    pipeline: SimulatedPipeline, engine: Engine, workload: Workload
) -> Outcome:
    """Answer the workload with the real loop over the simulated pipeline."""
    pool = BlockPool(-(-engine.kv_tokens // engine.block_size), engine.block_size)
    sizes: dict[str, Any] = {
        "chunk_size": engine.chunk_size,
        "max_rows": engine.max_rows,
    }
    sizes["num_stages"] = pipeline.num_stages
    tokenizer = Tokenizer(None)
    min_share = (
        packing.MIN_SPREAD_ROWS if engine.min_share is None else engine.min_share
    )
    # To see what the scheduler's threshold is worth, it is set for the length of the run.
    with mock.patch.object(packing, "MIN_SPREAD_ROWS", min_share):
        loop = EngineLoop(
            RequestStarter(tokenizer, frozenset(), seed=1),
            Scheduler(pool, micro_batches=engine.micro_batches, **sizes),
            pipeline,
            AnswerStyle(tokenizer, "auto"),
        )
        started = time.perf_counter()
        lines = LineIntake(Intake(tokenizer, RequestLimits(MAX_CONTEXT, 256)))
        runner = LineRunner(
            loop, lines, RecordForm("simulated", 0), engine=loop, joins_equal=False
        )
        errors = [
            record.error for record in runner.run(workload.lines()) if record.error
        ]
        loop_s = time.perf_counter() - started
    assert not errors, errors[0]
    return sum_up(pipeline, loop.stats.max_rows_running, loop_s)


def sum_up(
    pipeline: SimulatedPipeline, max_rows_running: int, loop_s: float
) -> Outcome:
    """Find rates and busy shares of the steps between a quarter and three quarters of
    the draws."""
    steps = pipeline.steps
    total = sum(step.num_draws for step in steps)
    drawn = 0
    marks: list[int] = []
    for number, step in enumerate(steps):
        drawn += step.num_draws
        if drawn * 4 >= total * (1 + 2 * len(marks)) and len(marks) < 2:
            marks.append(number)
    first, last = steps[marks[0]].collected, steps[marks[1]].collected
    middle = steps[marks[0] + 1 : marks[1] + 1]
    span = last - first
    busy = []
    for stage in range(len(steps[0].starts)):
        worked = (
            max(0.0, min(step.ends[stage], last) - max(step.starts[stage], first))
            for step in steps
        )
        busy.append(sum(worked) / span)
    return Outcome(
        generated_per_s=sum(step.num_draws for step in middle) / span,
        tokens_per_s=sum(step.num_tokens for step in middle) / span,
        busy=busy,
        round_s=statistics.median(pipeline.round_s or [0.0]),
        tokens_a_step=statistics.fmean(step.num_tokens for step in middle),
        max_rows_running=max_rows_running,
        total_s=steps[-1].collected,
        loop_s=loop_s,
    )

"""`fminfer bench --calibrate`: times steps of a model on this machine, so that `check`
can predict.

Real requests run through a real engine; what each step took is fitted to what was in it.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fminfer.compute.values.step import StepTrace
from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, UsageError
from fminfer.core.quantities import describe_seconds
from fminfer.estimate.cost_model import (
    CostModel,
    Sample,
    StepWork,
    find_costs_path,
    fit,
    write_costs,
)
from fminfer.machine.user_cache import describe_cache_fault
from fminfer.runtime.bars import make_bar, say
from fminfer.runtime.engine_api import Engine

MIN_ROUNDS = 2
MAX_ROUNDS = 50
ENOUGH_S = 20.0  # rounds are repeated for so long


@dataclass(slots=True, frozen=True)
class MeasuredRun:
    """Rows that run at once; without new tokens their prompts are scored."""

    num_rows: int
    prompt_tokens: int
    new_tokens: int
    temperature: float = 0.0
    shared_tokens: int = 0  # of the prompts


WARM_UP = MeasuredRun(8, 64, 4)
TRIALS = (
    *(MeasuredRun(num_rows, 32, 12) for num_rows in (1, 8, 32, 128)),
    MeasuredRun(1, 128, 1),
    MeasuredRun(1, 256, 1),
    MeasuredRun(1, 1024, 4),
    MeasuredRun(4, 512, 12),
    MeasuredRun(16, 160, 12),  # decode at longer contexts
    MeasuredRun(32, 32, 8, temperature=1.0),
    MeasuredRun(8, 256, 0),
    MeasuredRun(16, 580, 1, shared_tokens=512),  # short chunks behind many keys
)

# Runs that are not fitted, but tell by the clock how far the forecast of a run is from
# the truth.
WHOLE_RUNS = (
    MeasuredRun(64, 120, 6, shared_tokens=90),  # labels
    MeasuredRun(24, 48, 40, temperature=1.0),  # texts
    MeasuredRun(12, 200, 0),  # scores
    MeasuredRun(1, 60, 30),  # one row alone
)
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} runs, left {remaining}"


@dataclass(slots=True, frozen=True)
class Calibration:
    """What was measured."""

    costs: CostModel
    samples: list[Sample]
    path: Path


def calibrate(config: EngineConfig) -> Calibration:
    """Load the model, time its steps, and keep what they cost."""
    with closing(Engine(config)) as engine:
        if engine.pipeline.plan.checkpoint.model.encoder is not None:
            raise UsageError(
                "--calibrate times decoders alone; this model has an encoder"
            )
        if engine.facts.streaming:
            raise UsageError(
                "--calibrate times steps with weights that stay in memory; leave --offload out"
            )
        path = find_costs_path(
            engine.pipeline.plan, has_kernel=engine.facts.measured.has_kernel
        )
        if path is None:
            raise UsageError(f"the costs cannot be kept: {describe_cache_fault()}")
        is_terminal = sys.stderr.isatty()
        bar = make_bar(
            desc="calibrate", bar_format=BAR, disable=not is_terminal, leave=False
        )
        with closing(bar):
            measurement = _Measurement(engine, bar)
            samples = measurement.time_steps()
            costs = fit(samples)
            costs = replace(costs, whole_runs=measurement.time_runs(costs))
    write_costs(path, costs, engine.model_name)
    return Calibration(costs, samples, path)


class _Measurement:
    """Runs trials, and tells how long that will go on."""

    def __init__(self, engine: Engine, bar: Any) -> None:
        self._engine = engine
        self._bar = bar
        self._ids = random.Random(1)
        self._trials, self._whole_runs = (
            [
                short
                for trial in trials
                if (short := _shorten(engine, trial)) is not None
            ]
            for trials in (TRIALS, WHOLE_RUNS)
        )
        warm_up = _shorten(engine, WARM_UP)
        if warm_up is None or not self._trials or not self._whole_runs:
            raise UsageError(
                "the KV cache holds too few tokens to measure anything; raise --budget"
            )
        _run(engine, warm_up, self._ids)
        bar.reset(self._num_runs(MIN_ROUNDS))

    def time_steps(self) -> list[Sample]:
        """Run all trials, again and again until it is enough."""
        samples: list[Sample] = []
        started_s = time.perf_counter()
        number = 0
        most = MAX_ROUNDS
        while number < most:
            for trial in self._trials:
                samples += self._time(trial)
            number += 1
            round_s = (time.perf_counter() - started_s) / number
            most = rounds_of(round_s)
            self._bar.total = self._num_runs(most)
            if self._bar.disable and number == 1:
                left_s = round_s * self._num_runs(most - 1) / len(self._trials)
                say(f"calibrate: left {describe_seconds(left_s)}")
        return samples

    def time_runs(self, costs: CostModel) -> tuple[float, ...]:
        """Return measured / predicted of runs from their first line to their last answer."""
        ratios = []
        for trial in self._whole_runs:
            started_s = time.perf_counter()
            samples = self._time(trial)
            seconds = time.perf_counter() - started_s
            ratios.append(
                seconds / sum(costs.predict_s(shape.counts) for shape, _ in samples)
            )
        return tuple(ratios)

    def _num_runs(self, num_rounds: int) -> int:
        return num_rounds * len(self._trials) + len(self._whole_runs)

    def _time(self, trial: MeasuredRun) -> list[Sample]:
        samples = _run(self._engine, trial, self._ids)
        self._bar.update()
        return samples


def rounds_of(round_s: float) -> int:
    """Return how many rounds of all trials are enough, if one takes so long."""
    return min(MAX_ROUNDS, max(MIN_ROUNDS, math.ceil(ENOUGH_S / round_s)))


def _shorten(engine: Engine, trial: MeasuredRun) -> MeasuredRun | None:
    """Return a trial whose rows fit the model's context; None: they do not all run at once."""
    room = engine.context_length - trial.new_tokens
    if room < 1 or trial.num_rows > engine.facts.plan.sizes.max_rows:
        return None
    prompt_tokens = min(trial.prompt_tokens, room)
    size = engine.config.block_size
    each = -(-(prompt_tokens + trial.new_tokens) // size) * size
    if trial.num_rows * each > engine.stats.num_kv_tokens:
        return None
    return replace(trial, prompt_tokens=prompt_tokens)


def _run(engine: Engine, trial: MeasuredRun, ids: random.Random) -> list[Sample]:
    """Answer a trial's rows; return each step's shape, and the seconds from the end of
    the last."""
    samples: list[Sample] = []
    ends_s: list[float] = []

    def on_step(step: StepTrace) -> None:
        (span,) = step.spans
        since_s = ends_s[-1] if ends_s else span.start_s
        samples.append((StepWork.of(step.step), span.end_s - since_s))
        ends_s.append(span.end_s)

    engine.follow(on_step=on_step)
    for record in engine.run(_requests(trial, ids, engine.vocab_size)):
        if record.error is not None:
            raise FminferError(
                f"a row of the measurement failed: {record.error.message}"
            )
    return samples


def _requests(
    trial: MeasuredRun, ids: random.Random, vocab_size: int
) -> Iterator[dict[str, Any]]:
    """Yield requests of random tokens, which share nothing with those of other trials."""
    prompt = [ids.randrange(vocab_size) for _ in range(trial.prompt_tokens)]
    fields = {
        "max_tokens": trial.new_tokens,
        "temperature": trial.temperature,
        "ignore_eos": True,
    }
    if not trial.new_tokens:
        fields |= {"echo": True, "logprobs": 1}
    for _ in range(trial.num_rows):
        last_ids = [ids.randrange(vocab_size) for _ in prompt[trial.shared_tokens :]]
        yield fields | {"prompt": prompt[: trial.shared_tokens] + last_ids}

"""`fminfer bench --calibrate`: times steps of a model on this machine, so that `check` can predict.

Real requests run through a real engine; what each step took is fitted to what was in it. It knows
nothing of files of requests or of ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fminfer.cache import why_no_cache
from fminfer.config import EngineConfig
from fminfer.cost_model import CostModel, Sample, StepShape, fit
from fminfer.cost_store import find_costs_path, keep_costs
from fminfer.errors import FminferError, UsageError
from fminfer.loading import open_model
from fminfer.messages import StepTrace
from fminfer.worker import Engine

MIN_ROUNDS, MAX_ROUNDS = 2, 50
ENOUGH_S = 20.0  # rounds are repeated for so long


@dataclass(slots=True, frozen=True)
class Trial:
    """Rows that run at once; without new tokens their prompts are scored."""

    num_rows: int
    prompt_tokens: int
    new_tokens: int
    temperature: float = 0.0
    shared_tokens: int = 0  # of the prompts

    def to_text(self) -> str:
        """Say what is timed."""
        after = f"{self.new_tokens} drawn" if self.new_tokens else "scored"
        after += " at random" * (self.temperature > 0)
        return f"rows {self.num_rows:>4}, tokens {self.prompt_tokens:>5}, {after}"


WARM_UP = Trial(8, 64, 4)
TRIALS = (
    *(Trial(1, 32, 12), Trial(8, 32, 12), Trial(32, 32, 12), Trial(128, 32, 12)),
    *(Trial(1, 128, 1), Trial(1, 256, 1), Trial(1, 1024, 4)),
    *(Trial(4, 512, 12), Trial(16, 160, 12)),  # decode at longer contexts
    Trial(32, 32, 8, temperature=1.0),
    Trial(8, 256, 0),
    Trial(16, 580, 1, shared_tokens=512),  # short chunks behind many keys
)


@dataclass(slots=True, frozen=True)
class Calibration:
    """What was measured, and where it is kept."""

    costs: CostModel
    samples: list[Sample]
    path: Path


def calibrate(config: EngineConfig, on_trial: Callable[[Trial], None]) -> Calibration:
    """Load the model, time its steps, and keep what they cost.

    Args:
        on_trial: told of each trial before it runs.

    Raises:
        FminferError: the model cannot be loaded, or a row fails.
        UsageError: there is no folder to keep costs in.
    """
    engine = Engine(config)
    try:
        path = find_costs_path(
            config, open_model(config), engine.device, engine.dtype, has_kernel=engine.has_kernel
        )
        if path is None:
            raise UsageError(f"the costs cannot be kept: {why_no_cache()}")
        samples = _measure(engine, on_trial)
    finally:
        engine.close()
    costs = fit(samples)
    keep_costs(path, costs, engine.model_name)
    return Calibration(costs, samples, path)


def _measure(engine: Engine, on_trial: Callable[[Trial], None]) -> list[Sample]:
    ids = random.Random(1)
    trials = [trial for trial in map(lambda t: _shorten(engine, t), TRIALS) if trial is not None]
    warm_up = _shorten(engine, WARM_UP)
    if warm_up is None or not trials:
        raise UsageError("the KV cache holds too few tokens to measure anything; raise --budget")
    _run(engine, warm_up, ids)
    samples: list[Sample] = []
    started = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - started > ENOUGH_S:
            break
        for trial in trials:
            on_trial(trial)
            samples += _run(engine, trial, ids)
    return samples


def _shorten(engine: Engine, trial: Trial) -> Trial | None:
    """Return a trial whose rows fit the model's context; None: they do not all run at once."""
    room = engine.context_length - trial.new_tokens
    if room < 1 or trial.num_rows > engine.max_rows:
        return None
    prompt_tokens = min(trial.prompt_tokens, room)
    size = engine.config.block_size
    each = -(-(prompt_tokens + trial.new_tokens) // size) * size
    if trial.num_rows * each > engine.stats.num_kv_tokens:
        return None
    return replace(trial, prompt_tokens=prompt_tokens)


def _run(engine: Engine, trial: Trial, ids: random.Random) -> list[Sample]:
    """Answer a trial's rows; return each step's shape, and the seconds from the end of the last."""
    samples: list[Sample] = []
    ends_s: list[float] = []

    def on_step(step: StepTrace) -> None:
        (span,) = step.spans
        since_s = ends_s[-1] if ends_s else span.start_s
        samples.append((StepShape.of(step.step), span.end_s - since_s))
        ends_s.append(span.end_s)

    engine.trace(on_step)
    for record in engine.run(_requests(trial, ids, engine.vocab_size)):
        if record.error is not None:
            raise FminferError(f"a row of the measurement failed: {record.error.message}")
    return samples


def _requests(trial: Trial, ids: random.Random, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yield requests of random tokens, which share nothing with those of other trials."""
    prompt = [ids.randrange(vocab_size) for _ in range(trial.prompt_tokens)]
    how = {"max_tokens": trial.new_tokens, "temperature": trial.temperature, "ignore_eos": True}
    if not trial.new_tokens:
        how |= {"echo": True, "logprobs": 1}
    for _ in range(trial.num_rows):
        own = [ids.randrange(vocab_size) for _ in prompt[trial.shared_tokens :]]
        yield how | {"prompt": prompt[: trial.shared_tokens] + own}

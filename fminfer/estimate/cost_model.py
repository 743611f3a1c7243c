"""What a step takes, from its shape: few costs, fitted to measured steps, kept for the user."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fminfer.compute.values.step import Step
from fminfer.core.errors import UsageError
from fminfer.core.version import __version__
from fminfer.files.disk import replacing_file
from fminfer.machine import processor
from fminfer.machine.threads import choose_num_threads
from fminfer.machine.user_cache import make_cache_folder
from fminfer.plan.run_plan import RunPlan

# What a step is charged for, in the order of `StepWork.counts`.
COSTS = (
    "a step",
    "a prompt token of a step's first 128",
    "a prompt token beyond them",
    "a key that a prompt token sees",
    "a key that a chunk of a prompt reads",
    "a decode row of a step's first 8",
    "a decode row of the next 24",
    "a decode row beyond them",
    "a key that a decode row sees",
    "a step that draws or scores",
    "a token that is drawn or scored",
    "a token that is drawn at random",
)
# Of them, what decode rows are charged for however they are spread over steps.
SPREAD_COSTS = (
    "a key that a decode row sees",
    "a token that is drawn or scored",
    "a token that is drawn at random",
)
IS_SPREAD = np.array([cost in SPREAD_COSTS for cost in COSTS])
PROMPTS = slice(1, 3)
ROWS = slice(5, 8)  # of COSTS: tokens of prompts, and decode rows
# A token's share of a product depends on how many there are: of few, reading weights
# sets the pace.
MANY_TOKENS = 128
FEW_ROWS = 8
MANY_ROWS = 32
MAX_SWEEPS = 20_000
Sample = tuple["StepWork", float]  # a step and its seconds
Counts = np.ndarray[Any, np.dtype[np.float64]]  # how often each of COSTS is to be paid


def no_counts() -> Counts:
    """Return the counts of no step."""
    return np.zeros(len(COSTS))


@dataclass(slots=True, frozen=True)
class StepWork:
    """What makes a step long."""

    num_prompt_tokens: int  # fed in chunks
    num_prompt_keys: int  # that those see, each token's own among them
    num_chunk_keys: int  # the same, counted once a chunk
    num_rows: int  # of one token
    num_row_keys: int  # that those see
    num_logits: int  # tokens drawn or scored
    num_random: int  # of them, drawn with a temperature

    @classmethod
    def of(cls, step: Step) -> StepWork:
        """Measure a step."""
        is_one = step.lengths == 1
        all_positions = 0 * step.lengths if step.has_whole_prompts else step.positions
        lengths = step.lengths[~is_one]
        positions = all_positions[~is_one]
        return cls(
            num_prompt_tokens=int(lengths.sum()),
            num_prompt_keys=int(
                (lengths * positions + lengths * (lengths + 1) // 2).sum()
            ),
            num_chunk_keys=int((positions + lengths).sum()),
            num_rows=int(is_one.sum()),
            num_row_keys=int((all_positions[is_one] + 1).sum()),
            num_logits=len(step.draws) + len(step.scores),
            num_random=int((step.draws["temperature"] > 0).sum()),
        )

    @property
    def counts(self) -> Counts:
        """Return how often each of COSTS is to be paid."""
        few = min(self.num_rows, FEW_ROWS)
        more = min(self.num_rows, MANY_ROWS)
        first = min(self.num_prompt_tokens, MANY_TOKENS)
        counts = [
            1,
            first,
            self.num_prompt_tokens - first,
            self.num_prompt_keys,
            self.num_chunk_keys,
            few,
            more - few,
            self.num_rows - more,
            self.num_row_keys,
            self.num_logits > 0,
            self.num_logits,
            self.num_random,
        ]
        return np.array(counts, np.float64)


@dataclass(slots=True, frozen=True)
class CostModel:
    """Seconds of each of COSTS, none below 0, and how well they fit."""

    seconds: tuple[float, ...]
    error: float  # median, over the measured steps, of |predicted / measured - 1|
    # measured / predicted of runs that were not fitted
    whole_runs: tuple[float, ...] = (1.0,)

    @property
    def whole_run(self) -> float:
        """Return how long a run takes beside the sum of its steps' predicted seconds."""
        return statistics.median(self.whole_runs)

    def predict_s(self, counts: Counts) -> float:
        """Return the seconds of a step, or of many whose counts were added up."""
        return float(np.dot(self.seconds, counts))


def fit(samples: Sequence[Sample]) -> CostModel:
    """Find the costs that fit measured steps best: least squares of the relative errors.

    Relative, so that short steps, which are many, count as much as long ones.
    """
    rows = np.array([shape.counts / seconds for shape, seconds in samples])
    costs = _solve(rows)
    return CostModel(costs, float(np.median(abs(rows @ costs - 1))))


def _solve(rows: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, ...]:
    """Return the x >= 0 for which rows · x are as near to 1 as can be, by coordinate descent."""
    lengths = np.sqrt((rows**2).sum(axis=0))
    lengths[lengths == 0] = 1.0
    scaled = rows / lengths
    products = scaled.T @ scaled
    targets = scaled.sum(axis=0)
    x = np.zeros(len(lengths))
    for _ in range(MAX_SWEEPS):
        before = x.copy()
        for place, row in enumerate(products):
            if row[place] > 0:  # else no step has any of it
                x[place] = max(0.0, x[place] + (targets[place] - row @ x) / row[place])
        if abs(x - before).max() < 1e-9 * x.max():
            break
    return tuple((x / lengths).tolist())


# Of a config, what says where it comes from, not what is computed.
NOT_SHAPE = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
)


def find_costs_path(plan: RunPlan, *, has_kernel: bool) -> Path | None:
    """Return where costs are kept, for exactly this work; None: there is no cache folder."""
    folder = make_cache_folder()
    if folder is None:
        return None
    shape = {
        name: value
        for name, value in plan.checkpoint.config.to_dict().items()
        if name not in NOT_SHAPE and not name.endswith("token_id")
    }
    on_gpu = plan.device.type == "cuda"
    config = plan.config
    machine = (
        torch.cuda.get_device_name(plan.device)
        if on_gpu
        else processor.describe_processor()
    )
    parts = [
        __version__,
        torch.__version__,
        platform.machine(),
        machine,
        str(choose_num_threads(config.threads, torch.get_num_threads(), 1)),
        json.dumps(shape, sort_keys=True, default=str),
        str(config.max_layers),
        str(plan.dtype),
        f"torch.{plan.held_in}",
        str(plan.kv_dtype),
        str(has_kernel),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return folder / f"costs-{key}.json"


def write_costs(path: Path, costs: CostModel, model: str) -> None:
    """Write costs; the model's name is for people."""
    fields = {
        "model": model,
        "median_error": costs.error,
        "whole_runs": costs.whole_runs,
        "seconds": dict(zip(COSTS, costs.seconds, strict=True)),
    }
    try:
        with replacing_file(path, is_durable=False) as file:
            file.write(json.dumps(fields, indent=2).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"what was measured cannot be kept: {error}") from error


def load_costs(path: Path) -> CostModel | None:
    """Read costs; None: they were never measured, or the file is damaged."""
    try:
        fields = json.loads(path.read_text())
        seconds = tuple(float(fields["seconds"][name]) for name in COSTS)
        whole_runs = tuple(map(float, fields["whole_runs"]))
        if not whole_runs:
            return None
        return CostModel(seconds, float(fields["median_error"]), whole_runs)
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""What a step takes, from its shape: a sum of few costs, fitted to measured steps.

It knows numbers only: nothing of models, and nothing of where costs are kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fminfer.compute.step import Step

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
PROMPTS, ROWS = slice(1, 3), slice(5, 8)  # of COSTS: tokens of prompts, and decode rows
# A token's share of a product depends on how many there are: of few, reading weights sets the pace.
MANY_TOKENS, FEW_ROWS, MANY_ROWS = 128, 8, 32
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
        all_positions = 0 * step.lengths if step.is_whole else step.positions
        lengths, positions = step.lengths[~is_one], all_positions[~is_one]
        return cls(
            num_prompt_tokens=int(lengths.sum()),
            num_prompt_keys=int((lengths * positions + lengths * (lengths + 1) // 2).sum()),
            num_chunk_keys=int((positions + lengths).sum()),
            num_rows=int(is_one.sum()),
            num_row_keys=int((all_positions[is_one] + 1).sum()),
            num_logits=len(step.draws) + len(step.scores),
            num_random=int((step.draws["temperature"] > 0).sum()),
        )

    @property
    def counts(self) -> Counts:
        """Return how often each of COSTS is to be paid."""
        few, more = min(self.num_rows, FEW_ROWS), min(self.num_rows, MANY_ROWS)
        first = min(self.num_prompt_tokens, MANY_TOKENS)
        counts = [1, first, self.num_prompt_tokens - first, self.num_prompt_keys]
        counts += [self.num_chunk_keys, few, more - few, self.num_rows - more, self.num_row_keys]
        counts += [self.num_logits > 0, self.num_logits, self.num_random]
        return np.array(counts, np.float64)


@dataclass(slots=True, frozen=True)
class CostModel:
    """Seconds of each of COSTS, none below 0, and how well they fit."""

    seconds: tuple[float, ...]
    error: float  # median, over the measured steps, of |predicted / measured - 1|
    whole_runs: tuple[float, ...] = (1.0,)  # measured / predicted of runs that were not fitted

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
    model = CostModel(_solve(rows), 0.0)
    errors = [abs(model.predict_s(shape.counts) / seconds - 1) for shape, seconds in samples]
    return CostModel(model.seconds, statistics.median(errors))


def _solve(rows: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, ...]:
    """Return the x >= 0 for which every row · x is as near to 1 as can be, by coordinate descent.

    Each column is scaled to length 1 first.
    """
    lengths = np.sqrt((rows**2).sum(axis=0))
    lengths[lengths == 0] = 1.0
    scaled = rows / lengths
    products, targets, x = scaled.T @ scaled, scaled.sum(axis=0), np.zeros(len(lengths))
    for _ in range(MAX_SWEEPS):
        before = x.copy()
        for place, row in enumerate(products):
            if row[place] > 0:  # else no step has any of it
                x[place] = max(0.0, x[place] + (targets[place] - row @ x) / row[place])
        if abs(x - before).max() < 1e-9 * x.max():
            break
    return tuple((x / lengths).tolist())

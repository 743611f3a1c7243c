"""Costs of steps: what a step is charged for adds up, and more work never costs less."""

from __future__ import annotations

import json
from dataclasses import astuple, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fminfer.core.errors import UsageError
from fminfer.estimate.cost_model import (
    COSTS,
    FEW_ROWS,
    IS_SPREAD,
    MANY_ROWS,
    MANY_TOKENS,
    PROMPTS,
    ROWS,
    SPREAD_COSTS,
    CostModel,
    StepWork,
    fit,
    load_costs,
    no_counts,
    write_costs,
)

PRICES = CostModel(tuple(float(2**n) for n in range(len(COSTS))), 0.0)
WORK = StepWork(
    num_prompt_tokens=300,
    num_prompt_keys=5000,
    num_chunk_keys=700,
    num_rows=40,
    num_row_keys=900,
    num_logits=41,
    num_random=7,
)


def charged(work: StepWork) -> dict[str, float]:
    return dict(zip(COSTS, work.counts.tolist(), strict=True))


def test_each_cost_is_charged_by_name() -> None:
    assert charged(WORK) == {
        "a step": 1,
        "a prompt token of a step's first 128": 128,
        "a prompt token beyond them": 172,
        "a key that a prompt token sees": 5000,
        "a key that a chunk of a prompt reads": 700,
        "a decode row of a step's first 8": 8,
        "a decode row of the next 24": 24,
        "a decode row beyond them": 8,
        "a key that a decode row sees": 900,
        "a step that draws or scores": 1,
        "a token that is drawn or scored": 41,
        "a token that is drawn at random": 7,
    }
    assert PRICES.predict_s(WORK.counts) == sum(
        2**n * count for n, count in enumerate(charged(WORK).values())
    )


def test_the_named_costs_have_the_places_that_others_read() -> None:
    assert [name for name in COSTS[PROMPTS] if "prompt token" in name] == [*COSTS[1:3]]
    assert all(name.startswith("a decode row") for name in COSTS[ROWS])
    spread = [name for name, is_one in zip(COSTS, IS_SPREAD, strict=True) if is_one]
    assert spread == [*SPREAD_COSTS]


@pytest.mark.parametrize("num", [0, 1, FEW_ROWS, FEW_ROWS + 1, MANY_ROWS, 100])
def test_every_row_and_every_prompt_token_is_charged_once(num: int) -> None:
    counts = replace(WORK, num_rows=num, num_prompt_tokens=num * 4).counts
    assert counts[ROWS].sum() == num and counts[PROMPTS].sum() == num * 4
    assert counts[ROWS.start] == min(num, FEW_ROWS)
    assert counts[ROWS][:2].sum() == min(num, MANY_ROWS)
    assert counts[PROMPTS.start] == min(num * 4, MANY_TOKENS)


@pytest.mark.parametrize("name", [field.name for field in fields(StepWork)])
def test_more_work_never_costs_less(name: str) -> None:
    """Whatever the costs are: none is below 0, so no count may fall."""
    counts = [replace(WORK, **{name: num}).counts for num in range(0, 300, 3)]
    for less, more in pairwise(counts):
        assert (more >= less).all() and more.sum() > less.sum()


def test_the_seconds_of_steps_add_up() -> None:
    works = [WORK, replace(WORK, num_rows=3), StepWork(*[0] * 7)]
    total = sum((work.counts for work in works), no_counts())
    assert PRICES.predict_s(total) == sum(
        PRICES.predict_s(work.counts) for work in works
    )
    assert PRICES.predict_s(no_counts()) == 0
    assert PRICES.predict_s(StepWork(*[0] * 7).counts) == 1, "a step that does nothing"


def test_no_cost_is_below_nothing_where_measurements_contradict() -> None:
    """Longer steps that took less time: a line through them would fall."""
    samples = [
        (StepWork(num, 0, 0, 0, 0, 0, 0), seconds)
        for num, seconds in ((1, 3.0), (50, 2.0), (100, 1.0))
    ]
    found = fit(samples)
    assert min(found.seconds) == 0 and found.seconds[0] > 1
    assert 0 < found.error < 1


def test_the_error_is_the_median_of_what_is_left() -> None:
    works = [StepWork(0, 0, 0, 0, 0, 0, 0)] * 3
    found = fit(list(zip(works, (1.0, 1.0, 2.0), strict=True)))
    # (1, 1, 1/2) · x nearest to (1, 1, 1)
    assert found.seconds[0] == pytest.approx(10 / 9)
    assert found.error == pytest.approx(1 / 9)
    assert not any(found.seconds[1:])


def test_a_whole_run_takes_the_median_of_those_measured() -> None:
    assert CostModel(PRICES.seconds, 0.1).whole_run == 1.0
    assert CostModel(PRICES.seconds, 0.1, (3.0, 1.2, 1.1)).whole_run == 1.2


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = replace(PRICES, error=0.25, whole_runs=(1.5, 0.75))
    write_costs(path, costs, "a model")
    assert load_costs(path) == costs
    found = json.loads(path.read_text())
    assert found["model"] == "a model" and [*found["seconds"]] == [*COSTS]
    with pytest.raises(UsageError, match="cannot be kept"):
        write_costs(tmp_path / "nowhere" / "costs.json", costs, "a model")


@pytest.mark.parametrize("name", ["seconds", "whole_runs", "median_error"])
@pytest.mark.parametrize("value", [None, [], {}, "x", [None], {"a step": 1}])
def test_damaged_costs_are_none(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert load_costs(path) is None
    write_costs(path, PRICES, "a model")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert load_costs(path) is None


def test_counts_are_numbers_of_64_bits() -> None:
    """A run's keys are billions: floats of 32 bits would lose single ones."""
    large = replace(WORK, num_prompt_keys=2**40 + 1)
    assert large.counts.dtype == np.float64
    assert large.counts[COSTS.index("a key that a prompt token sees")] == 2**40 + 1
    assert astuple(large)[1] == 2**40 + 1

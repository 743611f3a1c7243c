"""What a request held goes with its answer, or with its cancelling: no collection is needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import fminfer
from fminfer.engine.sequence import PromptState, RequestState, Sequence

LONG = {"prompt": [5] * 40, "max_tokens": 30, "ignore_eos": True, "n": 3, "logprobs": 1}
LABELS = [f" {first} {last}" for first in ("north", "up", "e") for last in ("a", "b c")]
LABELLED = {
    "prompt": [5] * 40,
    "structured_outputs": {"choice": LABELS, "probabilities": True},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32")
    yield engine
    engine.close()


def count_states() -> int:
    kinds = (PromptState, RequestState, Sequence)
    return sum(type(each) in kinds for each in gc.get_objects())


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("request_fields", [LONG, LABELLED], ids=["drawn", "labels"])
def test_nothing_is_left_for_the_collector(
    engine: fminfer.Engine,
    request_fields: dict[str, Any],
    num_steps: int,
    is_streamed: bool,
) -> None:
    """A server's memory grew by a hundred megabytes between two full collections."""
    gc.collect()
    gc.disable()
    try:
        before = count_states()
        ids = [engine.add(request_fields, is_streamed=is_streamed) for _ in range(6)]
        for _ in range(num_steps):
            engine.step()
        for request_id in ids[:3]:
            engine.cancel(request_id)
        while engine.has_work:
            engine.step()
        assert count_states() == before
    finally:
        gc.enable()


def test_only_runs_over_lines_count_what_could_be_shared(
    engine: fminfer.Engine,
) -> None:
    """That takes a hash of each token, for a figure that only a run's summary has."""
    counted = engine.stats.num_counted_tokens
    engine.add(LONG)
    while engine.has_work:
        engine.step()
    assert engine.stats.num_counted_tokens == counted
    list(engine.run([LONG]))
    assert engine.stats.num_counted_tokens == counted + 40

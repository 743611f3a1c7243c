"""Rows enter with room for what they will likely draw, and are fed again if that was
too little."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fminfer
from fminfer.contract.envelope import Line
from fminfer.core.errors import StoppedError
from fminfer.engine import reservation
from fminfer.engine.reservation import MIN_ROWS_SEEN, ExpectedLengths
from fminfer.engine.sequence import Sequence
from tests.conftest import IS_ALL
from tests.engine.remembering import VOCAB
from tests.engine.test_prefix import Bench


def rows(
    seed: int, count: int, max_tokens: int, share_of_ends: float
) -> list[dict[str, Any]]:
    """Draw requests that each token ends with the given probability, at the latest after all."""
    rng = random.Random(seed)
    ends = list(range(round(share_of_ends * VOCAB)))
    return [
        {
            "prompt": [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stop_token_ids": ends,
            "logprobs": rng.choice([None, 2]),
            "echo": rng.random() < 0.3,
        }
        for _ in range(count)
    ]


def test_lengths_are_learned_for_rows_of_about_the_same_limit() -> None:
    lengths = ExpectedLengths()
    for _ in range(MIN_ROWS_SEEN - 1):
        lengths.learn(512, 20)
    assert lengths.predict(512) == 512, "too few have ended"
    lengths.learn(512, 20)
    assert lengths.predict(512) == lengths.predict(700) == 20
    assert lengths.predict(100) == 100, "rows of another kind"
    assert lengths.predict(100_000) == 1024, (
        "a chat that may fill the context takes not all of it"
    )
    for _ in range(500):
        lengths.learn(600, 300)
    assert 300 <= lengths.predict(512) <= 310, "what is long ago is forgotten"
    for length in (10, 500) * 50:
        lengths.learn(512, length)
    assert 450 < lengths.predict(512) < 512, "a deviation more than the mean"


def test_early_ends_let_more_rows_run_and_change_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = rows(1, 300, 100, 0.1)
    tight = Bench(has_cache=True, block_size=4, num_blocks=200, chunk=64, max_rows=64)
    roomy = Bench(has_cache=True, block_size=4, num_blocks=9000, chunk=64, max_rows=64)
    answers = tight.answers(requests)
    assert roomy.answers(requests) == answers
    assert roomy.loop.stats.num_put_back == 0
    stats = tight.loop.stats
    assert stats.max_rows_running > 2 * (200 * 4 // 115), (
        "as many as fit with all they may draw"
    )
    assert 0 < stats.num_put_back < 30
    # as if nothing could be learned
    monkeypatch.setattr(reservation, "MIN_ROWS_SEEN", 10**9)
    careful = Bench(has_cache=True, block_size=4, num_blocks=200, chunk=64, max_rows=64)
    assert careful.answers(requests) == answers
    assert careful.loop.stats.num_put_back == 0
    assert stats.num_steps < 0.6 * careful.loop.stats.num_steps


def test_rows_that_outgrow_what_was_learned_are_fed_again_once() -> None:
    """First they end early; then none does, and most of those that run must make room."""
    requests = rows(2, 40, 60, 0.9) + rows(3, 40, 60, 0.0)
    for request in requests:
        request["max_tokens"] = 60
    bench = Bench(has_cache=True, block_size=4, num_blocks=100, chunk=64, max_rows=64)
    roomy = Bench(has_cache=False, block_size=4, num_blocks=9000, chunk=64, max_rows=64)
    assert bench.answers(requests) == roomy.answers(requests)
    stats = bench.loop.stats
    assert 5 < stats.num_put_back <= 40, "each at most once"
    assert stats.num_again_tokens <= stats.num_put_back * 90
    fed = stats.num_prompt_tokens - stats.num_again_tokens + stats.num_cached_tokens
    assert fed == sum(len(request["prompt"]) for request in requests), (
        "the prompts themselves"
    )


def test_a_prompt_is_reported_as_cached_only_if_it_was() -> None:
    requests = rows(4, 100, 60, 0.1)
    for i, request in enumerate(requests):
        request["prompt"][0] = i  # no two share anything
    bench = Bench(has_cache=True, block_size=2, num_blocks=120, chunk=16, max_rows=40)
    bench.answers(requests)
    stats = bench.loop.stats
    assert stats.num_put_back > 0 and stats.num_cached_tokens == 0
    again = sum(len(r["prompt"]) for r in requests) + stats.num_again_tokens
    assert stats.num_prompt_tokens == again, (
        "what was found of them in the cache was not fed"
    )


def test_a_row_that_is_put_back_has_the_grace_like_those_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No line is taken in any more, and still it enters again."""
    requests = rows(2, 40, 60, 0.9) + rows(3, 200, 60, 0.0)
    bench = Bench(has_cache=True, block_size=4, num_blocks=100, chunk=64, max_rows=64)
    lines = [
        Line(0, i, json.dumps(r).encode()) for i, r in enumerate(requests, start=1)
    ]
    scheduler = bench.loop._scheduler
    victims = list[int]()
    found = list[int]()
    preempt = scheduler._preempt_row

    def stop_then(sequence: Sequence) -> None:
        preempt(sequence)
        # lines of one length keep their order
        victims.append(sequence.prompt.owner.id + 1)
        runner.stop(60)

    monkeypatch.setattr(scheduler, "_preempt_row", stop_then)
    runner = bench.start_run()
    with pytest.raises(StoppedError):
        for record in runner.run(iter(lines)):
            found.append(record.line.number)
    assert victims and set(victims) <= set(found) and len(found) < len(lines)


@settings(
    max_examples=80 if IS_ALL else 8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(110, 500),
    chunk=st.integers(1, 40),
    num_stages=st.integers(1, 3),
    has_cache=st.booleans(),
    share_of_ends=st.sampled_from([0.02, 0.1, 0.5]),
)
def test_answers_do_not_depend_on_the_room(
    seed: int,
    block_size: int,
    num_tokens: int,
    chunk: int,
    num_stages: int,
    has_cache: bool,
    share_of_ends: float,
) -> None:
    rng = random.Random(seed)
    requests = rows(seed, 50, 60, share_of_ends)
    for request in requests:
        request["max_tokens"] = rng.choice([0, 1, 2, 33, 50, 60])
        request["temperature"] = rng.choice([0, 0, 1])
        request["n"] = rng.choice([1, 1, 1, 2]) if num_tokens > 200 else 1
        if rng.random() < 0.2:
            request["prompt"] = requests[0]["prompt"] + request["prompt"][:5]
    shape = {
        "block_size": block_size,
        "chunk": chunk,
        "num_stages": num_stages,
        "max_rows": 30,
    }
    tight = Bench(has_cache=has_cache, num_blocks=-(-num_tokens // block_size), **shape)
    roomy = Bench(has_cache=False, num_blocks=5000, **shape)
    assert tight.answers(requests) == roomy.answers(requests)
    assert tight.loop.stats.num_put_back <= len(requests)


@pytest.mark.parametrize("options", [{}, {"kernels": "off", "prefix_cache": False}])
def test_a_row_that_is_fed_again_goes_on_where_it_was(
    llama_checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    """On a real model: the same tokens, and logprobs within what a longer chunk may differ."""
    rng = random.Random(5)
    requests = [
        {
            "prompt": [rng.randrange(5, 250) for _ in range(rng.randint(3, 20))],
            "max_tokens": 100,
            "temperature": rng.choice([0, 1.0]),
            "seed": i,
            "logprobs": 1,
            "stop_token_ids": list(range(12)),
            "presence_penalty": 0.1,
        }
        for i in range(60)
    ]

    def answers(budget: int) -> tuple[list[Any], int]:
        engine = fminfer.Engine(
            str(llama_checkpoint[0]),
            dtype="float32",
            budget=budget,
            block_size=8,
            **options,
        )
        records = sorted(engine.run(requests), key=lambda record: record.line.number)
        engine.close()
        found = [record.to_dict()["result"]["choices"][0] for record in records]
        return found, engine.stats.num_put_back

    (tight, num_put_back) = answers(900)
    (roomy, none) = answers(20_000)
    assert num_put_back > 0 and none == 0
    for found, own in zip(tight, roomy, strict=True):
        assert found["text"] == own["text"]
        assert found["finish_reason"] == own["finish_reason"]
        logprobs = [choice["logprobs"]["token_logprobs"] for choice in (found, own)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)

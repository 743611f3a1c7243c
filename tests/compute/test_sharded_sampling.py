"""Logits that are spread over ranks give the draws, ranks and logprobs of those of one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.sampling.draw_kernel import DrawKernel, ScoreKernel
from fminfer.compute.sampling.masks import StepEdits
from fminfer.compute.sampling.sampler import (
    Drawer,
    Ranker,
    SamplingTensors,
    draw_tokens,
    rank_logits,
)
from fminfer.compute.sampling.sampler import sample_tokens as sample_whole
from fminfer.compute.sampling.sampler import score_tokens as score_whole
from fminfer.compute.sampling.sharded import TokenShard
from fminfer.compute.values.step import SCORE, Step, TokenLogprobs, pack_masks
from fminfer.core.messages import invert_mask, make_mask, pack_token_ids
from fminfer.core.partition import split_evenly
from tests.conftest import built_library, num_examples, span
from tests.shard_threads import make_shards
from tests.steps import make_draws

CPU = torch.device("cpu")
VOCAB = 203
ROWS = 24


@pytest.fixture(params=["plain", "compiled"])
def bodies(request: pytest.FixtureRequest) -> tuple[Ranker, Drawer]:
    if request.param == "plain":
        return rank_logits, draw_tokens
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    return ScoreKernel(built_library()), DrawKernel(built_library())


def on_all(count: int, work: Callable[[TokenShard], Any]) -> list[Any]:
    """Let each of some ranks work with its part of the vocabulary."""
    parts = tuple(split_evenly(VOCAB, count, 8))
    with ThreadPoolExecutor(count) as pool:
        shards = make_shards(count)
        return [*pool.map(lambda each: work(TokenShard(VOCAB, parts, each)), shards)]


def make_logits(rng: random.Random) -> torch.Tensor:
    """Return rows of which some are flat, some peaked, and some full of equals."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(ROWS, VOCAB, generator=generator) * rng.choice([0.1, 1.0, 6.0])
    logits[1] = 0.0
    logits[2] = (logits[2] * 2).round()
    logits[3, rng.randrange(VOCAB)] = 30.0
    logits[4] = -1e4
    logits[4, [rng.randrange(VOCAB), VOCAB - 1]] = 1.0
    return logits


def check_same(found: list[TokenLogprobs], whole: TokenLogprobs) -> None:
    for each in found:
        assert torch.equal(each.ids, whole.ids)
        assert torch.equal(each.top_ids, whole.top_ids)
        torch.testing.assert_close(each.logprobs, whole.logprobs, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(
            each.top_logprobs, whole.top_logprobs, atol=2e-6, rtol=1e-6
        )
    for each in found[1:]:  # to the last bit: ranks must decide the same
        assert all(
            torch.equal(getattr(each, n), getattr(found[0], n))
            for n in ("ids", "logprobs")
        )


@pytest.mark.parametrize("count", [2, 3, 7, 26])
def test_draws_are_those_of_one_rank(bodies: tuple[Ranker, Drawer], count: int) -> None:
    """With each filter and all together, edits of logits, bans, masks of many and of
    few tokens."""
    for number in range(num_examples(24 if count < 10 else 12)):
        check_draws(random.Random(number), count, *bodies)


def check_draws(rng: random.Random, count: int, ranker: Ranker, drawer: Drawer) -> None:
    logits = make_logits(rng)
    num_top = rng.choice([0, 1, 5, 60])
    used = rng.choice(["", "top_k", "top_p", "min_p", "top_k top_p min_p"])

    def pick(name: str, values: list[float], off: float) -> list[float]:
        return [rng.choice(values) if name in used else off for _ in range(ROWS)]

    counts = [rng.choice([0, 0, 1, 4]) for _ in range(2 * ROWS)]
    masks = [
        make_mask(pack_token_ids(sorted(rng.sample(range(VOCAB), 3)), 32)),
        make_mask(pack_token_ids([VOCAB - 1], 32)),
        make_mask(
            invert_mask(pack_token_ids(range(60, VOCAB), 32))
        ),  # no token of the last rank
        make_mask(invert_mask(pack_token_ids(rng.sample(range(VOCAB), 90), 32))),
    ]
    draws = make_draws(
        range(ROWS),
        temperature=[rng.choice([0.0, 0.3, 1.0, 2.5]) for _ in range(ROWS)],
        top_k=pick("top_k", [0, 1, 3, 40, 500], 0),
        top_p=pick("top_p", [0.05, 0.5, 0.9, 0.999, 1.0], 1.0),
        min_p=pick("min_p", [0.0, 0.001, 0.2], 0.0),
        noise=[rng.randrange(-(2**63), 2**63) for _ in range(ROWS)],
        num_edits=counts[:ROWS],
        num_banned=counts[ROWS:],
        mask=[rng.choice([-1, -1, 0, 1, 2, 3]) for _ in range(ROWS)],
    )
    num_edits = sum(counts[:ROWS])

    def ids_of(counts: list[int]) -> np.ndarray:
        return np.array(
            [i for n in counts for i in rng.sample(range(VOCAB), n)], np.int64
        )

    step = Step(
        0,
        draws=draws,
        edit_ids=ids_of(counts[:ROWS]),
        edit_bias=np.array([rng.gauss(0, 3) for _ in range(num_edits)], np.float32),
        edit_factor=np.array(
            [rng.choice([1, 1.3]) for _ in range(num_edits)], np.float32
        ),
        edit_minus=np.array(
            [rng.choice([0, 1.5]) for _ in range(num_edits)], np.float32
        ),
        banned_ids=ids_of(counts[ROWS:]),
        **pack_masks(masks),
    )
    how = SamplingTensors.from_draws(draws, CPU)
    edits = StepEdits(step, VOCAB, CPU).make_tensors(slice(0, ROWS))
    whole = sample_whole(logits, how, num_top, edits, span(logits, ranker, drawer))

    def sample_tokens(own: TokenShard) -> TokenLogprobs:
        edits = StepEdits(step, VOCAB, CPU, own.local_ids).make_tensors(slice(0, ROWS))
        part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
        made = replace(own, ranker=ranker, drawer=drawer)
        return sample_whole(part, how, num_top, edits, made)

    check_same(on_all(count, sample_tokens), whole)


def test_scores_are_those_of_one_rank(bodies: tuple[Ranker, Drawer]) -> None:
    ranker, _ = bodies
    logits = make_logits(random.Random(1))
    targets = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    for num_top in (0, 1, 5, VOCAB):

        def score_tokens(own: TokenShard, num_top: int = num_top) -> TokenLogprobs:
            part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
            return score_whole(part, targets, num_top, replace(own, ranker=ranker))

        check_same(
            on_all(3, score_tokens),
            score_whole(logits, targets, num_top, span(logits, ranker)),
        )


def test_several_scores_of_a_row_are_those_of_one_rank(
    bodies: tuple[Ranker, Drawer],
) -> None:
    """Rows of labels ask for many tokens each; one row here asks for none."""
    ranker, _ = bodies
    logits = make_logits(random.Random(3))
    rows = torch.tensor([0, 0, 0, 2, 5, 5])
    targets = torch.tensor([0, VOCAB - 1, 7, 3, VOCAB // 2, 3])
    for num_top in (0, 5):

        def score_tokens(own: TokenShard, num_top: int = num_top) -> TokenLogprobs:
            part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
            made = replace(own, ranker=ranker)
            return score_whole(part, targets, num_top, made, rows)

        expected = score_whole(logits[rows], targets, num_top, span(logits, ranker))
        check_same(on_all(3, score_tokens), expected)
        whole = score_whole(logits, targets, num_top, span(logits, ranker), rows)
        check_same([whole], expected)


def test_masks_are_scored_by_all_that_they_allow(
    bodies: tuple[Ranker, Drawer],
) -> None:
    """One rank has none of a mask's tokens, a row has several masks, one has a token beside."""
    ranker, _ = bodies
    logits = make_logits(random.Random(4))
    few = [[3], [0, 70, VOCAB - 1], [200, 201]]
    num_bytes = 32
    masks = [make_mask(pack_token_ids(ids, num_bytes)) for ids in few]
    masks.append(make_mask(invert_mask(masks[1].bits)))
    places = [0, 1, -1, 3, 2, 3, -1]
    rows = torch.tensor([0, 0, 0, 2, 5, 5, 6])
    targets = torch.tensor([0, 0, 9, 0, 0, 0, VOCAB - 1])
    step = Step(0, scores=np.zeros(len(places), SCORE), **pack_masks(masks))
    step.scores["mask"] = places

    allowed = [*few, [each for each in range(VOCAB) if each not in few[1]]]
    probs = logits.double().softmax(-1)
    expected = [
        probs[row, target if place < 0 else allowed[place]].sum().log().item()
        for row, target, place in zip(rows, targets, places, strict=True)
    ]

    def score_tokens(own: TokenShard) -> TokenLogprobs:
        part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
        edits = StepEdits(step, VOCAB, CPU, own.local_ids)
        masks = edits.make_score_masks()
        return score_whole(part, targets, 3, replace(own, ranker=ranker), rows, masks)

    whole_masks = StepEdits(step, VOCAB, CPU).make_score_masks()
    whole = score_whole(logits, targets, 3, span(logits, ranker), rows, whole_masks)
    assert whole.logprobs.tolist() == pytest.approx(expected, abs=2e-5)
    check_same(on_all(3, score_tokens), whole)
    step.scores["mask"] = -1
    assert StepEdits(step, VOCAB, CPU).make_score_masks() is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_by_every_rank(odd: float) -> None:
    """Its logprob is nan, and so it becomes an error; rows beside it are as they were."""
    logits = make_logits(random.Random(2))
    logits[5, 150] = odd
    draws = make_draws(range(ROWS), temperature=1.0, top_p=0.7, noise=range(ROWS))
    how = SamplingTensors.from_draws(draws, CPU)
    whole = sample_whole(logits, how, 1)

    def sample_tokens(own: TokenShard) -> TokenLogprobs:
        part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
        return sample_whole(part, how, 1, None, own)

    for found in on_all(2, sample_tokens):
        assert found.logprobs.isnan().tolist() == [row == 5 for row in range(ROWS)]
        others = [row for row in range(ROWS) if row != 5]
        assert torch.equal(found.ids[others], whole.ids[others])
        assert 0 <= int(found.ids[5]) < VOCAB


def test_a_draw_from_the_best_tokens_is_told_once(
    bodies: tuple[Ranker, Drawer],
) -> None:
    """Of rows that are drawn, none is left for the draw from all tokens, which tells more."""
    ranker, drawer = bodies
    logits = 9 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))
    draws = make_draws(
        range(ROWS), temperature=1.0, top_p=0.7, top_k=40, noise=range(ROWS)
    )
    how = SamplingTensors.from_draws(draws, CPU)
    rows = torch.arange(ROWS)

    def count(own: TokenShard) -> int:
        told = []
        gather = own.shards.gather
        own.shards.gather = lambda x: told.append(x) or gather(x)  # type: ignore[method-assign]
        part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
        made = replace(own, ranker=ranker, drawer=drawer)
        assert torch.equal(made.draw_tokens(part, how, rows), drawer(logits, how, rows))
        return len(told)

    assert on_all(2, count) == [1, 1]


def test_top_p_takes_its_part_of_all_tokens_that_other_filters_leave(
    bodies: tuple[Ranker, Drawer],
) -> None:
    """It took a part of what ranks told, 64 tokens each, if top_k or min_p left more."""
    ranker, drawer = bodies
    logits = 0.3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4))
    for top_k, min_p in ((150, 0.0), (0, 0.01)):
        draws = make_draws(
            range(ROWS),
            temperature=1.0,
            top_p=0.6,
            top_k=top_k,
            min_p=min_p,
            noise=range(ROWS),
        )
        how = SamplingTensors.from_draws(draws, CPU)
        rows = torch.arange(ROWS)

        def take(own: TokenShard, how: SamplingTensors = how) -> torch.Tensor:
            part = logits[:, own.local_ids.start : own.local_ids.stop].contiguous()
            return replace(own, ranker=ranker, drawer=drawer).draw_tokens(
                part, how, torch.arange(ROWS)
            )

        assert all(
            torch.equal(each, drawer(logits, how, rows)) for each in on_all(2, take)
        )

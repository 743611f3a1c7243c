"""The noise of draws: the same bits as by its definition, uniform, and unrelated."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from fminfer.compute.sampling.sampler import compute_gumbel_noise, compute_token_bits
from fminfer.engine.noise import make_step_noise
from tests.compute.test_distribution import NORMAL_QUANTILE, check_counts

WORD = 2**32 - 1
KEY = bytes(range(16))


def mix(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x7FEB352D & WORD
    bits = (bits ^ bits >> 15) * 0x846CA68B & WORD
    return bits ^ bits >> 16


def test_bits_and_noise_are_as_defined() -> None:
    noise = [
        0,
        -1,
        1,
        2**63 - 1,
        -(2**63),
        2**32,
        -(2**32),
        *(make_step_noise(KEY, i) for i in range(9)),
    ]
    vocab = 300
    bits = compute_token_bits(torch.tensor(noise), torch.arange(vocab))
    values = compute_gumbel_noise(torch.tensor(noise), torch.arange(vocab))
    for row, number in enumerate(noise):
        for token in range(vocab):
            right = mix(mix(token ^ number & WORD) ^ number >> 32 & WORD)
            assert int(bits[row, token]) & WORD == right
            uniform = (right + 0.5) / 2**32
            assert values[row, token].item() == pytest.approx(
                -math.log(-math.log1p(-uniform))
            )


def test_the_mixer_spreads_each_bit() -> None:
    """Each bit of a token's id and of the noise flips each bit of the outcome half of
    the time."""
    count = 20_000
    noise = torch.tensor([make_step_noise(KEY, i) for i in range(count)])
    ids = torch.tensor([0, *(1 << bit for bit in range(10))])
    plain, *near = compute_token_bits(noise, ids).split(1, 1)
    near += [
        compute_token_bits(
            noise ^ (1 << bit if bit < 63 else -(2**63)), torch.arange(1)
        )
        for bit in range(64)
    ]
    shifts = torch.arange(32)
    for bit, other in enumerate(near):
        shares = ((plain ^ other) >> shifts & 1).double().mean(0)
        assert float((shares - 0.5).abs().max()) < 5 * 0.5 / count**0.5, bit


@cache
def noise_of_steps(count: int) -> torch.Tensor:
    return torch.tensor([make_step_noise(KEY, step) for step in range(count)])


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64, 1000])
def test_noise_of_tokens_and_of_steps_is_unrelated(lag: int) -> None:
    """Pairs of uniform numbers `lag` apart, along a vocabulary and along steps."""
    count = 120_000
    steps = noise_of_steps(count)
    for name, bits in (
        ("tokens", compute_token_bits(steps[:1], torch.arange(count))[0]),
        ("steps", compute_token_bits(steps, torch.arange(8))[:, 7]),
    ):
        values = (bits.numpy().astype(np.int64) & WORD) / 2**32
        bins = (values * 20).astype(int)
        pairs = bins[:-lag].reshape(-1) * 20 + bins[lag:]
        # each number is in one pair
        pairs = pairs[np.arange(len(pairs)) // lag % 2 == 0]
        check_counts(
            np.bincount(pairs, minlength=400), np.full(400, 1 / 400), (name, lag)
        )
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < NORMAL_QUANTILE / count**0.5, (name, lag)


def test_the_smallest_numbers_of_many_tokens_are_unrelated() -> None:
    """Those win. Two tokens of a row have them together as often as chance has it."""
    num_rows = 3000
    vocab = 3000
    noise = torch.tensor([make_step_noise(KEY, i) for i in range(num_rows)])
    bits = compute_token_bits(noise, torch.arange(vocab))
    is_small = (bits >= 0) & (bits < 2**32 // vocab)  # one a row, on average
    counts = torch.bincount(is_small.sum(-1), minlength=6).numpy()
    probs = np.array([math.exp(-1) / math.factorial(k) for k in range(5)])
    check_counts(
        np.append(counts[:5], counts[5:].sum()),
        np.append(probs, 1 - probs.sum()),
        "in a row",
    )
    together = is_small.float().T @ is_small.float()  # counts, which it holds
    pairs = int(together.triu(1).sum())
    expected = num_rows * (vocab * (vocab - 1) / 2) / vocab**2
    assert abs(pairs - expected) < NORMAL_QUANTILE * (2 * expected) ** 0.5
    near = sum(int(together.diagonal(2**power).sum()) for power in range(11))
    expected = num_rows * sum(vocab - 2**power for power in range(11)) / vocab**2
    assert abs(near - expected) < NORMAL_QUANTILE * (2 * expected) ** 0.5

"""Calls the CPU's compiled draws and ranking, and tries those of any device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import torch

from fminfer.compute.sampling.sampler import (
    Drawer,
    Racer,
    Ranker,
    Ranking,
    SamplingTensors,
    draw,
    race,
    rank,
)
from fminfer.compute.step import make_draws
from fminfer.compute.trial import Pair

TOKEN_ERROR = 1e-9  # none: the ids must be the same
MOST_TOP = 64  # of more, torch's own selection is faster
RANK_ERROR = 1e-5  # of logits and normalizers; ids are whole numbers up to 3,000
VOCAB = 3000  # of trials


class DrawKernel:
    """`sampler.draw`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.fminfer_draw

    def __call__(
        self, logits: torch.Tensor, how: SamplingTensors, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the places that some rows of (rows, vocab) logits draw, each as its own says."""
        num_rows, vocab = logits.shape
        logits = logits.float().contiguous()
        tensors = (
            (rows, torch.int64),
            (how.temperature, torch.float32),
            (how.top_p, torch.float32),
            (how.top_k, torch.int64),
            (how.min_p, torch.float32),
            (how.noise, torch.int64),
        )
        assert logits.device.type == "cpu" and vocab > 0, "logits"
        for tensor, dtype in tensors:  # the kernel trusts what it is given
            assert tensor.dtype == dtype and tensor.is_contiguous(), "how rows draw"
            assert tensor is rows or len(tensor) == num_rows, "how rows draw"
        ids = torch.empty_like(rows)
        sizes = vocab, how.first_id, len(rows)
        addresses = [tensor.data_ptr() for tensor in (*(each for each, _ in tensors), ids)]
        if self._draw(logits.data_ptr(), *sizes, *addresses, torch.get_num_threads()):
            raise MemoryError("no memory for the drawing kernel's working space")
        return ids


class ScoreKernel:
    """`sampling.rank`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._score = library.fminfer_score

    def __call__(self, logits: torch.Tensor, num_top: int) -> Ranking:
        if num_top > MOST_TOP:
            return rank(logits, num_top)
        rows, vocab = logits.shape
        assert logits.device.type == "cpu", "logits"
        assert 1 <= num_top <= vocab, "the best logits"
        logits = logits.float().contiguous()
        normalizer = torch.empty(rows, device="cpu")
        best = torch.empty((rows, num_top), device="cpu")
        best_ids = logits.new_empty((rows, num_top), dtype=torch.int64)
        found = [each.data_ptr() for each in (normalizer, best, best_ids)]
        self._score(logits.data_ptr(), rows, vocab, num_top, *found, torch.get_num_threads())
        return Ranking(normalizer, best, best_ids)


def draw_pairs(drawer: Drawer) -> Iterator[Pair]:
    """Draw with a kernel and in plain torch, once by each filter and without any.

    Then again from what masks leave: a token or two of each row, the first and last among them.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((8, VOCAB), generator=generator)
    draws = make_draws(
        range(8),
        temperature=[1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 0.7, 1.3],
        top_p=[1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.8, 1.0],
        top_k=[0, 0, 0, 0, 20, 0, 50, 0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0],
        noise=torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator).numpy(),
    )
    how = SamplingTensors.of(draws, logits.device)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    yield drawer(logits, how, rows), draw(logits, how, rows)
    later = replace(how, first_id=VOCAB)
    yield drawer(logits, later, rows), draw(logits, later, rows)
    for ids in ([0], [VOCAB - 1], [0, VOCAB - 1], [7, 1501]):
        left = torch.full_like(logits, float("-inf"))
        left[:, ids] = logits[:, ids]
        yield drawer(left, how, rows), draw(left, how, rows)


def rank_pairs(ranker: Ranker) -> Iterator[Pair]:
    """Rank logits with a kernel and in plain torch, some of them equal."""
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[1, ::7] = 4.0
    for num_top in (1, 5):
        found, expected = ranker(logits, num_top), rank(logits, num_top)
        yield found.best, expected.best
        yield found.best_ids, expected.best_ids
        yield found.normalizer, expected.normalizer


def race_pairs(racer: Racer, device: torch.device) -> Iterator[Pair]:
    """Let some rows race on a device, and in plain torch on the CPU."""
    generator = torch.Generator().manual_seed(0)
    scaled = -3 * torch.rand((8, 5000), generator=generator)
    scaled[4:, 9:4990] = float("-inf")  # masks leave as few, or fewer
    scaled[5, 1:], scaled[6, :-1] = float("-inf"), float("-inf")
    noise = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    for first_id in (0, 40_000):
        yield racer(scaled.to(device), noise.to(device), first_id), race(scaled, noise, first_id)

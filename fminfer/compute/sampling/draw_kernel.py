"""Calls the CPU's compiled draws and ranking, and tries those of any device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from fminfer.compute.sampling.sampler import (
    Drawer,
    Ranker,
    Ranking,
    SamplingTensors,
    draw_tokens,
    find_top_logits,
    rank_logits,
)
from fminfer.compute.trial import Pair, Trial
from fminfer.compute.values.step import make_draws

TOKEN_ERROR = 1e-9  # none: the ids must be the same
MOST_TOP = 64  # of more, torch's own selection is faster
RANK_ERROR = 1e-5  # of logits and normalizers; ids are whole numbers up to 3,000
VOCAB = 3000
FIRST_ID = 40_000  # of trials


class DrawKernel:
    """`sampler.draw`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.fminfer_draw

    def __call__(
        self, logits: torch.Tensor, sampling: SamplingTensors, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the places that some rows of (rows, vocab) logits draw, each as its
        own says."""
        num_rows, vocab = logits.shape
        logits = logits.float().contiguous()
        # The kernel trusts what it is given.
        assert logits.device.type == "cpu" and vocab > 0, "logits"
        for kind, tensors in (
            (torch.float32, (sampling.temperature, sampling.top_p, sampling.min_p)),
            (torch.int64, (rows, sampling.top_k, sampling.noise)),
        ):
            for tensor in tensors:
                assert tensor.dtype == kind and tensor.is_contiguous(), "how rows draw"
                assert tensor is rows or len(tensor) == num_rows, "how rows draw"
        ids = torch.empty_like(rows)
        failed = self._draw(
            logits.data_ptr(),
            vocab,
            sampling.first_id,
            len(rows),
            rows.data_ptr(),
            sampling.temperature.data_ptr(),
            sampling.top_p.data_ptr(),
            sampling.top_k.data_ptr(),
            sampling.min_p.data_ptr(),
            sampling.noise.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the drawing kernel's working space")
        return ids


class ScoreKernel:
    """`sampling.rank`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._score = library.fminfer_score

    def __call__(self, logits: torch.Tensor, num_top: int) -> Ranking:
        if num_top > MOST_TOP:  # the normalizer is the same for any number
            best, best_ids = find_top_logits(logits.float(), num_top)
            return Ranking(self(logits, 1).normalizer, best, best_ids)
        rows, vocab = logits.shape
        assert logits.device.type == "cpu", "logits"
        assert 1 <= num_top <= vocab, "the best logits"
        logits = logits.float().contiguous()
        normalizer = torch.empty(rows, device="cpu")
        best = torch.empty((rows, num_top), device="cpu")
        best_ids = logits.new_empty((rows, num_top), dtype=torch.int64)
        addresses = [each.data_ptr() for each in (normalizer, best, best_ids)]
        self._score(
            logits.data_ptr(), rows, vocab, num_top, *addresses, torch.get_num_threads()
        )
        return Ranking(normalizer, best, best_ids)


def make_draw_trial(_: None, device: torch.device) -> Trial[Drawer]:
    return Trial("draws", partial(compute_draw_pairs, device=device), TOKEN_ERROR)


def compute_draw_pairs(drawer: Drawer, device: torch.device) -> Iterator[Pair]:
    """Draw on a device with a kernel, and in plain torch on the CPU: by each filter,
    and without.

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
    cases = [(logits, 0), (logits, FIRST_ID)]
    for ids in ([0], [VOCAB - 1], [0, VOCAB - 1], [7, 1501]):
        masked = torch.full_like(logits, float("-inf"))
        masked[:, ids] = logits[:, ids]
        cases.append((masked, 0))
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    for case_logits, first_id in cases:
        there = case_logits.to(device), rows.to(device)
        device_sampling, sampling = (
            SamplingTensors.from_draws(draws, each.device)
            for each in (there[0], case_logits)
        )
        computed = drawer(
            there[0], replace(device_sampling, first_id=first_id), there[1]
        )
        yield (
            computed,
            draw_tokens(case_logits, replace(sampling, first_id=first_id), rows),
        )


def compute_rank_pairs(ranker: Ranker) -> Iterator[Pair]:
    """Rank logits with a kernel and in plain torch, some of them equal."""
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[1, ::7] = 4.0
    for num_top in (1, 5):
        computed = ranker(logits, num_top)
        expected = rank_logits(logits, num_top)
        yield computed.best, expected.best
        yield computed.best_ids, expected.best_ids
        yield computed.normalizer, expected.normalizer


RANKS_TRIAL: Trial[Ranker] = Trial("scores", compute_rank_pairs, RANK_ERROR)

"""Calls the compiled drawing of tokens on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import torch

from fminfer.compute.sampling.sampler import Drawer, Ranker, Ranking, SamplingTensors, draw, rank
from fminfer.compute.step import make_draws
from fminfer.compute.trial import Candidate, Pair, Trial

TOKEN_ERROR = 1e-9  # none: the ids must be the same
RANK_ERROR = 1e-5  # of logits and normalizers; ids are whole numbers up to 3,000


class DrawKernel:
    """`sampler.draw`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.fminfer_draw

    def __call__(
        self, logits: torch.Tensor, how: SamplingTensors, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the places that some rows of (rows, vocab) logits draw, each as its own says.

        Raises:
            MemoryError: there was none for the threads' working space.
        """
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
        failed = self._draw(
            logits.data_ptr(),
            vocab,
            how.first_id,
            len(rows),
            *(tensor.data_ptr() for tensor, _ in tensors),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the drawing kernel's working space")
        return ids


MOST_TOP = 64  # of more, torch's own selection is faster


class ScoreKernel:
    """`sampling.rank`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._score = library.fminfer_score

    def __call__(self, logits: torch.Tensor, num_top: int) -> Ranking:
        """Return the normalizers of (rows, vocab) logits, and the best `num_top`, in float32.

        Of equal logits the lowest ids come first.
        """
        if num_top > MOST_TOP:
            return rank(logits, num_top)
        rows, vocab = logits.shape
        assert logits.device.type == "cpu", "logits"
        assert 1 <= num_top <= vocab, "the best logits"
        logits = logits.float().contiguous()
        normalizer = torch.empty(rows, device="cpu")
        best = torch.empty((rows, num_top), device="cpu")
        best_ids = logits.new_empty((rows, num_top), dtype=torch.int64)
        self._score(
            logits.data_ptr(),
            rows,
            vocab,
            num_top,
            normalizer.data_ptr(),
            best.data_ptr(),
            best_ids.data_ptr(),
            torch.get_num_threads(),
        )
        return Ranking(normalizer, best, best_ids)


def draw_candidate(library: ctypes.CDLL) -> Candidate[None, Drawer]:
    """Return the kernel's draws."""
    trial: Trial[Drawer] = Trial("draws", draw_pairs, TOKEN_ERROR)
    return Candidate(lambda _: DrawKernel(library), lambda _: trial)


def rank_candidate(library: ctypes.CDLL) -> Candidate[None, Ranker]:
    """Return the kernel's ranking."""
    trial: Trial[Ranker] = Trial("scores", rank_pairs, RANK_ERROR)
    return Candidate(lambda _: ScoreKernel(library), lambda _: trial)


VOCAB = 3000


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

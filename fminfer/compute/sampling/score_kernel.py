"""Calls the compiled ranking of logits on the CPU: normalizers and the best tokens."""

from __future__ import annotations

import ctypes

import torch

from fminfer.compute.sampling.sampler import Ranking, rank

MOST_TOP = 64  # of more, torch's own selection is faster


class ScoreKernel:
    """`sampling.rank`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._score = library.fminfer_score
        self._score.argtypes = [address, *[number] * 3, *[address] * 3, ctypes.c_int]

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
        return Ranking(normalizer, best, best_ids, best_ids[:, 0])

"""Finds the tokens that win Gumbel-max draws on a GPU, in Triton. Importing it needs triton.

Each logit is read once. In plain torch the noise of all tokens goes over the GPU's memory some
thirty times: about 500 bytes a logit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from fminfer.compute.kernels.triton_kernels import race_kernel
from fminfer.compute.sampling.sampler import Racer, race
from fminfer.compute.trial import Pair

TOKENS = 2048  # that one program looks at


def triton_race(scaled: torch.Tensor, noise: torch.Tensor, first_id: int = 0) -> torch.Tensor:
    """Return the places of the highest sums of scaled logit and noise, as `sampler.race` does."""
    rows, vocab = scaled.shape
    assert scaled.dtype == torch.float32 and scaled.is_contiguous(), "scaled logits"
    assert noise.dtype == torch.int64 and noise.is_contiguous() and len(noise) == rows, "noise"
    parts = triton.cdiv(vocab, TOKENS)
    scores = torch.empty((rows, parts), dtype=torch.float64, device=scaled.device)
    winners = torch.empty((rows, parts), dtype=torch.int64, device=scaled.device)
    with torch.cuda.device_of(scaled):  # type: ignore[no-untyped-call]
        race_kernel[(rows, parts)](
            *(scaled, noise, scores, winners, vocab, first_id), SIZE=TOKENS, num_warps=8
        )
    return winners.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]


def race_pairs(racer: Racer, device: torch.device) -> Iterator[Pair]:
    """Let some rows race on a device, and in plain torch on the CPU."""
    generator = torch.Generator().manual_seed(0)
    scaled = -3 * torch.rand((8, 5000), generator=generator)
    scaled[4:, 9:4990] = float("-inf")  # masks leave as few, or fewer
    scaled[5, 1:], scaled[6, :-1] = float("-inf"), float("-inf")
    noise = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    for first_id in (0, 40_000):
        yield racer(scaled.to(device), noise.to(device), first_id), race(scaled, noise, first_id)

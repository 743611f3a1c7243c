"""Finds the tokens that win Gumbel-max draws on a GPU, in Triton. Importing it needs triton.

Each logit is read once. In plain torch the noise of all tokens goes over the GPU's memory some
thirty times: about 500 bytes a logit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fminfer.compute.trial import Pair
from fminfer.sampling import race

TOKENS = 2048  # that one program looks at


@triton.jit
def mixed(bits):
    """Mix as `gumbel.token_bits` does."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def race_kernel(
    scaled,  # (rows, vocab) float32
    noise,  # (rows,) int64
    scores,  # (rows, parts) float64
    winners,  # (rows, parts) int64
    vocab,
    SIZE: tl.constexpr,
):
    """Find the winner of some tokens of one row. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * SIZE + tl.arange(0, SIZE)
    logits = tl.load(scaled + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    words = tl.load(noise + row)
    lower, upper = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    bits = mixed(mixed(ids.to(tl.uint32) ^ lower) ^ upper)
    # Constants are float32, which has no 2^32 - 0.5.
    rest = (4294967296.0 - bits.to(tl.float64) - 0.5) * 2.3283064365386963e-10  # 2^-32
    score, place = tl.max(logits.to(tl.float64) - tl.log(-tl.log(rest)), 0, return_indices=True)
    here = row * tl.num_programs(1) + part
    tl.store(scores + here, score)
    tl.store(winners + here, (part * SIZE + place).to(tl.int64))


class TritonRace:
    """`sampling.race`, in Triton."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, scaled: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        rows, vocab = scaled.shape
        assert scaled.dtype == torch.float32 and scaled.is_contiguous(), "scaled logits"
        assert noise.dtype == torch.int64 and noise.is_contiguous() and len(noise) == rows, "noise"
        parts = triton.cdiv(vocab, TOKENS)
        scores = torch.empty((rows, parts), dtype=torch.float64, device=scaled.device)
        winners = torch.empty((rows, parts), dtype=torch.int64, device=scaled.device)
        with torch.cuda.device_of(scaled):  # type: ignore[no-untyped-call]
            race_kernel[(rows, parts)](
                *(scaled, noise, scores, winners, vocab), SIZE=TOKENS, num_warps=8
            )
        return winners.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]


def race_pairs(body: TritonRace) -> Iterator[Pair]:
    """Let some rows race with the body, and in plain torch on the CPU."""
    generator = torch.Generator().manual_seed(0)
    scaled = -3 * torch.rand((8, 5000), generator=generator)
    scaled[4:, 9:4990] = float("-inf")
    noise = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    yield body(scaled.to(body.device), noise.to(body.device)), race(scaled, noise)

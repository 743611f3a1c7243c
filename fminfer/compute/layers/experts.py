"""Mixtures of experts in plain torch, one expert after another, and the trial of compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fminfer.compute.layers import plain
from fminfer.compute.spec import Moe
from fminfer.compute.trial import Limits, Pair, Trial
from fminfer.compute.weights import Function, Weight

# (hidden states, chosen experts, their shares) → hidden states; `PackedExperts` says more.
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MAX_ERROR: Limits = {torch.float32: 2e-5, torch.bfloat16: 0.02}  # of the largest result
TRIED_TOKENS = 3


class PlainExperts:
    """The experts of a layer, one after another. The tokens of each are computed together."""

    def __init__(self, how: Moe, experts: Sequence[Function]) -> None:
        self._how, self._experts = how, experts

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        how = self._how
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=how.num_experts).tolist()
        parts = torch.split(x[order // how.top_k], counts)
        outs = [e(part) for e, part in zip(self._experts, parts, strict=True) if len(part)]
        joined = torch.cat(outs)
        out = torch.empty_like(joined)
        out[order] = joined
        weighted = out.view(len(x), how.top_k, -1) * shares[..., None]
        return weighted.sum(1).to(x.dtype)


@dataclass(slots=True, frozen=True)
class Mixture:
    """The experts of a layer that are asked for."""

    how: Moe
    up: Weight  # (experts, outputs, hidden)
    down: Weight  # (experts, hidden, size)

    def trial(self, dtype: torch.dtype) -> Trial[Mix]:
        """Return how a mixture of hidden states of a dtype is tried; each shape and format once."""
        pairs = partial(expert_pairs, asked=self, dtype=dtype)
        name = f"{self.how.num_experts} experts of {self.how.expert.size}"
        key = self.how, self.up.shape, self.up.format, self.down.format
        return Trial(name, pairs, MAX_ERROR[dtype], key)


def expert_pairs(mix: Mix, asked: Mixture, dtype: torch.dtype) -> Iterator[Pair]:
    """Mix the experts of one token and of a few, compiled and plain, in float32 between."""
    how, up, down = asked.how, asked.up, asked.down
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TRIED_TOKENS, down.shape[1], generator=generator).to(dtype)
    shares = torch.rand(TRIED_TOKENS, how.top_k, generator=generator)
    chosen = torch.arange(TRIED_TOKENS * how.top_k).view(TRIED_TOKENS, -1) % how.num_experts
    act: Function = plain.ACTIVATIONS[how.expert.activation]
    if how.expert.is_gated:
        act = partial(plain.gate, activation=how.expert.activation)
    expected = torch.zeros(x.shape)
    for token, row in enumerate(x.float()):
        for share, number in zip(shares[token], chosen[token].tolist(), strict=True):
            first, last = (w.expert(number).dequantized(torch.float32) for w in (up, down))
            inner = act(nn.functional.linear(row, first))
            expected[token] += share * nn.functional.linear(inner, last)
    for tokens in (1, TRIED_TOKENS):
        yield mix(x[:tokens], chosen[:tokens], shares[:tokens]), expected[:tokens]

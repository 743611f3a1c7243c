"""Mixtures of experts: one expert after another, or in one compiled call where that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import GATES, PLAIN
from fminfer.compute.layers.expert_kernel import ExpertKernel
from fminfer.compute.linear.product_kernel import ProductKernel
from fminfer.compute.spec import Moe
from fminfer.compute.trial import Limits, Pair, try_body
from fminfer.core.config import Kernels

Function = Callable[[torch.Tensor], torch.Tensor]
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


def serves(how: Moe) -> bool:
    """Tell whether the kernel computes such experts: no bias, an activation that it has."""
    expert = how.expert
    is_plain = not expert.has_bias and expert.limit is None
    return is_plain and expert.activation in (GATES if expert.is_gated else PLAIN)


@dataclass(slots=True)
class KernelExperts:
    """Makes compiled mixtures; each shape is tried once.

    Args:
        products: tells for which weights the kernels are best.
        dtype: of hidden states.
        asked: "require": a kernel that gives something else is refused.
    """

    kernel: ExpertKernel
    products: ProductKernel
    dtype: torch.dtype
    asked: Kernels = "auto"
    why_plain: str = ""  # why some are, though they could be packed
    _tried: dict[tuple[Moe, torch.Size], bool] = field(default_factory=dict)

    def make(self, how: Moe, up: torch.Tensor, down: torch.Tensor) -> Mix | None:
        """Return a layer's experts, or None: their products are to be made one by one.

        Args:
            up: (experts, outputs, hidden).
            down: (experts, hidden, size).
        """
        is_best = all(self.products.is_best_for(each[0], self.dtype) for each in (up, down))
        key = how, up.shape
        if not (is_best and serves(how) and self._tried.get(key, True)):
            return None
        if key in self._tried:
            return self._pack(how, up, down)
        mix, why = try_body(
            f"{how.num_experts} experts of {how.expert.size}",
            self.asked,
            lambda: self._pack(how, up, down),
            partial(expert_pairs, how=how, up=up, down=down, dtype=self.dtype),
            MAX_ERROR[self.dtype],
        )
        self.why_plain = self.why_plain or why
        self._tried[key] = mix is not None
        return mix

    def _pack(self, how: Moe, up: torch.Tensor, down: torch.Tensor) -> Mix:
        expert = how.expert
        activation = (GATES if expert.is_gated else PLAIN)[expert.activation]
        return self.kernel.pack(up, down, is_gated=expert.is_gated, activation=activation)


def expert_pairs(
    mix: Mix, how: Moe, up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype
) -> Iterator[Pair]:
    """Mix the experts of one token and of a few, compiled and plain, in float32 between."""
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
            inner = act(nn.functional.linear(row, up[number].float()))
            expected[token] += share * nn.functional.linear(inner, down[number].float())
    for tokens in (1, TRIED_TOKENS):
        yield mix(x[:tokens], chosen[:tokens], shares[:tokens]), expected[:tokens]

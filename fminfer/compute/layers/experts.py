"""Mixtures of experts: in plain torch, one expert after another, and compiled for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fminfer.compute.kernels.calls import ExpertCall
from fminfer.compute.layers import plain
from fminfer.compute.layers.layer_kernels import activations_of
from fminfer.compute.linear.product_kernel import PackedPart, ProductKernel, kernel_takes
from fminfer.compute.spec import Moe
from fminfer.compute.trial import Candidate, Limits, Pair, Trial
from fminfer.compute.weights import KERNEL_TYPES, Function, Weight

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


class Workspace:
    """Memory that calls work in, one after another: it is near, and not had again each time."""

    _bytes: torch.Tensor

    def __init__(self) -> None:
        self.drop()

    def take(self, size: int) -> torch.Tensor:
        """Return so many bytes; the next call may return the same."""
        if len(self._bytes) < size:
            self.drop()  # not both at once
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes

    def drop(self) -> None:
        """Give it back."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


class ExpertKernel:
    """The experts of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.products, self.mix = ProductKernel(library), library.fminfer_mix
        self.workspace = Workspace()  # of all layers, one after another

    def pack(self, up: Weight, down: Weight, *, is_gated: bool, activation: int) -> PackedExperts:
        """Return experts of the types and sizes that the kernel of products can pack.

        Args:
            up: (experts, size, hidden), or (experts, 2 * size, hidden): gates first.
            down: (experts, hidden, size).
            activation: of `layer_kernels`.
        """
        num_experts, hidden, size = down.shape
        halves = 2 if is_gated else 1
        assert up.shape == (num_experts, halves * size, hidden), "weights of experts"
        pack = self.products.pack_part
        packed_up = pack(up.format, up.tensors[0], halves, hidden)
        packed_down = pack(down.format, down.tensors[0], 1, size)
        sizes = (num_experts, hidden, size)
        return PackedExperts(self, packed_up, packed_down, *sizes, is_gated, activation)


@dataclass(slots=True, frozen=True)
class PackedExperts:
    """The MLPs of all experts of a layer."""

    kernel: ExpertKernel
    up: PackedPart  # of all experts
    down: PackedPart
    num_experts: int
    hidden: int
    size: int  # the inputs of `down`
    is_gated: bool
    activation: int

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts, times their shares; as x.

        Raises:
            MemoryError: there was none for the threads' working space.

        Args:
            x: (tokens, hidden), of a type that the weights are multiplied by.
            chosen: (tokens, top_k) int64, of which none may be beyond the last expert.
            shares: (tokens, top_k) float32.
        """
        tokens, top_k = chosen.shape
        assert x.is_cpu and x.shape == (tokens, self.hidden), "hidden states"
        assert chosen.dtype == torch.int64 and shares.dtype == torch.float32, "a choice"
        assert shares.shape == chosen.shape, "a choice"
        x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
        out = torch.empty_like(x)
        space = self.kernel.workspace.take(4 * tokens * top_k * (self.hidden + self.size))
        arguments = ExpertCall(
            *(x.data_ptr(), self.up.call, self.down.call),
            *(each.data_ptr() for each in (chosen, shares, out, space)),
            *(tokens, top_k, self.num_experts, self.hidden, self.size),
            *(self.is_gated, self.activation, KERNEL_TYPES[x.dtype], torch.get_num_threads()),
        )
        if self.kernel.mix(ctypes.byref(arguments)):
            self.kernel.workspace.drop()  # for the halves of the step
            raise MemoryError("no memory for the experts' working space")
        return out


def serves(how: Moe) -> bool:
    """Tell whether the kernel computes such experts: no bias, an activation that it has."""
    expert = how.expert
    is_plain = not expert.has_bias and expert.limit is None
    return is_plain and expert.activation in activations_of(expert)


def expert_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[Mixture, Mix]:
    """Return the kernel's mixtures, of hidden states of a dtype."""
    kernel = ExpertKernel(library)

    def serves_all(asked: Mixture) -> bool:
        weights = (asked.up, asked.down)
        is_best = all(kernel_takes(w.format, dtype) and len(w.tensors) == 1 for w in weights)
        return is_best and serves(asked.how) and all(map(ProductKernel.can_pack, weights))

    def make(asked: Mixture) -> Mix:
        expert = asked.how.expert
        activation = activations_of(expert)[expert.activation]
        return kernel.pack(asked.up, asked.down, is_gated=expert.is_gated, activation=activation)

    return Candidate(make, partial(Mixture.trial, dtype=dtype), serves_all)

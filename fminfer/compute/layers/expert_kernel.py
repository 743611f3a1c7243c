"""Calls the compiled mixture of experts, in float32 or bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch

from fminfer.compute.layers.experts import Mix, Mixture
from fminfer.compute.layers.layer_kernels import activations_of
from fminfer.compute.linear.product_kernel import (
    TYPES,
    PackedCall,
    PackedPart,
    ProductKernel,
    kernel_takes,
)
from fminfer.compute.spec import Moe
from fminfer.compute.trial import Candidate
from fminfer.compute.weights import Weight
from fminfer.compute.workspace import Workspace


class ExpertCall(ctypes.Structure):
    """What the kernel is called with; calls.h says what each is."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *[(name, PackedCall) for name in ("up", "down")],
        *[(name, ctypes.c_void_p) for name in ("chosen", "shares", "out", "space")],
        *[(name, ctypes.c_int64) for name in ("tokens", "top_k", "num_experts", "hidden", "size")],
        *[(name, ctypes.c_int64) for name in ("is_gated", "activation", "x_type", "num_threads")],
    )


class ExpertKernel:
    """The experts of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.products, self.mix = ProductKernel(library), library.fminfer_mix
        self.mix.argtypes = [ctypes.POINTER(ExpertCall)]
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
            *(self.is_gated, self.activation, TYPES[x.dtype], torch.get_num_threads()),
        )
        if self.kernel.mix(arguments):
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

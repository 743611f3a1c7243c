"""Calls the compiled mixture of experts, in float32 or bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch

from fminfer.compute.layers.bodies import GATES, PLAIN
from fminfer.compute.layers.experts import Mix, Mixture
from fminfer.compute.linear.product_kernel import TYPES, ProductKernel, kernel_takes
from fminfer.compute.spec import Moe
from fminfer.compute.trial import Candidate
from fminfer.compute.workspace import Workspace


class ExpertCall(ctypes.Structure):
    """What the kernel is called with; calls.h says what each is."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "up", "down", "chosen", "shares")],
        *[(name, ctypes.c_void_p) for name in ("out", "space")],
        *[(name, ctypes.c_int64) for name in ("tokens", "top_k", "num_experts", "hidden", "size")],
        *[(name, ctypes.c_int64) for name in ("is_gated", "activation", "x_type", "weight_type")],
        ("num_threads", ctypes.c_int64),
    )


class ExpertKernel:
    """The experts of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._pack, self.mix = library.fminfer_pack_experts, library.fminfer_mix
        self._pack.argtypes = [address, number, number, number, number, address, number]
        self.mix.argtypes = [ctypes.POINTER(ExpertCall)]
        library.fminfer_panel.restype = number
        self._panel: int = library.fminfer_panel()
        self.workspace = Workspace()  # of all layers, one after another

    def pack(
        self, up: torch.Tensor, down: torch.Tensor, *, is_gated: bool, activation: int
    ) -> PackedExperts:
        """Return experts of the types and sizes that the kernel of products can pack.

        Args:
            up: (experts, size, hidden), or (experts, 2 * size, hidden): gates first.
            down: (experts, hidden, size).
            activation: of `layer_kernels`.
        """
        num_experts, hidden, size = down.shape
        halves = 2 if is_gated else 1
        assert up.shape == (num_experts, halves * size, hidden), "weights of experts"
        assert up.dtype == down.dtype, "weights of experts"
        packed = self._pack_all(up, halves), self._pack_all(down, 1)
        sizes = (num_experts, hidden, size)
        return PackedExperts(self, *packed, *sizes, is_gated, activation)

    def _pack_all(self, weight: torch.Tensor, parts: int) -> torch.Tensor:
        """Pack a weight, (experts, parts * outputs, inputs)."""
        weight = weight.contiguous()
        experts, all_outputs, inputs = weight.shape
        outputs = all_outputs // parts
        whole = -(-outputs // self._panel) * self._panel
        packed = weight.new_empty((experts, parts * whole, inputs))
        units, num_threads = inputs * weight.itemsize // 4, torch.get_num_threads()
        self._pack(
            *(weight.data_ptr(), experts, parts, outputs, units),
            *(packed.data_ptr(), num_threads),
        )
        return packed


@dataclass(slots=True, frozen=True)
class PackedExperts:
    """The MLPs of all experts of a layer."""

    kernel: ExpertKernel
    up: torch.Tensor  # in the kernel's own order
    down: torch.Tensor
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
            x: (tokens, hidden), of the weights' type or float32.
            chosen: (tokens, top_k) int64, of which none may be beyond the last expert.
            shares: (tokens, top_k) float32.
        """
        tokens, top_k = chosen.shape
        assert x.is_cpu and x.shape == (tokens, self.hidden), "hidden states"
        assert x.dtype in (torch.float32, self.up.dtype), "hidden states"
        assert chosen.dtype == torch.int64 and shares.dtype == torch.float32, "a choice"
        assert shares.shape == chosen.shape, "a choice"
        x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
        out = torch.empty_like(x)
        space = self.kernel.workspace.take(4 * tokens * top_k * (self.hidden + self.size))
        arguments = ExpertCall(
            *(each.data_ptr() for each in (x, self.up, self.down, chosen, shares, out, space)),
            *(tokens, top_k, self.num_experts, self.hidden, self.size),
            *(self.is_gated, self.activation, TYPES[x.dtype], TYPES[self.up.dtype]),
            torch.get_num_threads(),
        )
        if self.kernel.mix(arguments):
            self.kernel.workspace.drop()  # for the halves of the step
            raise MemoryError("no memory for the experts' working space")
        return out


def serves(how: Moe) -> bool:
    """Tell whether the kernel computes such experts: no bias, an activation that it has."""
    expert = how.expert
    is_plain = not expert.has_bias and expert.limit is None
    return is_plain and expert.activation in (GATES if expert.is_gated else PLAIN)


def expert_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[Mixture, Mix]:
    """Return the kernel's mixtures, of hidden states of a dtype."""
    kernel = ExpertKernel(library)

    def serves_all(asked: Mixture) -> bool:
        weights = (asked.up, asked.down)
        is_best = all(kernel_takes(each.format, dtype) for each in weights)
        return (
            is_best
            and serves(asked.how)
            and all(ProductKernel.can_pack(each.tensors[0][0]) for each in weights)
        )

    def make(asked: Mixture) -> Mix:
        expert = asked.how.expert
        activation = (GATES if expert.is_gated else PLAIN)[expert.activation]
        up, down = asked.up.tensors[0], asked.down.tensors[0]
        return kernel.pack(up, down, is_gated=expert.is_gated, activation=activation)

    return Candidate(make, partial(Mixture.trial, dtype=dtype), serves_all)

"""Bodies of norms, rotary positions and activations: compiled for what kernels serve, or plain."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch

from fminfer.compute.layers import plain
from fminfer.compute.layers.layer_kernels import GELU, GELU_TANH, SILU, LayerKernels
from fminfer.compute.spec import Norm, Rope
from fminfer.compute.trial import Candidate, Limits, Pair, Trial
from fminfer.compute.weights import Function

PART_ERRORS: Limits = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 0.016}


class PartKernels(Protocol):
    """The compiled parts of layers, from `layer_kernels` (CPU) or `triton_layers` (GPU).

    Each passes over memory once, computes in float32 and rounds once.
    """

    @property
    def activations(self) -> dict[str, int]:
        """The numbers of those that `gate` and `gelu` compute."""

    def can_norm(
        self, how: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> bool: ...

    def norm(
        self, x: torch.Tensor, how: Norm, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor: ...

    def add_and_norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        how: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

    def gate(self, both: torch.Tensor, activation: int) -> torch.Tensor: ...

    def gelu(self, x: torch.Tensor, activation: int) -> torch.Tensor: ...


class NormBody:
    """A norm with its weights, on (…, width)."""

    def __init__(
        self,
        how: Norm,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        kernels: PartKernels | None,
    ) -> None:
        self._add_and_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        if kernels is None or weight is None or not kernels.can_norm(how, weight, bias):
            self._norm: Function = lambda x: plain.norm(x, how, weight, bias)
            return
        own = weight.contiguous()
        self._norm = lambda x: kernels.norm(x, how, own, bias)
        self._add_and_norm = lambda x, more: kernels.add_and_norm(x, more, how, own, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)

    def of_sum(
        self, x: torch.Tensor, more: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + more, both (tokens, width), and the norm of that sum."""
        if more is None:
            return x, self(x)
        if self._add_and_norm is not None:
            return self._add_and_norm(x, more)
        x = x + more
        return x, self(x)


class RotateBody:
    """Rotary positions, on (tokens, heads, head_dim)."""

    def __init__(self, how: Rope, kernels: PartKernels | None) -> None:
        self._how, self._kernels = how, None if how.is_interleaved else kernels

    def turns(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look up the cosines and sines of a step's tokens in a `plain.rotary_table`."""
        found = table[:, positions]
        return found if self._kernels is None else found.repeat(1, 1, 2)  # for both halves

    def __call__(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        if self._kernels is None:
            return plain.rotate(x, self._how, turns)
        return self._kernels.rotate(x, *turns)


class Parts:
    """Makes norms, rotary positions and activations.

    Args:
        kernels: compute those that they serve; None: all are plain torch.
    """

    def __init__(self, kernels: PartKernels | None = None) -> None:
        self.kernels = kernels

    def norm(self, how: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None) -> NormBody:
        return NormBody(how, weight, bias, self.kernels)

    def rotate(self, how: Rope) -> RotateBody:
        return RotateBody(how, self.kernels)

    def gate(self, activation: str) -> Function:
        if self.kernels is None or activation not in self.kernels.activations:
            return lambda both: plain.gate(both, activation)
        kernel, number = self.kernels.gate, self.kernels.activations[activation]
        return lambda both: kernel(both, number)

    def activation(self, name: str) -> Function:
        if self.kernels is None or name not in self.kernels.activations:
            return plain.ACTIVATIONS[name]
        return partial(self.kernels.gelu, activation=self.kernels.activations[name])


def parts_trial(dtype: torch.dtype, device: torch.device) -> Trial[PartKernels]:
    """Return how the parts are tried."""
    pairs = partial(part_pairs, dtype=dtype, device=device)
    return Trial("norms and activations", pairs, PART_ERRORS[dtype])


def parts_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[None, PartKernels]:
    """Return the CPU's parts, of hidden states of a dtype."""
    return Candidate(
        lambda _: LayerKernels(library),
        lambda _: parts_trial(dtype, LayerKernels.device),
        lambda _: dtype in LayerKernels.types,
    )


def part_pairs(kernels: PartKernels, dtype: torch.dtype, device: torch.device) -> Iterator[Pair]:
    """Compute small tensors with compiled parts, and with those of plain torch."""
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(5, 3, 80, generator=generator).to(device, dtype) for _ in "xy")
    weight, row, more = x[0, 0].contiguous(), x[:, 0], other[:, 0]
    for how, bias in (
        (Norm(1e-5), None),
        (Norm(1e-5, offset=1.0), None),
        (Norm(1e-5, is_rms=False, has_bias=True), other[0, 0].contiguous()),
    ):
        if kernels.can_norm(how, weight, bias):
            yield kernels.norm(x, how, weight, bias), plain.norm(x, how, weight, bias)
            both, normed = kernels.add_and_norm(row, more, how, weight, bias)
            yield both, row + more
            yield normed, plain.norm(row + more, how, weight, bias)
    turn = other[:, 0, :24].sin().float()
    table = torch.stack([turn, -turn])
    turned = plain.rotate(x, Rope((0.0,) * 24), table)
    yield kernels.rotate(x, *table.repeat(1, 1, 2)), turned
    yield kernels.gate(row, SILU), plain.gate(row, "silu")
    yield kernels.gate(row, GELU_TANH), plain.gate(row, "gelu_new")
    yield kernels.gelu(row, GELU_TANH), plain.ACTIVATIONS["gelu_new"](row)
    if "gelu" in kernels.activations:
        yield kernels.gelu(row * 4, GELU), plain.ACTIVATIONS["gelu"](row * 4)

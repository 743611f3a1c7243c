"""Weights as values: what each tensor of a spec is for, and in which format it is held."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

# product: a layer's matrix, rows times it; moved: one that becomes others when its layer is made
# (`kv_up` of a latent); router and choice: small ones that decide between experts.
Use = Literal["product", "moved", "head", "embedding", "router", "choice", "norm", "bias", "other"]


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """One tensor of a spec. Matrices are (outputs, inputs), of experts (experts, …)."""

    shape: tuple[int, ...]
    use: Use

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def is_widened(self) -> bool:
        """Whether it may be held in another format than hidden states: it becomes theirs in use."""
        return self.use in ("product", "head", "embedding")

    @property
    def is_precise(self) -> bool:
        """Whether it is float32 in any dtype."""
        return self.use in ("router", "choice")


class Format(Protocol):
    """How the numbers of a weight are held in memory.

    A new format is a class with these three and a row of `models/stored` that reads it; products
    that take it say so by `serves`. All others get it dequantized.
    """

    @property
    def name(self) -> str:
        """What people call it: "bfloat16", "int8"."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return what a weight of a shape takes."""

    def dequantize(self, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the weight's numbers in a dtype, of its shape. This is the reference."""


@dataclass(slots=True, frozen=True)
class Dense:
    """One tensor of floats, as it is."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def dequantize(self, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return tensors[0].to(dtype)  # itself, where it is so


@dataclass(slots=True, frozen=True)
class Weight:
    """A weight as it is held: what it is for, how its numbers are kept, and its tensors."""

    spec: TensorSpec
    format: Format
    tensors: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return its numbers in a dtype, of its shape."""
        return self.format.dequantize(self.tensors, dtype)

    def expert(self, number: int) -> Weight:
        """Return the weight of one of the experts, (experts, outputs, inputs)."""
        spec = TensorSpec(self.shape[1:], self.spec.use)
        return Weight(spec, self.format, tuple(each[number] for each in self.tensors))


def dense(tensor: torch.Tensor, use: Use) -> Weight:
    """Return a tensor of floats as a weight."""
    return Weight(TensorSpec(tuple(tensor.shape), use), Dense(tensor.dtype), (tensor,))

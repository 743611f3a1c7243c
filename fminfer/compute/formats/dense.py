"""Plain floats: a weight is one tensor, as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fminfer.compute.values.weights import (
    KERNEL_TYPES,
    KernelForm,
    RowFormat,
    Shape,
    Tensors,
    TensorSpec,
    Use,
    Weight,
)


@dataclass(slots=True, frozen=True)
class Dense(RowFormat):
    """One tensor of floats, as it is."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def floats(self) -> torch.dtype | None:
        return self.dtype

    def num_bytes(self, shape: Shape) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        return (torch.empty(shape, dtype=self.dtype, device=device),)

    def fill(self, tensors: Tensors, numbers: torch.Tensor) -> None:
        tensors[0].copy_(numbers)

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return tensors[0].to(dtype)  # itself, where it is so

    def cut_inputs(self, tensors: Tensors, inputs: range) -> Tensors:
        return (tensors[0][..., inputs.start : inputs.stop],)

    def find_kernel_form(self, inputs: int) -> KernelForm | None:
        kernel_type = KERNEL_TYPES.get(self.dtype)
        return None if kernel_type is None else KernelForm(kernel_type, 0)


def make_dense_weight(tensor: torch.Tensor, use: Use) -> Weight:
    """Return a tensor of floats as a weight."""
    return Weight(TensorSpec(tuple(tensor.shape), use), Dense(tensor.dtype), (tensor,))

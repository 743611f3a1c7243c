"""Rows whose inputs stand in another order: of checkpoints quantized with act-order.

Such a quantizer takes inputs by their size, and those of a group lie anywhere in a row. They are
sorted once, as a weight is read, so that groups are blocks. Then `x` is put into the same order
before it is multiplied. All rows of a matrix share the order, and other matrices have others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fminfer.compute.values.weights import Format, KernelForm, Shape, Tensors

INDEX_BYTES = torch.int32.itemsize


@dataclass(slots=True, frozen=True)
class Ordered:
    """A format of one tensor, and beside it the input of each place of a row, int32."""

    inner: Format

    floats = None
    is_held = True
    num_tensors = 2
    can_merge = False
    cut_unit = 0

    @property
    def name(self) -> str:
        return f"{self.inner.name} in act-order"

    @property
    def parts(self) -> tuple[Format, ...]:
        return (self,)

    def num_bytes(self, shape: Shape) -> int:
        order = torch.Size((*shape[:-2], shape[-1])).numel()
        return self.inner.num_bytes(shape) + order * INDEX_BYTES

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        order = torch.empty((*shape[:-2], shape[-1]), dtype=torch.int32, device=device)
        return (*self.inner.empty(shape, device), order)

    def fill(self, tensors: Tensors, numbers: torch.Tensor) -> None:
        raise AssertionError("weights with an order are read, not made of floats")

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        rows, order = tensors
        sorted_numbers = self.inner.dequantize((rows,), dtype)
        places = order.long().argsort(-1)[..., None, :]
        return sorted_numbers.gather(-1, places.expand(sorted_numbers.shape))

    def select_rows(self, tensors: Tensors, rows: torch.Tensor) -> Tensors:
        packed, order = tensors
        return (*self.inner.select_rows((packed,), rows), order)

    def view_rows(
        self, tensors: Tensors, first: int, last: int
    ) -> tuple[Format, Tensors]:
        packed, order = tensors
        return self, (packed[first:last], order)

    def select_expert(self, tensors: Tensors, number: int) -> Tensors:
        return tuple(tensor[number] for tensor in tensors)

    def cut_inputs(self, tensors: Tensors, inputs: range) -> Tensors:
        raise AssertionError("neighbouring inputs lie anywhere in a row")

    def cut_outputs(self, rows: Sequence[range]) -> Format:
        return self

    def split_parts(
        self, tensors: Tensors, outputs: int
    ) -> list[tuple[Format, Tensors, int]]:
        return [(self, tensors, outputs)]

    def find_kernel_form(self, inputs: int) -> KernelForm | None:
        return self.inner.find_kernel_form(inputs)

    def find_order(self, tensors: Tensors) -> torch.Tensor | None:
        return tensors[1]

    def packed_rows(self, tensors: Tensors) -> torch.Tensor:
        return tensors[0]

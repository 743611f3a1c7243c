"""Products with weights: plain, or packed once where that is faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fminfer.packed_linear import can_pack, is_right, pack
from fminfer.product_kernel import ProductKernel

Function = Callable[[torch.Tensor], torch.Tensor]


class Products:
    """Makes the products of plain torch."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Function:
        """Return x·Wᵀ + b of x, (…, inputs).

        Args:
            weight: (outputs, inputs).
        """
        return lambda x: nn.functional.linear(x, weight, bias)


class PackedProducts(Products):
    """Makes products whose weights are packed, on the CPU; each shape is tried once.

    Args:
        is_fast_in_bfloat16: whether the machine has units for it; otherwise that is not packed.
        kernel: the CPU's, if it could be built.
    """

    def __init__(self, *, is_fast_in_bfloat16: bool, kernel: ProductKernel | None) -> None:
        self._is_fast, self._kernel = is_fast_in_bfloat16, kernel
        self._tried: dict[torch.Size, bool] = {}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Function:
        if not can_pack(weight, self._is_fast):
            return super().make(weight, bias)
        product = pack(weight, bias, self._kernel)
        if weight.shape not in self._tried:
            found = is_right(product, weight, bias)
            if weight.isnan().any():  # then the next of its shape is looked at as well
                return product if found else super().make(weight, bias)
            self._tried[weight.shape] = found
        return product if self._tried[weight.shape] else super().make(weight, bias)

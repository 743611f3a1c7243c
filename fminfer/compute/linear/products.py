"""Products with weights: plain, or packed once where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from fminfer.compute.linear.packed_linear import MAX_ERROR, can_pack, pack, product_pairs
from fminfer.compute.linear.product_kernel import PackedProduct, ProductKernel
from fminfer.compute.trial import Pair, try_body
from fminfer.core.config import Kernels

Function = Callable[[torch.Tensor], torch.Tensor]
TRIED_OUTPUTS, UNROUNDED_ERROR = 150, 1e-4  # the error is a part of the largest result


class Products:
    """Makes the products of plain torch."""

    why_plain = ""  # why some are, though they could be packed

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Function:
        """Return x·Wᵀ + b of x, (…, inputs).

        Args:
            weight: (outputs, inputs); of another type than x, it is widened at each call.
        """
        return lambda x: nn.functional.linear(x, weight.to(x.dtype), bias)

    def make_unrounded(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PackedProduct | None:
        """Return x·Wᵀ + b for `PackedProduct.unrounded`; None: leave it to plain torch."""
        return None


class PackedProducts(Products):
    """Makes products whose weights are packed, on the CPU; each shape is tried once.

    Args:
        is_fast_in_bfloat16: whether the machine has units for it; otherwise that is not packed.
        dtype: of x; None: as the weight's.
        kernel: the CPU's, if it could be built.
        asked: "require": a kernel that gives something else is refused.
    """

    def __init__(
        self,
        *,
        is_fast_in_bfloat16: bool,
        kernel: ProductKernel | None,
        asked: Kernels = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._is_fast, self._kernel, self._asked = is_fast_in_bfloat16, kernel, asked
        self._dtype = dtype
        self._tried: dict[torch.Size, bool] = {}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Function:
        can = can_pack(weight, self._is_fast, self._kernel, self._dtype)
        if not (can and self._tried.get(weight.shape, True)):
            return super().make(weight, bias)
        if weight.shape in self._tried:
            return pack(weight, bias, self._kernel, self._dtype)
        product, why = try_body(
            f"products of {weight.shape[0]} × {weight.shape[1]}",
            self._asked,
            lambda: pack(weight, bias, self._kernel, self._dtype),
            partial(product_pairs, weight=weight, bias=bias, dtype=self._dtype),
            MAX_ERROR[self._dtype or weight.dtype],
        )
        self.why_plain = self.why_plain or why
        if not weight.isnan().any():  # else the next of its shape is tried as well
            self._tried[weight.shape] = product is not None
        return product or super().make(weight, bias)

    def make_unrounded(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PackedProduct | None:
        kernel = self._kernel
        if kernel is None or not kernel.can_pack(weight):
            return None
        some = weight[:TRIED_OUTPUTS], None if bias is None else bias[:TRIED_OUTPUTS]

        def pairs(product: PackedProduct) -> Iterator[Pair]:
            yield product.rows(torch.arange(product.outputs)), some[0]
            yield from product_pairs(product.unrounded, *some, self._dtype, torch.float32)

        make: Callable[[], PackedProduct] = partial(kernel.pack, *some)
        found = try_body("products in float32", self._asked, make, pairs, UNROUNDED_ERROR)
        self.why_plain = self.why_plain or found[1]
        return None if found[0] is None else kernel.pack(weight, bias)

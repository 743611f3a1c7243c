"""Products with weights: in plain torch, and packed once by MKL (float32) or oneDNN (bfloat16).

A plain product rearranges its operands at every call, which for few rows takes longer than the
product itself: packed, 8 rows of 3072 × 768 are twice as fast. The registry takes our own kernel
(product_kernel) where that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn

from fminfer.compute.quantized.block_format import pieces_of
from fminfer.compute.trial import Candidate, Limits, Pair, Trial
from fminfer.compute.weights import Dense, Format, Function, Weight

CHECKED_ROWS = [1, 5, 48]
MAX_ERROR: Limits = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of the largest result
# MKL's packing is tuned for so many rows. torch's operator wants their number at every call and
# packs for one; the packed form itself serves any number (tests/compute/test_packed_linear).
MKL_ROWS = 512
# oneDNN divides more rows than this, of so few outputs, badly between two threads: 512 rows of
# 3072, 768 outputs, take 2.4 ms at once and 1.5 in halves (two AMX cores; more were not tried).
NARROW, MOST_NARROW_ROWS = range(512, 897), 448


@dataclass(slots=True, frozen=True)
class Linear:
    """The product x·Wᵀ + b of x, (…, inputs): what is asked for, and itself its plain form."""

    weight: Weight  # (outputs, inputs)
    bias: torch.Tensor | None  # (outputs,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return it in x's type; some rows of blocks are made floats at a time."""
        weight, bias = self.weight, self.bias
        if weight.is_plain:
            return nn.functional.linear(x, weight.dequantized(x.dtype), bias)
        parts = [nn.functional.linear(x, each.dequantized(x.dtype)) for each in pieces_of(weight)]
        found = torch.cat(parts, -1)
        return found if bias is None else found + bias

    def trial(self, dtype: torch.dtype) -> Trial[Function]:
        """Return how a product of rows of a dtype is tried; each shape and format is once."""
        outputs, inputs = shape = self.weight.shape
        pairs = partial(product_pairs, asked=self, dtype=dtype)
        key = shape, self.weight.format, self.weight.is_lent
        return Trial(f"products of {outputs} × {inputs}", pairs, MAX_ERROR[dtype], key)


def product_pairs(
    product: Function, asked: Linear, dtype: torch.dtype, summed: torch.dtype | None = None
) -> Iterator[Pair]:
    """Multiply few rows and some, of a dtype, packed and plain; `summed` is the plain dtype."""
    inputs = asked.weight.shape[1]
    numbers = [torch.linspace(-1, 1, num * inputs, dtype=dtype) for num in CHECKED_ROWS]
    x = torch.cat(numbers).view(-1, inputs)
    x = x * torch.cos(torch.arange(inputs, dtype=torch.float32)).to(dtype)
    plain = asked(x.to(summed or dtype))  # blocks unpack once
    for rows, expected in zip(
        torch.split(x, CHECKED_ROWS), torch.split(plain, CHECKED_ROWS), strict=True
    ):
        yield product(rows), expected


def is_on_cpu(weight: Weight) -> bool:
    """Tell whether there is something to pack, on a CPU."""
    return weight.device.type == "cpu" and math.prod(weight.shape) > 0


def torch_takes(held: Format, dtype: torch.dtype, *, is_fast: bool) -> bool:
    """Tell whether a library packs weights of a format, for rows of a dtype.

    Without units for bfloat16 (`is_fast`) oneDNN is no faster than torch.
    """
    if held != Dense(dtype):
        return False
    if dtype == torch.float32:
        return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return dtype == torch.bfloat16 and is_fast and onednn_packs_bfloat16()


@cache
def onednn_packs_bfloat16() -> bool:
    """Try whether torch's oneDNN packs bfloat16: on some processors it refuses to."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.ones((32, 32), dtype=torch.bfloat16, device="cpu")
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def pack_by_mkl(asked: Linear) -> Function:
    """Return a product with a weight of float32, packed."""
    weight, bias = asked.weight.plain.contiguous(), asked.bias
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_ROWS)
    nothing = weight.new_full((1,), float("nan")).expand(weight.shape)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        out: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, nothing, bias, rows)
        return out

    return multiply


def pack_by_onednn(asked: Linear) -> Function:
    """Return a product with a weight of bfloat16, packed."""
    weight, bias = asked.weight.plain.contiguous(), asked.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    is_narrow = len(weight) in NARROW

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if is_narrow and rows > MOST_NARROW_ROWS and torch.get_num_threads() == 2:
            halves = x.reshape(rows, -1).tensor_split(2)
            return torch.cat([multiply(half) for half in halves]).view(*x.shape[:-1], -1)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return multiply


def library_products(dtype: torch.dtype, *, is_fast: bool) -> list[Candidate[Linear, Function]]:
    """Return the products of torch's libraries, for rows of a dtype; see `torch_takes`."""

    def serves(asked: Linear) -> bool:
        weight = asked.weight
        pays = is_on_cpu(weight) and not weight.is_lent  # it stays in memory
        return pays and torch_takes(weight.format, dtype, is_fast=is_fast)

    make = pack_by_mkl if dtype == torch.float32 else pack_by_onednn
    return [Candidate(make, partial(Linear.trial, dtype=dtype), serves)]

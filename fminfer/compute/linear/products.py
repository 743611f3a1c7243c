"""Products with weights in plain torch, and the trial of those that are packed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fminfer.compute.quantized.block_format import pieces_of
from fminfer.compute.trial import Limits, Pair, Trial
from fminfer.compute.weights import Function, Weight

CHECKED_ROWS = [1, 5, 48]
MAX_ERROR: Limits = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of the largest result


@dataclass(slots=True, frozen=True)
class Linear:
    """The product x·Wᵀ + b that is asked for, of x of (…, inputs)."""

    weight: Weight  # (outputs, inputs)
    bias: torch.Tensor | None  # (outputs,)

    @property
    def pays_to_pack(self) -> bool:
        """Whether there is something to pack, on a CPU, and it stays in memory."""
        is_here = self.weight.device.type == "cpu" and math.prod(self.weight.shape) > 0
        return is_here and not self.weight.is_lent

    @property
    def tensor(self) -> torch.Tensor:
        """The weight of a format that is one tensor."""
        (tensor,) = self.weight.tensors
        return tensor

    def trial(self, dtype: torch.dtype) -> Trial[Function]:
        """Return how a product of rows of a dtype is tried; each shape and format is once."""
        outputs, inputs = shape = self.weight.shape
        pairs = partial(product_pairs, asked=self, dtype=dtype)
        key = shape, self.weight.format, self.weight.is_lent
        return Trial(f"products of {outputs} × {inputs}", pairs, MAX_ERROR[dtype], key)


@dataclass(slots=True, frozen=True)
class PlainProduct:
    """The product of plain torch; weights of another form become x's at each call."""

    weight: Weight
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_plain(x, self.weight, self.bias)


def multiply_plain(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x·Wᵀ + b in x's type; of blocks some rows are floats at a time."""
    if weight.is_plain:
        return nn.functional.linear(x, weight.dequantized(x.dtype), bias)
    parts = [nn.functional.linear(x, each.dequantized(x.dtype)) for each in pieces_of(weight)]
    found = torch.cat(parts, -1)
    return found if bias is None else found + bias


def product_pairs(
    product: Function, asked: Linear, dtype: torch.dtype, summed: torch.dtype | None = None
) -> Iterator[Pair]:
    """Multiply few rows and some, packed and plain.

    Args:
        dtype: of the rows.
        summed: of the plain product; None: that of the rows.
    """
    inputs = asked.weight.shape[1]
    numbers = [torch.linspace(-1, 1, num * inputs, dtype=dtype) for num in CHECKED_ROWS]
    x = torch.cat(numbers).view(-1, inputs)
    x = x * torch.cos(torch.arange(inputs, dtype=torch.float32)).to(dtype)
    plain = multiply_plain(x.to(summed or dtype), asked.weight, asked.bias)  # blocks unpack once
    for rows, expected in zip(
        torch.split(x, CHECKED_ROWS), torch.split(plain, CHECKED_ROWS), strict=True
    ):
        yield product(rows), expected

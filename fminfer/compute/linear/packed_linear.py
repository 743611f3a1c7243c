"""Products with weights that are packed once, on the CPU: by MKL in float32, oneDNN in bfloat16.

A plain product rearranges its operands at every call, which for few rows takes longer than the
product itself. Measured on two Cascade Lake cores, float32, W of 3072 × 768, in GFLOP/s, plain and
packed: 8 rows 31 and 68, 16 rows 69 and 106, 32 rows 106 and 163, 128 rows 190 and 255, 512 rows
227 and 261. The registry takes our own kernel (product_kernel) where that is faster.
"""

from __future__ import annotations

import functools

import torch

from fminfer.compute.linear.products import Linear
from fminfer.compute.trial import Candidate
from fminfer.compute.weights import Dense, Format, Function

# MKL's packing is tuned for so many rows. torch's operator wants their number at every call and
# packs for one; the packed form itself serves any number (tests/compute/test_packed_linear).
MKL_ROWS = 512
# oneDNN divides more rows than this, of so few outputs, badly between two threads: 512 rows of
# 3072, 768 outputs, take 2.4 ms at once and 1.5 in halves (two AMX cores; more were not tried).
NARROW, MOST_NARROW_ROWS = range(512, 897), 448


def mkl_takes(held: Format, dtype: torch.dtype) -> bool:
    """Tell whether MKL packs weights of a format, for rows of a dtype."""
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and held == Dense(dtype) == Dense(torch.float32)


def onednn_takes(held: Format, dtype: torch.dtype, *, is_fast: bool) -> bool:
    """Tell the same of oneDNN; it is faster only where the processor has units for bfloat16."""
    is_same = held == Dense(dtype) == Dense(torch.bfloat16)
    return is_same and is_fast and onednn_packs_bfloat16()


def torch_takes(held: Format, dtype: torch.dtype, *, is_fast: bool) -> bool:
    """Tell whether one of both does."""
    return mkl_takes(held, dtype) or onednn_takes(held, dtype, is_fast=is_fast)


@functools.cache
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
    weight, bias = asked.tensor.contiguous(), asked.bias
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_ROWS)
    nothing = weight.new_full((1,), float("nan")).expand(weight.shape)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        out: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, nothing, bias, rows)
        return out

    return multiply


def pack_by_onednn(asked: Linear) -> Function:
    """Return a product with a weight of bfloat16, packed."""
    weight, bias = asked.tensor.contiguous(), asked.bias
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
    """Return the products of torch's libraries, for rows of a dtype.

    Args:
        is_fast: the processor has units for bfloat16.
    """

    def by_mkl(asked: Linear) -> bool:
        return asked.pays_to_pack and mkl_takes(asked.weight.format, dtype)

    def by_onednn(asked: Linear) -> bool:
        return asked.pays_to_pack and onednn_takes(asked.weight.format, dtype, is_fast=is_fast)

    trial = functools.partial(Linear.trial, dtype=dtype)
    return [Candidate(pack_by_mkl, trial, by_mkl), Candidate(pack_by_onednn, trial, by_onednn)]

"""Products with weights that are packed once, on the CPU.

By the kernels (product_kernel) where they are faster, or else by MKL in float32 and by oneDNN in
bfloat16.

A plain product rearranges its operands at every call, which for few rows takes longer than the
product itself. Measured on two Cascade Lake cores, float32, W of 3072 × 768, in GFLOP/s, plain and
packed: 8 rows 31 and 68, 16 rows 69 and 106, 32 rows 106 and 163, 128 rows 190 and 255, 512 rows
227 and 261. It knows nothing of what the layers are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from fminfer.compute.linear.product_kernel import ProductKernel

Product = Callable[[torch.Tensor], torch.Tensor]
# MKL's packing is tuned for so many rows. torch's operator wants their number at every call and
# packs for one; the packed form itself serves any number (tests/compute/test_packed_linear).
MKL_ROWS = 512
CHECKED_ROWS = (1, 5, 48)
# oneDNN divides more rows than this, of so few outputs, badly between two threads: 512 rows of
# 3072, 768 outputs, take 2.4 ms at once and 1.5 in halves (two AMX cores; more were not tried).
NARROW, MOST_NARROW_ROWS = range(512, 897), 448
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of the largest result


def can_pack(
    weight: torch.Tensor,
    is_fast_in_bfloat16: bool,
    kernel: ProductKernel | None = None,
    dtype: torch.dtype | None = None,
) -> bool:
    """Tell whether a weight, (outputs, inputs), can be packed here.

    Args:
        dtype: of the rows; None: as the weight's. The kernels widen bfloat16 for float32 rows.
    """
    if weight.device.type != "cpu" or weight.numel() == 0:
        return False
    if kernel is not None and kernel.is_best_for(weight, dtype):
        return True
    is_same = dtype in (None, weight.dtype)
    return is_same and can_pack_dtype(weight.dtype, is_fast_in_bfloat16)


def can_pack_dtype(dtype: torch.dtype, is_fast_in_bfloat16: bool) -> bool:
    if dtype == torch.float32:
        return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return dtype == torch.bfloat16 and is_fast_in_bfloat16 and onednn_packs_bfloat16()


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


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: ProductKernel | None = None,
    dtype: torch.dtype | None = None,
) -> Product:
    """Return the product x·Wᵀ + b for x of (…, in), of a weight that `can_pack`.

    Args:
        kernel: the CPU's, which is used where it is faster; None if it could not be built.
        dtype: of x; None: as the weight's.
    """
    if kernel is not None and kernel.is_best_for(weight, dtype):
        return kernel.pack(weight, bias)
    weight = weight.contiguous()
    if weight.dtype == torch.float32:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_ROWS)
        nothing = weight.new_full((1,), float("nan")).expand(weight.shape)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            rows = x.numel() // x.shape[-1]
            out: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, nothing, bias, rows)
            return out

    else:
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


def product_pairs(
    product: Product,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    summed: torch.dtype | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Multiply few rows and some, packed and plain.

    Args:
        dtype: of the rows; None: the weight's.
        summed: of the plain product; None: that of the rows.
    """
    dtype, inputs = dtype or weight.dtype, weight.shape[1]
    weight = weight.to(summed or dtype)
    for rows in CHECKED_ROWS:
        x = torch.linspace(-1, 1, rows * inputs, dtype=dtype).view(rows, -1)
        x = x * torch.cos(torch.arange(inputs, dtype=torch.float32)).to(dtype)
        yield product(x), nn.functional.linear(x.to(weight.dtype), weight, bias)

"""Products with weights that are packed once, on the CPU.

By MKL in float32; in bfloat16 by oneDNN or, where they are faster, the kernels (product_kernel).

A plain product rearranges its operands at every call, which for few rows takes longer than the
product itself. Measured on two Cascade Lake cores, float32, W of 3072 × 768, in GFLOP/s, plain and
packed: 8 rows 31 and 68, 16 rows 69 and 106, 32 rows 106 and 163, 128 rows 190 and 255, 512 rows
227 and 261. It knows nothing of what the layers are for.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fminfer.product_kernel import ProductKernel

Product = Callable[[torch.Tensor], torch.Tensor]
# MKL's packing is tuned for so many rows. torch's operator wants their number at every call and
# packs for one; the packed form itself serves any number (is_right, and tests/test_packed_linear).
MKL_ROWS = 512
CHECKED_ROWS = (1, 5, 48)
# oneDNN divides more rows than this, of so few outputs, badly between two threads: 512 rows of
# 3072, 768 outputs, take 2.4 ms at once and 1.5 in halves (two AMX cores; more were not tried).
NARROW, MOST_NARROW_ROWS = range(512, 897), 448
MAX_ERROR = 1e-5  # of the largest result
MAX_TWICE_BYTES = 256 << 20  # a head tied to the embedding, of which packing makes a second copy


def pack_linears(
    model: nn.Module,
    *,
    is_fast_in_bfloat16: bool,
    kernel: ProductKernel | None = None,
    left: nn.Module | None = None,
) -> int:
    """Pack the weight of every linear layer in place, one after another; return how many.

    A packed layer's `weight` keeps its shape and dtype but holds nan only: what reads it directly
    cannot be wrong in silence.

    Args:
        is_fast_in_bfloat16: whether the machine has units for it; otherwise that is not packed.
        kernel: the CPU's, if it could be built.
        left: a layer that is not packed.
    """
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    checked: dict[torch.Size, bool] = {}
    num_packed = 0
    module: Any
    for module in list(model.modules()):
        weight = _matrix_of(module)
        if weight is None or module is left or not can_pack(weight, is_fast_in_bfloat16):
            continue
        if owners[id(module.weight)] > 1 and weight.nbytes > MAX_TWICE_BYTES:
            continue
        product = pack(weight.detach(), module.bias, kernel)
        is_same = checked.get(weight.shape)
        if is_same is None:
            is_same = is_right(product, weight, module.bias)
            if not weight.isnan().any():  # otherwise the next of its shape is looked at as well
                checked[weight.shape] = is_same
        if is_same:
            module.forward = product
            module.weight = without_values(module.weight)
            num_packed += 1
    return num_packed


def find_packable(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    is_fast_in_bfloat16: bool,
    left: nn.Module | None = None,
) -> list[torch.Tensor]:
    """List the weights of a model without memory that would be packed on a CPU.

    By `pack_linears`, or by `pack_experts`: those of all experts of a layer are one.
    """
    if not _can_pack_dtype(dtype, is_fast_in_bfloat16):
        return []
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    found = []
    module: Any
    for module in model.modules():
        weight = _matrix_of(module)
        if weight is not None and module is not left:
            is_tied = owners[id(module.weight)] > 1
            if not is_tied or weight.numel() * dtype.itemsize <= MAX_TWICE_BYTES:
                found.append(weight)
        found += [each for each in module.parameters(recurse=False) if each.dim() == 3]
    return found


def without_values(weight: torch.Tensor) -> nn.Parameter:
    """Return a parameter of the same shape and dtype that holds nan, in next to no memory."""
    nothing = weight.new_full((1,), float("nan")).expand(weight.shape)
    return nn.Parameter(nothing, requires_grad=False)


def _matrix_of(module: Any) -> torch.Tensor | None:
    """Return the weight of a linear layer, (out, in); None: it is another module."""
    weight: torch.Tensor | None = None
    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":
        weight = module.weight
    elif type(module) is Conv1D:  # GPT-2's, (in, out)
        weight = module.weight.t()
    return weight


def can_pack(weight: torch.Tensor, is_fast_in_bfloat16: bool) -> bool:
    """Tell whether a weight, (outputs, inputs), can be packed here."""
    if weight.device.type != "cpu" or weight.numel() == 0:
        return False
    return _can_pack_dtype(weight.dtype, is_fast_in_bfloat16)


def _can_pack_dtype(dtype: torch.dtype, is_fast_in_bfloat16: bool) -> bool:
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
    weight: torch.Tensor, bias: torch.Tensor | None, kernel: ProductKernel | None = None
) -> Product:
    """Return the product x·Wᵀ + b for x of (…, in), of a weight that `can_pack`.

    Args:
        kernel: the CPU's, which is used where it is faster; None if it could not be built.
    """
    if kernel is not None and kernel.is_best_for(weight):
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


def is_right(product: Product, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Tell whether a packed product agrees with the plain one, for few rows and for some."""
    limit = MAX_ERROR if weight.dtype == torch.float32 else 0.02
    for rows in CHECKED_ROWS:
        x = torch.linspace(-1, 1, rows * weight.shape[1], dtype=weight.dtype).view(rows, -1)
        x = x * torch.cos(torch.arange(weight.shape[1], dtype=torch.float32)).to(weight.dtype)
        plain = nn.functional.linear(x, weight, bias)
        is_same = (product(x) - plain).abs().amax() <= limit * plain.abs().amax()
        if not is_same and not plain.isnan().any():
            return False
    return True

"""fminfer's own forms of 8 and 4 bits: what `--quantize` makes of a model.

A block is a scale in float16, in some forms a minimum, and then its numbers. 8 numbers of 4 bits
are one unit of 32 bits, in which the kernels multiply them: first those with an even place, then
those with an odd one.
"""

from __future__ import annotations

from functools import partial

import torch

from fminfer.compute.formats.block_rows import (
    Blocks,
    Tensor,
    read_float16,
    split_last_dimension,
)
from fminfer.compute.formats.gguf_rows import unpack_q8_0
from fminfer.compute.values.weights import Use

# The smallest float16, and the step between small ones. As a least scale it avoids 0 / 0.
LEAST_SCALE = 2.0**-24


def _float16_bytes(numbers: Tensor) -> Tensor:
    """Return float16's bytes of numbers, (…, numbers)."""
    return numbers.half().contiguous().view(torch.uint8)


def _make_scales(sizes: Tensor, steps: int) -> Tensor:
    """Return scales as float16 holds them, (…, 1), of which `steps` reach each size.

    One that is too large is inf, so that its block becomes nan. One that is too small
    for all bits of float16 is rounded up: none of its block is cut.
    """
    exact = (sizes / steps).clamp(LEAST_SCALE)
    scale = exact.half().float()
    return torch.where(scale < exact * 0.999, scale + LEAST_SCALE, scale)


def pack_int8(blocks: Tensor) -> Tensor:
    scale = _make_scales(blocks.abs().amax(-1, keepdim=True), 127)
    values = (blocks / scale).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([_float16_bytes(scale), values.view(torch.uint8)], -1)


def pack_units(values: Tensor) -> Tensor:
    """Return numbers of 4 bits in units, (…, numbers / 2 bytes): 4 numbers at once."""
    four = values.contiguous().view(torch.int32)
    # bytes 0 and 1 of four have numbers i and i + 2, for i = 0 and 1
    both = split_last_dimension((four | four >> 12).view(torch.uint8), -1, 2, 4)
    return both[..., :2].mT.flatten(-3)


def unpack_units(packed: Tensor) -> Tensor:
    units = split_last_dimension(
        torch.stack([packed & 15, packed >> 4], -1).flatten(-2), -1, 2, 4
    )
    return units.mT.flatten(-3).float()


def pack_symmetric(blocks: Tensor) -> Tensor:
    """Pack numbers so that the largest one is -8 or 8 times the scale, as others reach
    -8 and 7."""
    most = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = _make_scales(most.abs(), 8) * torch.where(most > 0, -1.0, 1.0)
    values = (blocks / scale).round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return torch.cat([_float16_bytes(scale), pack_units(values)], -1)


def unpack_symmetric(blocks: Tensor) -> Tensor:
    return read_float16(blocks, 0) * (unpack_units(blocks[..., 2:]) - 8)


def pack_int4(blocks: Tensor) -> Tensor:
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    least = least.half().float()
    scale = _make_scales(most - least, 15)
    values = ((blocks - least) / scale).round_().clamp_(0, 15).to(torch.uint8)
    return torch.cat(
        [_float16_bytes(scale), _float16_bytes(least), pack_units(values)], -1
    )


def unpack_int4(blocks: Tensor) -> Tensor:
    return read_float16(blocks, 0) * unpack_units(blocks[..., 4:]) + read_float16(
        blocks, 2
    )


_make_int8 = partial(Blocks, unpack=unpack_q8_0, pack=pack_int8, kind=2)
_make_symmetric = partial(Blocks, unpack=unpack_symmetric, pack=pack_symmetric, kind=3)
_make_int4 = partial(Blocks, unpack=unpack_int4, pack=pack_int4, kind=4)
INT8 = _make_int8("int8", 128, 130)
INT8_32 = _make_int8("int8-32", 32, 34)
INT4 = _make_int4("int4", 32, 20)
INT4_SYMMETRIC = _make_symmetric("int4-symmetric", 32, 18)
OWN_FORMATS = (
    INT8,
    INT8_32,
    _make_int8("int8-row", 0, 2),
    INT4,
    _make_int4("int4-128", 128, 68),
    INT4_SYMMETRIC,
    _make_symmetric("int4-symmetric-128", 128, 66),
)
_BY_NAME = {form.name: form for form in OWN_FORMATS}


# Kernels of plain torch that make floats of blocks, and the bytes that they move for a number.
# By how names of forms begin.
UNPACKING: dict[str, tuple[int, float]] = {
    "Q8_0": (5, 19.4),
    "Q4_0": (9, 31.4),
    "Q4_1": (11, 31.9),
    "Q5_0": (15, 41.6),
    "Q5_1": (17, 42.0),
    "Q4_K": (27, 32.1),
    "Q5_K": (32, 40.3),
    "Q6_K": (16, 39.9),
    "MXFP4": (10, 31.8),
    "IQ4_NL": (9, 31.4),
    "IQ4_XS": (22, 32.3),
    "int8": (5, 19.1),
    "int8-32": (5, 19.4),
    "int8-row": (5, 19.0),
    "int4": (12, 33.9),
    "int4-128": (12, 33.2),
    "int4-symmetric": (10, 33.4),
    "int4-symmetric-128": (10, 33.1),
    "whole4": (11, 33.4),
    "whole8": (7, 27.1),
    "float8": (4, 19.0),
}


def find_unpacking(name: str) -> tuple[int, float]:
    """Return what making floats of a format takes; see `UNPACKING`. Floats are one copy."""
    forms = [form for form in UNPACKING if name.startswith(form)]
    return UNPACKING[max(forms, key=len)] if forms else (1, 0.0)


def choose_quantized_formats(name: str, use: Use) -> tuple[Blocks, ...]:
    """Return what a matrix becomes by --quantize: the first of these forms that takes its rows.

    Head and embedding keep 8 bits. Matrices that none takes keep their floats.
    """
    form = _BY_NAME[name]
    if form.name.startswith("int8"):
        return form, INT8_32
    if use != "product":
        return INT8, INT8_32
    return form, INT4 if form.unpack is unpack_int4 else INT4_SYMMETRIC

"""The forms of published checkpoints: GPTQ, AWQ, compressed-tensors, FP8, and gpt-oss's MXFP4.

Files have scales and zeros beside their numbers. As they are read they become blocks, each with
its own scale: (…, outputs, bytes of a row). Such weights are only read, never made of floats.
"""

from __future__ import annotations

from functools import partial

import torch

from fminfer.compute.formats.block_rows import Blocks, Tensor, read_float16
from fminfer.compute.formats.own_rows import pack_units, unpack_units

FLOAT8 = torch.float8_e4m3fn
SCALE_BYTES = torch.float32.itemsize
ZERO_BYTES = torch.float16.itemsize
FLOAT8_NAN = 127  # in e4m3fn, which has no infinity; the upper bit is the sign


def _float32_bytes(scales: Tensor) -> Tensor:
    """Return float32's bytes of each scale, (…, 4)."""
    return scales.float()[..., None].contiguous().view(torch.uint8)


def _read_float32(blocks: Tensor) -> Tensor:
    """Return the float32 number that each block begins with, (…, 1)."""
    aligned = blocks[..., :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
    return aligned.view(torch.float32)


def _join_blocks(*parts: Tensor) -> Tensor:
    """Return the bytes of a matrix, (rows, bytes), of parts of its blocks."""
    return torch.cat(parts, -1).flatten(-2)


# Whole numbers of 4 or 8 bits. A block is a scale in float32, a zero in float16, and its
# numbers: units of 4 bits (see own), or int8. A weight is scale * (number - zero).


def _unpack_whole_numbers(blocks: Tensor, bits: int) -> Tensor:
    zero = read_float16(blocks, SCALE_BYTES)
    packed = blocks[..., SCALE_BYTES + ZERO_BYTES :]
    numbers = unpack_units(packed) if bits == 4 else packed.view(torch.int8).float()
    return _read_float32(blocks) * (numbers - zero)


def make_whole_numbers(bits: int, group: int) -> Blocks:
    """Return the form of numbers of 4 or 8 bits with a zero for each group of inputs.

    Args:
        bits: of a number, 4 or 8.
        group: inputs that share a scale, a multiple of 32; 0: a whole row does.
    """
    assert bits in (4, 8) and group % 32 == 0, "whole numbers"
    return Blocks(
        name=f"whole{bits}-{group or 'row'}",
        block=group,
        block_bytes=SCALE_BYTES + ZERO_BYTES + group * bits // 8,
        unpack=partial(_unpack_whole_numbers, bits=bits),
        kind=12 if bits == 4 else 13,
        bits=bits,
    )


def pack_whole_numbers(
    numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int
) -> Tensor:
    """Return the rows of a matrix whose weights are scale * (number - zero).

    Args:
        numbers: (rows, groups, group) uint8, from 0 to 2^bits - 1.
        scales: (rows, groups), floats.
        zeros: (rows, groups), whole numbers from -1024 to 1024, which float16 holds.
        bits: of a number, 4 or 8.

    Returns:
        (rows, bytes) uint8, of the form `make_whole_numbers`.
    """
    if bits == 4:
        packed = pack_units(numbers)
    else:
        # as int8, where 128 is 0
        packed = numbers ^ 128
        zeros = zeros - 128
    zero_bytes = zeros.half()[..., None].contiguous().view(torch.uint8)
    return _join_blocks(_float32_bytes(scales), zero_bytes, packed)


# Floats of 8 bits. A block is a scale in float32, and its numbers as files have them.


def _unpack_float8(blocks: Tensor) -> Tensor:
    return _read_float32(blocks) * blocks[..., SCALE_BYTES:].view(FLOAT8).float()


def make_float8(group: int) -> Blocks:
    """Return the form of e4m3fn with a scale for each group of inputs; 0: for a whole row."""
    assert group % 32 == 0, "a group"
    return Blocks(
        name=f"float8-{group or 'row'}",
        block=group,
        block_bytes=SCALE_BYTES + group,
        unpack=_unpack_float8,
        kind=14,
    )


def pack_float8(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the rows of a matrix whose weights are scale * number.

    A block with a number that is nan gets nan as its scale, which is what the kernels see.

    Args:
        numbers: (rows, inputs) float8_e4m3fn.
        scales: (rows, groups) float32; groups are as many neighbouring inputs each.

    Returns:
        (rows, bytes) uint8, of the form `make_float8`.
    """
    packed = numbers.contiguous().view(torch.uint8)
    packed = packed.view(*scales.shape, -1)
    has_nan = ((packed & FLOAT8_NAN) == FLOAT8_NAN).any(-1)
    return _join_blocks(_float32_bytes(scales.masked_fill(has_nan, torch.nan)), packed)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return rows as GGUF's MXFP4 has them, of gpt-oss's, which puts neighbours into a byte.

    Args:
        blocks: (…, rows, groups, 16) uint8; the lower half of a byte comes first.
        scales: (…, rows, groups) uint8: the exponent of 2, plus 127.

    Returns:
        (…, rows, groups * 17) uint8: of each group the scale, then bytes that hold inputs i
        and i + 16.
    """
    first, second = blocks.chunk(2, -1)
    even = first & 15 | second << 4
    odd = first >> 4 | second & 0xF0
    packed = torch.stack([even, odd], -1).flatten(-2)
    return torch.cat([scales[..., None], packed], -1).flatten(-2)

"""The block forms of GGUF files, as the structs of ggml-common.h have them.

`d` and `dmin` are float16 numbers of a block. K forms have blocks of 256 numbers, in groups with
whole numbers that both are multiplied by.
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

# What the 16 values of IQ4_NL stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # halves


def _split_nibbles(packed: Tensor) -> Tensor:
    """Return the lower halves of bytes, then their upper ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _split_fields(packed: Tensor, bits: int) -> Tensor:
    """Return each byte's fields of so many bits as rows, (…, fields, bytes), the lowest
    first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields: Tensor = (packed[..., None, :] >> shifts[:, None]) & (2**bits - 1)
    return fields


def unpack_q8_0(blocks: Tensor) -> Tensor:
    return read_float16(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def _unpack_short_block(blocks: Tensor, *, has_fifth: bool, has_least: bool) -> Tensor:
    """Return numbers of 4 or 5 bits, which are above a least one or around 0."""
    first = 4 if has_least else 2
    values = _split_nibbles(blocks[..., first + 4 * has_fifth :])
    if has_fifth:  # 32 bits, each worth 16
        values = (
            values
            | _split_fields(blocks[..., first : first + 4], 1).mT.flatten(-2) << 4
        )
    if has_least:
        return read_float16(blocks, 0) * values.float() + read_float16(blocks, 2)
    return read_float16(blocks, 0) * (values.float() - (16 if has_fifth else 8))


def _map_nibbles(values: tuple[int, ...], packed: Tensor) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=packed.device)
    return table[_split_nibbles(packed).int()]


def unpack_iq4_nl(blocks: Tensor) -> Tensor:
    return read_float16(blocks, 0) * _map_nibbles(IQ4_VALUES, blocks[..., 2:])


def unpack_iq4_xs(blocks: Tensor) -> Tensor:
    """Each 32 numbers have a scale of 6 bits, of which 32 is 0."""
    upper = _split_fields(blocks[..., 2:4], 2).mT.flatten(-2)
    lower = _split_fields(blocks[..., 4:8], 4).mT.flatten(-2)
    scale = read_float16(blocks, 0) * ((lower | upper << 4).float() - 32)
    numbers = _map_nibbles(IQ4_VALUES, split_last_dimension(blocks[..., 8:], 8, 16))
    return (scale[..., None] * numbers).flatten(-2)


def unpack_mxfp4(blocks: Tensor) -> Tensor:
    """A block's scale is a power of 2. No byte of it is nan, as in llama.cpp."""
    scale = torch.exp2(blocks[..., :1].float() - 128)
    return scale * _map_nibbles(MXFP4_VALUES, blocks[..., 1:])


def _unpack_scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of Q4_K and Q5_K, (…, 8, 1): 6 bits each, in 12 bytes."""
    low, high, both = split_last_dimension(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([low & 63, (both & 15) | (low >> 6 << 4)], -1)
    mins = torch.cat([high & 63, (both >> 4) | (high >> 6 << 4)], -1)
    scale = read_float16(blocks, 0) * scales.float()
    return scale[..., None], (read_float16(blocks, 2) * mins.float())[..., None]


def _unpack_k(blocks: Tensor, *, has_fifth: bool) -> Tensor:
    """Return numbers of Q4_K or Q5_K."""
    scale, least = _unpack_scales_and_mins(blocks)
    low = split_last_dimension(blocks[..., 48 if has_fifth else 16 :], 4, 32)
    # 8 groups of 32: each 32 bytes hold two
    values = _split_fields(low, 4).flatten(-3, -2)
    if has_fifth:
        values = values | _split_fields(blocks[..., 16:48], 1) << 4
    return (scale * values.float() - least).flatten(-2)


def unpack_q6_k(blocks: Tensor) -> Tensor:
    low_bytes = split_last_dimension(blocks[..., :128], 2, 64)
    low = _split_fields(low_bytes, 4).flatten(-2)  # (…, 2, 128)
    high_bytes = split_last_dimension(blocks[..., 128:192], 2, 32)
    high = _split_fields(high_bytes, 2).flatten(-2)
    values = split_last_dimension((low | high << 4).flatten(-2), 16, 16).float() - 32
    scale = read_float16(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return (scale[..., None] * values).flatten(-2)


def _split_two_bits(packed: Tensor) -> Tensor:
    """Return 64 bytes as 16 groups of 16 numbers of 2 bits."""
    return split_last_dimension(
        _split_fields(split_last_dimension(packed, 2, 32), 2).flatten(-3), 16, 16
    )


def unpack_q2_k(blocks: Tensor) -> Tensor:
    scale = read_float16(blocks, 80) * (blocks[..., :16] & 15).float()
    least = read_float16(blocks, 82) * (blocks[..., :16] >> 4).float()
    values = _split_two_bits(blocks[..., 16:80]).float()
    return (scale[..., None] * values - least[..., None]).flatten(-2)


def unpack_q3_k(blocks: Tensor) -> Tensor:
    third = split_last_dimension(_split_fields(blocks[..., :32], 1).flatten(-2), 16, 16)
    values = _split_two_bits(blocks[..., 32:96]).float() - 4 * (1 - third.float())
    low = _split_nibbles(blocks[..., 96:104])
    high = _split_fields(blocks[..., 104:108], 2).flatten(-2)
    scale = read_float16(blocks, 108) * ((low | high << 4).float() - 32)
    return (scale[..., None] * values).flatten(-2)


# Those with a `kind` are held in their bits; others are floats once they are read.
GGUF_FORMATS = (
    Blocks("Q8_0", 32, 34, unpack_q8_0, kind=2),
    Blocks(
        "Q4_0",
        32,
        18,
        partial(_unpack_short_block, has_fifth=False, has_least=False),
        kind=5,
    ),
    Blocks(
        "Q4_1",
        32,
        20,
        partial(_unpack_short_block, has_fifth=False, has_least=True),
        kind=6,
    ),
    Blocks(
        "Q5_0",
        32,
        22,
        partial(_unpack_short_block, has_fifth=True, has_least=False),
        kind=7,
    ),
    Blocks(
        "Q5_1",
        32,
        24,
        partial(_unpack_short_block, has_fifth=True, has_least=True),
        kind=8,
    ),
    Blocks("Q4_K", 256, 144, partial(_unpack_k, has_fifth=False), kind=9),
    Blocks("Q5_K", 256, 176, partial(_unpack_k, has_fifth=True), kind=10),
    Blocks("Q6_K", 256, 210, unpack_q6_k, kind=11),
    Blocks("Q2_K", 256, 84, unpack_q2_k),
    Blocks("Q3_K", 256, 110, unpack_q3_k),
    Blocks("MXFP4", 32, 17, unpack_mxfp4, kind=15),
    Blocks("IQ4_NL", 32, 18, unpack_iq4_nl, kind=16),
    Blocks("IQ4_XS", 256, 136, unpack_iq4_xs, kind=17),
)

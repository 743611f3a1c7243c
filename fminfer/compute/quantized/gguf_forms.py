"""The forms of GGUF files, after the structs of ggml-common.h: how bytes of blocks become numbers.

`d` and `dmin` are float16 numbers of a block. K forms have blocks of 256 numbers, in groups with
whole numbers that `d` and `dmin` are multiplied by.
"""

from __future__ import annotations

import torch

from fminfer.compute.quantized.block_format import Blocks

# What the 16 values of IQ4_NL stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # halves
Tensor = torch.Tensor


def divided(packed: Tensor, *sizes: int) -> Tensor:
    """Return the last dimension as several."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _halves(blocks: Tensor, first: int, num: int = 1) -> Tensor:
    """Return float16 numbers of blocks, (…, num) float32."""
    return blocks[..., first : first + 2 * num].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the lower halves of bytes, then their upper ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Return each byte's fields of so many bits as rows, (…, fields, bytes), the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields: Tensor = (packed[..., None, :] >> shifts[:, None]) & (2**bits - 1)
    return fields


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return 32 bits of 4 bytes, each worth 16."""
    return _fields(packed, 1).mT.flatten(-2) << 4


def unpack_q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def unpack_q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[..., 2:]).float() - 8)


def unpack_q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[..., 4:]).float() + _halves(blocks, 2)


def unpack_q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _halves(blocks, 0) * (values.float() - 16)


def unpack_q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _halves(blocks, 0) * values.float() + _halves(blocks, 2)


def _looked_up(values: tuple[int, ...], packed: Tensor) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=packed.device)
    return table[_nibbles(packed).int()]


def unpack_iq4_nl(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _looked_up(IQ4_VALUES, blocks[..., 2:])


def unpack_mxfp4(blocks: Tensor) -> Tensor:
    """A block's scale is a power of 2."""
    scale = torch.exp2(blocks[..., :1].float() - 128)
    return scale * _looked_up(MXFP4_VALUES, blocks[..., 1:])


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of Q4_K and Q5_K, (…, 8, 1): 6 bits each, in 12 bytes."""
    low, high, both = divided(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([low & 63, (both & 15) | (low >> 6 << 4)], -1)
    mins = torch.cat([high & 63, (both >> 4) | (high >> 6 << 4)], -1)
    scale = _halves(blocks, 0) * scales.float()
    return scale[..., None], (_halves(blocks, 2) * mins.float())[..., None]


def _groups_of_nibbles(packed: Tensor) -> Tensor:
    """Return 128 bytes as 8 groups of 32: each 32 bytes hold two."""
    return _fields(divided(packed, 4, 32), 4).flatten(-3, -2)


def unpack_q4_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_mins(blocks)
    return (scale * _groups_of_nibbles(blocks[..., 16:]).float() - least).flatten(-2)


def unpack_q5_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_mins(blocks)
    fifth = _fields(blocks[..., 16:48], 1) << 4
    values = _groups_of_nibbles(blocks[..., 48:]) | fifth
    return (scale * values.float() - least).flatten(-2)


def unpack_q6_k(blocks: Tensor) -> Tensor:
    low = _fields(divided(blocks[..., :128], 2, 64), 4).flatten(-2)  # (…, 2, 128)
    high = _fields(divided(blocks[..., 128:192], 2, 32), 2).flatten(-2)
    values = divided((low | high << 4).flatten(-2), 16, 16).float() - 32
    scale = _halves(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return (scale[..., None] * values).flatten(-2)


def _groups_of_twos(packed: Tensor) -> Tensor:
    """Return 64 bytes as 16 groups of 16 numbers of 2 bits."""
    return divided(_fields(divided(packed, 2, 32), 2).flatten(-3), 16, 16)


def unpack_q2_k(blocks: Tensor) -> Tensor:
    scale = _halves(blocks, 80) * (blocks[..., :16] & 15).float()
    least = _halves(blocks, 82) * (blocks[..., :16] >> 4).float()
    values = _groups_of_twos(blocks[..., 16:80]).float()
    return (scale[..., None] * values - least[..., None]).flatten(-2)


def unpack_q3_k(blocks: Tensor) -> Tensor:
    third = divided(_fields(blocks[..., :32], 1).flatten(-2), 16, 16)
    values = _groups_of_twos(blocks[..., 32:96]).float() - 4 * (1 - third.float())
    low = _nibbles(blocks[..., 96:104])
    high = _fields(blocks[..., 104:108], 2).flatten(-2)
    scale = _halves(blocks, 108) * ((low | high << 4).float() - 32)
    return (scale[..., None] * values).flatten(-2)


# Held in their bits.
GGUF_FORMS = (
    Blocks("Q8_0", 32, 34, unpack_q8_0, kind=2),
    Blocks("Q4_0", 32, 18, unpack_q4_0, kind=5),
    Blocks("Q4_1", 32, 20, unpack_q4_1, kind=6),
    Blocks("Q5_0", 32, 22, unpack_q5_0, kind=7),
    Blocks("Q5_1", 32, 24, unpack_q5_1, kind=8),
    Blocks("Q4_K", 256, 144, unpack_q4_k, kind=9),
    Blocks("Q5_K", 256, 176, unpack_q5_k, kind=10),
    Blocks("Q6_K", 256, 210, unpack_q6_k, kind=11),
    # Floats once they are read.
    Blocks("Q2_K", 256, 84, unpack_q2_k),
    Blocks("Q3_K", 256, 110, unpack_q3_k),
    Blocks("IQ4_NL", 32, 18, unpack_iq4_nl),
    Blocks("MXFP4", 32, 17, unpack_mxfp4),
)

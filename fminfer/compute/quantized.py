"""The forms of weights in blocks: of GGUF files, and fminfer's own 8 and 4 bits.

GGUF's are as the structs of ggml-common.h have them: `d` and `dmin` are float16 numbers
of a block. K forms have blocks of 256 numbers, in groups with whole numbers that both
are multiplied by.

Ours are what `--quantize` makes of a model. A block is a scale in float16, in some
forms a minimum, and then its numbers. 8 numbers of 4 bits are one unit of 32 bits, in
which the kernels multiply
them: first those with an even place, then those with an odd one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from fminfer.compute.values.weights import Shape, Tensors, Use

Tensor = torch.Tensor
Unpack = Callable[[Tensor], Tensor]  # (…, bytes of a block) → (…, numbers) float32
Pack = Callable[[Tensor], Tensor]  # and back
# Numbers that one thread makes blocks of at once: torch does not divide so few among threads.
PACKED_AT_ONCE = 1 << 15
# What the 16 values of IQ4_NL stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # halves
# The smallest float16, and the step between small ones. As a least scale it avoids 0 / 0.
LEAST_SCALE = 2.0**-24


@dataclass(slots=True, frozen=True)
class Blocks:
    """A format whose only tensor holds the bytes of blocks, (…, outputs, bytes of a row)."""

    name: str  # what people call it
    block: int  # the numbers of a block; 0: a row is one block
    # of a block; where a row is one, those beside a byte for each number
    block_bytes: int
    unpack: Unpack = field(compare=False)
    # None: such weights are only read
    pack: Pack | None = field(default=None, compare=False)
    # its number in `forms.h`; None: it becomes floats when it is read
    kind: int | None = None

    def row_bytes(self, inputs: int) -> int:
        """Return what a row of a weight takes."""
        if self.block:
            return inputs // self.block * self.block_bytes
        return inputs + self.block_bytes

    def fits_inputs(self, inputs: int) -> bool:
        """Tell whether rows of so many numbers are whole blocks."""
        return inputs % (self.block or 32) == 0

    def num_bytes(self, shape: Shape) -> int:
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        size = (*shape[:-1], self.row_bytes(shape[-1]))
        return (torch.empty(size, dtype=torch.uint8, device=device),)

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        (packed,) = tensors
        size = self.block_bytes if self.block else packed.shape[-1]
        return (
            self.unpack(packed.reshape(*packed.shape[:-1], -1, size))
            .flatten(-2)
            .to(dtype)
        )

    def quantize(self, numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the only tensor of a weight, of numbers (…, outputs, inputs), or fill `out`."""
        assert self.pack is not None and self.fits_inputs(numbers.shape[-1]), (
            "numbers for blocks"
        )
        if out is None:
            (out,) = self.empty(tuple(numbers.shape), numbers.device)
        if numbers.dim() > 2:
            for item, item_out in zip(numbers, out, strict=True):
                self.quantize(item, item_out)
            return out
        step = max(1, PACKED_AT_ONCE // max(1, numbers.shape[1]))
        pack = self.pack
        target = out

        def pack_rows(first: int) -> None:
            with torch.inference_mode(target.is_inference()):  # a thread's own mode
                part = numbers[first : first + step].float()
                blocks = pack(part.reshape(len(part), -1, self.block or part.shape[1]))
                target[first : first + step] = blocks.flatten(-2)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            # raises what they raise
            list(threads.map(pack_rows, range(0, len(numbers), step)))
        return out

    def cut_inputs(self, packed: Tensor, columns: range) -> Tensor:
        """Return the bytes of some inputs: of whole blocks, or of any where a row is
        one block."""
        if self.block:
            first, last = (
                end // self.block * self.block_bytes
                for end in (columns.start, columns.stop)
            )
            return packed[..., first:last]
        first, last = (end + self.block_bytes for end in (columns.start, columns.stop))
        return torch.cat([packed[..., : self.block_bytes], packed[..., first:last]], -1)

    # What checkpoints store so; see models/formats.StoredFormat.

    @property
    def types(self) -> tuple[str, ...]:
        return ("U8",) if self.pack else (self.name,)

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> dict[str, tuple[str, Shape]]:
        if is_transposed:
            return {name: ("", ())}  # of no type that a file has
        size = (
            (*shape[:-1], self.row_bytes(shape[-1]))
            if self.fits_inputs(shape[-1])
            else ()
        )
        # fminfer's own forms are all stored as bytes
        ending = f".{self.name}" if self.pack else ""
        return {name + ending: (self.types[0], size)}

    def read(self, stored: Tensors, *, is_transposed: bool) -> Tensors:
        return stored


def split_last_dimension(packed: Tensor, *sizes: int) -> Tensor:
    """Return the last dimension as several."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _read_float16(blocks: Tensor, first: int) -> Tensor:
    """Return a float16 number of each block, (…, 1) float32."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).float()


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
    return _read_float16(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


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
        return _read_float16(blocks, 0) * values.float() + _read_float16(blocks, 2)
    return _read_float16(blocks, 0) * (values.float() - (16 if has_fifth else 8))


def _map_nibbles(values: tuple[int, ...], packed: Tensor) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=packed.device)
    return table[_split_nibbles(packed).int()]


def unpack_iq4_nl(blocks: Tensor) -> Tensor:
    return _read_float16(blocks, 0) * _map_nibbles(IQ4_VALUES, blocks[..., 2:])


def unpack_mxfp4(blocks: Tensor) -> Tensor:
    """A block's scale is a power of 2."""
    scale = torch.exp2(blocks[..., :1].float() - 128)
    return scale * _map_nibbles(MXFP4_VALUES, blocks[..., 1:])


def _unpack_scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of Q4_K and Q5_K, (…, 8, 1): 6 bits each, in 12 bytes."""
    low, high, both = split_last_dimension(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([low & 63, (both & 15) | (low >> 6 << 4)], -1)
    mins = torch.cat([high & 63, (both >> 4) | (high >> 6 << 4)], -1)
    scale = _read_float16(blocks, 0) * scales.float()
    return scale[..., None], (_read_float16(blocks, 2) * mins.float())[..., None]


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
    scale = _read_float16(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return (scale[..., None] * values).flatten(-2)


def _split_two_bits(packed: Tensor) -> Tensor:
    """Return 64 bytes as 16 groups of 16 numbers of 2 bits."""
    return split_last_dimension(
        _split_fields(split_last_dimension(packed, 2, 32), 2).flatten(-3), 16, 16
    )


def unpack_q2_k(blocks: Tensor) -> Tensor:
    scale = _read_float16(blocks, 80) * (blocks[..., :16] & 15).float()
    least = _read_float16(blocks, 82) * (blocks[..., :16] >> 4).float()
    values = _split_two_bits(blocks[..., 16:80]).float()
    return (scale[..., None] * values - least[..., None]).flatten(-2)


def unpack_q3_k(blocks: Tensor) -> Tensor:
    third = split_last_dimension(_split_fields(blocks[..., :32], 1).flatten(-2), 16, 16)
    values = _split_two_bits(blocks[..., 32:96]).float() - 4 * (1 - third.float())
    low = _split_nibbles(blocks[..., 96:104])
    high = _split_fields(blocks[..., 104:108], 2).flatten(-2)
    scale = _read_float16(blocks, 108) * ((low | high << 4).float() - 32)
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
    Blocks("IQ4_NL", 32, 18, unpack_iq4_nl),
    Blocks("MXFP4", 32, 17, unpack_mxfp4),
)


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


def _pack_units(values: Tensor) -> Tensor:
    """Return numbers of 4 bits in units, (…, numbers / 2 bytes): 8 bytes at once."""
    eight = values.contiguous().view(torch.int64)
    both = eight | eight >> 12  # bytes 0, 1, 4 and 5 have numbers i and i + 2
    units = (
        both & 0xFF
        | both >> 24 & 0xFF00
        | both << 8 & 0xFF0000
        | both >> 16 & 0xFF000000
    )
    return units.view(torch.int32)[..., ::2].contiguous().view(torch.uint8)


def _unpack_units(packed: Tensor) -> Tensor:
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
    return torch.cat([_float16_bytes(scale), _pack_units(values)], -1)


def unpack_symmetric(blocks: Tensor) -> Tensor:
    return _read_float16(blocks, 0) * (_unpack_units(blocks[..., 2:]) - 8)


def pack_int4(blocks: Tensor) -> Tensor:
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    least = least.half().float()
    scale = _make_scales(most - least, 15)
    values = ((blocks - least) / scale).round_().clamp_(0, 15).to(torch.uint8)
    return torch.cat(
        [_float16_bytes(scale), _float16_bytes(least), _pack_units(values)], -1
    )


def unpack_int4(blocks: Tensor) -> Tensor:
    return _read_float16(blocks, 0) * _unpack_units(blocks[..., 4:]) + _read_float16(
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
UNPACKING: dict[str, tuple[int, float]] = {
    "Q8_0": (5, 19.4),
    "Q4_0": (9, 31.4),
    "Q4_1": (11, 31.9),
    "Q5_0": (15, 41.6),
    "Q5_1": (17, 42.0),
    "Q4_K": (27, 32.1),
    "Q5_K": (32, 40.3),
    "Q6_K": (16, 39.9),
    "int8": (5, 19.1),
    "int8-32": (5, 19.4),
    "int8-row": (5, 19.0),
    "int4": (12, 33.9),
    "int4-128": (12, 33.2),
    "int4-symmetric": (10, 33.4),
    "int4-symmetric-128": (10, 33.1),
}


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

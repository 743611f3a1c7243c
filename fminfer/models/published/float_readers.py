"""Reads floats of 8 and 4 bits with scales: e4m3, gpt-oss's MXFP4, and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from fminfer.compute.formats.gguf_rows import GGUF_FORMATS, MXFP4_VALUES
from fminfer.compute.formats.published_rows import make_float8, pack_float8, pack_mxfp4
from fminfer.compute.values.weights import Format, Shape, Tensors
from fminfer.core.errors import CheckpointError
from fminfer.models.holding import StoredPart
from fminfer.models.published.whole_readers import (
    FETCH_AGAIN,
    SCALE_TYPES,
    choose_block,
    make_float_rows,
    read_scales,
)

Tensor = torch.Tensor
FLOAT8_BLOCKS = (128, 32)  # of inputs that kernels multiply
MXFP4_GROUP = 32
MXFP4_NAN = 255  # as the exponent of a scale
NVFP4_GROUP = 16
MXFP4 = next(each for each in GGUF_FORMATS if each.name == "MXFP4")


@dataclass(slots=True, frozen=True)
class Float8Scheme:
    """What a config says of modules whose weights are e4m3."""

    # outputs and inputs that share a scale; 0: all
    tile: tuple[int, int]
    # the names of scales, as some files or others have them
    scale_names: tuple[str, ...] = ("weight_scale",)


@dataclass(slots=True, frozen=True)
class Float8Reader:
    """Reads a matrix of e4m3; a row's scales are those of the tiles that it lies in."""

    scheme: Float8Scheme
    shape: Shape  # outputs, inputs
    format: Format
    block: int  # inputs of one block; 0: it becomes floats

    @property
    def tile(self) -> Shape:
        return tuple(
            side or size
            for side, size in zip(self.scheme.tile, self.shape, strict=True)
        )

    @property
    def scales_shape(self) -> Shape:
        return tuple(
            -(-size // side) for size, side in zip(self.shape, self.tile, strict=True)
        )

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, StoredPart]:
        module = name.removesuffix("weight")
        scales = "|".join(module + each for each in self.scheme.scale_names)
        return {
            name: (("F8_E4M3",), shape),
            scales: ((*SCALE_TYPES, "F8_E8M0"), self.scales_shape),
        }

    def read(self, stored: Mapping[str, Tensor], *, is_transposed: bool) -> Tensors:
        numbers_name, scales_name = stored
        numbers = stored[numbers_name]
        scales = read_scales(stored, scales_name, self.scales_shape)
        rows, columns = self.tile
        scales = scales.repeat_interleave(rows, 0)[: self.shape[0]]
        tile_of_input = torch.arange(self.shape[1]) // columns
        if not self.block:
            floats = scales[:, tile_of_input] * numbers.float()
            return (floats.view(torch.uint8),)
        return (pack_float8(numbers, scales[:, tile_of_input[:: self.block]]),)


@cache
def make_float8_reader(scheme: Float8Scheme, shape: Shape) -> Float8Reader:
    """Return the reader of matrices of a shape."""
    inputs = shape[1]
    block = choose_block(scheme.tile[1], inputs, FLOAT8_BLOCKS)
    if block is None:
        return Float8Reader(scheme, shape, make_float_rows("float8"), block=0)
    return Float8Reader(scheme, shape, make_float8(block), block or inputs)


@dataclass(slots=True, frozen=True)
class Mxfp4Reader:
    """Reads all experts of a parameter of gpt-oss: `…_blocks` and `…_scales`."""

    format: Format = MXFP4

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, StoredPart]:
        groups = (*shape[:-1], shape[-1] // MXFP4_GROUP)
        return {
            f"{name}_blocks": (("U8",), (*groups, MXFP4_GROUP // 2)),
            f"{name}_scales": (("U8",), groups),
        }

    def read(self, stored: Mapping[str, Tensor], *, is_transposed: bool) -> Tensors:
        blocks, scales = stored.values()
        if (scales == MXFP4_NAN).any():
            *_, name = stored
            raise CheckpointError(
                f"tensor {name!r} has scales that are nan. {FETCH_AGAIN}"
            )
        rows = torch.empty(
            (*scales.shape[:-1], MXFP4.row_bytes(scales.shape[-1] * MXFP4_GROUP)),
            dtype=torch.uint8,
        )
        # one by one, for temporary copies of all would be large
        for expert_rows, expert_blocks, expert_scales in zip(
            rows, blocks, scales, strict=True
        ):
            expert_rows.copy_(pack_mxfp4(expert_blocks, expert_scales))
        return (rows,)


@dataclass(slots=True, frozen=True)
class Nvfp4Reader:
    """Reads a matrix of NVFP4 into floats; the scale of a tensor divides those of groups."""

    format: Format = make_float_rows("nvfp4")

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, StoredPart]:
        outputs, inputs = shape
        return {
            f"{name}_packed": (("U8",), (outputs, inputs // 2)),
            f"{name}_scale": (("F8_E4M3",), (outputs, inputs // NVFP4_GROUP)),
            f"{name}_global_scale": (SCALE_TYPES, (1,)),
        }

    def read(self, stored: Mapping[str, Tensor], *, is_transposed: bool) -> Tensors:
        packed_name, scales_name, tensor_scale_name = stored
        tensor_scale = read_scales(stored, tensor_scale_name, (1,))
        if not tensor_scale.all():
            raise CheckpointError(
                f"tensor {tensor_scale_name!r} is 0, and scales are divided by it. "
                f"{FETCH_AGAIN}"
            )
        packed = stored[packed_name]
        scales_shape = (packed.shape[0], packed.shape[1] * 2 // NVFP4_GROUP)
        scales = read_scales(stored, scales_name, scales_shape) / tensor_scale
        values = torch.tensor(MXFP4_VALUES, dtype=torch.float32) / 2
        # of a byte, the lower half first
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
        floats = pairs.index_select(0, packed.flatten().int())
        groups = floats.view(*scales.shape, NVFP4_GROUP).mul_(scales[..., None])
        return (groups.flatten(-2).view(torch.uint8),)


MXFP4_EXPERTS = Mxfp4Reader()
NVFP4 = Nvfp4Reader()

"""The place of a tensor in a file, the same for every kind of file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from fminfer.models.stored.gguf_types import BLOCKS

# Bits of a value, by the type's name in safetensors.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
    **dict.fromkeys(BLOCKS, 8),  # whose shapes are in bytes
}
FLOATS = ("F64", "F32", "BF16", "F16")  # the types in which weights run
MOST_HEADER_BYTES = 100_000_000  # of what names the tensors of a file


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """Where the values of one tensor lie.

    Args:
        dtype: its name in safetensors.
        start: the byte of its first value in the file.
        strides: in values.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the file from its first value to its last."""
        if not math.prod(self.shape):
            return self.start, self.start
        far = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.start, self.start + -(-(far + 1) * BITS.get(self.dtype, 8) // 8)

    def rows(self, first: int, last: int) -> StoredTensor:
        """Return some of its rows."""
        start = self.start + first * self.strides[0] * BITS[self.dtype] // 8
        return replace(self, start=start, shape=(last - first, *self.shape[1:]))


@dataclass(slots=True, frozen=True)
class JoinedTensor:
    """A tensor that lies in one or several parts, joined along a dimension."""

    parts: tuple[StoredTensor, ...]
    dim: int = 0

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [*self.parts[0].shape]
        if len(self.parts) > 1:
            shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)


@dataclass(slots=True, frozen=True)
class StoredFile:
    """What a file holds."""

    path: Path
    tensors: dict[str, StoredTensor]
    header: tuple[int, int]  # the bytes that name its tensors


def plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose values follow each other."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))

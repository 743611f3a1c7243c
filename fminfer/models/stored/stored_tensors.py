"""The place of a tensor in a file, the same for every kind of file; safetensors says it plainly."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fminfer.core.impostors import broken

# Of GGUF: inputs of a block → types, each with the bytes of one. A row is blocks after each other.
_SIZES = {
    32: "Q4_0 18 Q4_1 20 Q5_0 22 Q5_1 24 Q8_0 34 Q8_1 40 IQ4_NL 18 MXFP4 17 Q4_0_4_4 18"
    " Q4_0_4_8 18 Q4_0_8_8 18 IQ4_NL_4_4 18 IQ4_NL_4_8 18 IQ4_NL_8_8 18",
    64: "NVFP4 36 Q2_0 18",
    128: "Q1_0 18",
    256: "Q2_K 84 Q3_K 110 Q4_K 144 Q5_K 176 Q6_K 210 Q8_K 292 IQ1_S 50 IQ1_M 56 IQ2_XXS 66"
    " IQ2_XS 74 IQ2_S 82 IQ3_XXS 98 IQ3_S 110 IQ4_XS 136 TQ1_0 54 TQ2_0 66",
}
BLOCKS: dict[str, tuple[int, int]] = {
    name: (size, int(num_bytes))
    for size, words in _SIZES.items()
    for name, num_bytes in zip(words.split()[::2], words.split()[1::2], strict=True)
}
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
    """Where the values of one tensor lie."""

    file: Path
    dtype: str  # its name in safetensors
    shape: tuple[int, ...]
    start: int  # the byte of its first value
    strides: tuple[int, ...]  # in values

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


def read_safetensors(path: Path) -> StoredFile:
    """Return what a safetensors file holds.

    The header is 8 bytes of its length, then JSON. Values follow without holes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or start > size:
            raise broken(path, f"its header should have {start} bytes, the file has {size}")
        if start > MOST_HEADER_BYTES:
            raise broken(path, f"a header of {start} bytes; the most are {MOST_HEADER_BYTES}")
        try:
            header = json.loads(file.read(start - 8), object_pairs_hook=_without_doubles)
            header.pop("__metadata__", None)
            tensors = {name: _place(path, entry, start) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise broken(path, f"its header: {error or type(error).__name__}") from error
    _check_order(path, tensors, start, size)
    return StoredFile(path, tensors, (0, start))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return found


def _place(path: Path, entry: dict[str, Any], start: int) -> StoredTensor:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"sizes and offsets are whole numbers, not {entry}")
    if dtype not in BITS:  # a type of tomorrow, refused by its name later
        shape = (last - first,)
    if math.prod(shape) * BITS.get(dtype, 8) != 8 * (last - first):
        raise ValueError(f"{dtype} of the shape {shape} does not take {last - first} bytes")
    return StoredTensor(path, dtype, shape, start + first, plain_strides(shape))


def _check_order(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Refuse tensors that overlap, holes between them, and a file that ends too early or late."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].span):
        first, last = tensor.span
        if first != end:
            raise broken(path, f"tensor {name!r} begins at byte {first} instead of {end}")
        end = last
    if end != size:
        raise broken(path, f"it has {size} bytes, and its header tells of {end}")

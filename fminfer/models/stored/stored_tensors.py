"""Where a tensor lies in a file, for every kind of file; and the reader of safetensors."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import torch

from fminfer.core.impostors import broken_file_error, naming_broken_files

# Types of GGUF by their numbers, from 0 on: name, and of those in blocks the inputs and
# the bytes of one. A row is blocks after each other. Those behind _4_ or _8_ were
# interleaved for some processors, and ggml has given them up.
_GGUF = """
F32 F16 Q4_0/32/18 Q4_1/32/20 - - Q5_0/32/22 Q5_1/32/24 Q8_0/32/34 Q8_1/32/40 Q2_K/256/84
Q3_K/256/110 Q4_K/256/144 Q5_K/256/176 Q6_K/256/210 Q8_K/256/292 IQ2_XXS/256/66 IQ2_XS/256/74
IQ3_XXS/256/98 IQ1_S/256/50 IQ4_NL/32/18 IQ3_S/256/110 IQ2_S/256/82 IQ4_XS/256/136 I8 I16 I32 I64
F64 IQ1_M/256/56 BF16 Q4_0_4_4/32/18 Q4_0_4_8/32/18 Q4_0_8_8/32/18 TQ1_0/256/54 TQ2_0/256/66
IQ4_NL_4_4/32/18 IQ4_NL_4_8/32/18 IQ4_NL_8_8/32/18 MXFP4/32/17 NVFP4/64/36 Q1_0/128/18 Q2_0/64/18
"""
GGUF_TYPES = [each.split("/") for each in _GGUF.split()]
BLOCKS = {name: (int(sizes[0]), int(sizes[1])) for name, *sizes in GGUF_TYPES if sizes}
# Of values, by the type's name in safetensors; those in blocks have shapes in bytes.
DTYPES = {
    **{
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    },
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
    },
    **{"BOOL": torch.bool, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **dict.fromkeys(BLOCKS, torch.uint8),
}
BITS = {
    **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
FLOATS = ("F64", "F32", "BF16", "F16")  # the types in which weights run
MOST_HEADER_BYTES = 100_000_000  # of what names the tensors of a file
# in the header of a safetensors file; a tensor has about 5
MOST_HEADER_VALUES = 2_000_000
MOST_DIMENSIONS = 16  # of a tensor; weights have up to four


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
        far = sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        return self.start, self.start + -(-(far + 1) * BITS.get(self.dtype, 8) // 8)

    def slice_rows(self, first: int, last: int) -> StoredTensor:
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
    """What a file holds. Types, shapes and spans are of each tensor, by its name."""

    path: Path
    header: tuple[int, int]  # the bytes that name its tensors
    tensors: Mapping[str, StoredTensor]
    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    spans: Mapping[str, tuple[int, int]]


def make_stored_file(
    path: Path, tensors: Mapping[str, StoredTensor], header: tuple[int, int]
) -> StoredFile:
    """Return a file of the tensors that were made of its header."""
    return StoredFile(
        path,
        header,
        tensors,
        types={name: tensor.dtype for name, tensor in tensors.items()},
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        spans={name: tensor.span for name, tensor in tensors.items()},
    )


class LazyTensors(Mapping[str, StoredTensor]):
    """The tensors of a safetensors file whose header is sound, each made when it is used.

    A large model has tens of thousands, of which a rank may need few. Tuples of numbers
    cost the garbage collector nothing; objects would.
    """

    def __init__(
        self,
        path: Path,
        types: dict[str, str],
        shapes: dict[str, tuple[int, ...]],
        spans: dict[str, tuple[int, int]],
    ) -> None:
        self._path = path
        self._types = types
        self._shapes = shapes
        self._spans = spans

    def __getitem__(self, name: str) -> StoredTensor:
        shape = self._shapes[name]
        start, _ = self._spans[name]
        strides = plain_strides(shape)
        return StoredTensor(self._path, self._types[name], shape, start, strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)


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
            raise broken_file_error(
                path, f"its header should have {start} bytes, the file has {size}"
            )
        if start > MOST_HEADER_BYTES:
            raise broken_file_error(
                path, f"a header of {start} bytes; the most are {MOST_HEADER_BYTES}"
            )
        raw = file.read(start - 8)
    with naming_broken_files(f"the header of {path}"):
        # a value takes more memory than its text
        if raw.count(b",") > MOST_HEADER_VALUES:
            raise ValueError(f"it has more than {MOST_HEADER_VALUES} values")
        sound_file = _parse_sound_header(path, raw, start, size)
        if sound_file is not None:
            return sound_file
        tensors = _parse_header(path, raw, start)
    _check_holes(path, tensors, start, size)
    return make_stored_file(path, tensors, (0, start))


def _parse_sound_header(
    path: Path, raw: bytes, start: int, size: int
) -> StoredFile | None:
    """Parse a header all at once if it is sound; None: each entry is to be looked at.

    It accepts nothing that `_parse_header` and `_check_holes` refuse. These say what is
    wrong, and read what is odd but right.
    """
    try:
        header = orjson.loads(raw)
        # A name that stands twice is there once in a dict, and its colon is lost.
        has_doubles = orjson.dumps(header).count(b":") != raw.count(b":")
        if b"\\" in raw or has_doubles:
            return None
        header.pop("__metadata__", None)
        offsets = [entry["data_offsets"] for entry in header.values()]
        types = {name: entry["dtype"] for name, entry in header.items()}
        shapes = {name: entry["shape"] for name, entry in header.items()}
        if not _has_sound_sizes(
            [*types.values()], [*shapes.values()], offsets, size - start
        ):
            return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    places = ((start + first, start + last) for first, last in offsets)
    spans = dict(zip(types, places, strict=True))
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    tensors = LazyTensors(path, types, shapes, spans)
    return StoredFile(path, (0, start), tensors, types, shapes, spans)


def _has_sound_sizes(
    types: list[str], shapes: list[Any], offsets: list[Any], num_bytes: int
) -> bool:
    """Tell whether tensors have the sizes that they say, and fill a file without holes."""
    if any(type(shape) is not list or len(shape) > MOST_DIMENSIONS for shape in shapes):
        return False
    numbers = [*chain.from_iterable(offsets), *chain.from_iterable(shapes)]
    if {*map(type, numbers)} - {int} or min(numbers, default=0) < 0:
        return False

    for dtype, shape, (first, last) in zip(types, shapes, offsets, strict=True):
        # types of tomorrow are looked at one by one
        if math.prod(shape) * BITS[dtype] != 8 * (last - first):
            return False

    offsets = sorted(offsets)
    starts = [first for first, _ in offsets]
    ends = [last for _, last in offsets]
    return [*starts, num_bytes] == [0, *ends]


def _parse_header(path: Path, raw: bytes, start: int) -> dict[str, StoredTensor]:
    """Parse a header entry by entry."""
    header = json.loads(raw, object_pairs_hook=_make_unique_dict)
    header.pop("__metadata__", None)
    return {name: _parse_entry(path, entry, start) for name, entry in header.items()}


def _check_holes(
    path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int
) -> None:
    """Check that values follow each other up to the end of the file."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].span):
        first, last = tensor.span
        if first != end:
            raise broken_file_error(
                path, f"tensor {name!r} begins at byte {first} instead of {end}"
            )
        end = last
    if end != size:
        raise broken_file_error(
            path, f"it has {size} bytes, and its header tells of {end}"
        )


def _make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return entries


def _parse_entry(path: Path, entry: dict[str, Any], start: int) -> StoredTensor:
    dtype = entry["dtype"]
    shape = tuple(entry["shape"])
    (first, last) = entry["data_offsets"]
    if len(shape) > MOST_DIMENSIONS or not all(
        type(number) is int and number >= 0 for number in (*shape, first, last)
    ):
        raise ValueError(
            f"sizes, at most {MOST_DIMENSIONS}, and offsets are whole numbers, not {entry}"
        )
    if dtype not in BITS:  # a type of tomorrow, refused by its name later
        shape = (last - first,)
    if math.prod(shape) * BITS.get(dtype, 8) != 8 * (last - first):
        raise ValueError(
            f"{dtype} of the shape {shape} does not take {last - first} bytes"
        )
    return StoredTensor(path, dtype, shape, start + first, plain_strides(shape))

"""Reads the header of a safetensors file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fminfer.core.impostors import broken, refuse_impostor
from fminfer.models.stored.stored_tensors import (
    BITS,
    MOST_HEADER_BYTES,
    StoredFile,
    StoredTensor,
    plain_strides,
)
from fminfer.models.stored.torch_file import read_torch_file


def read_safetensors(path: Path) -> StoredFile:
    """Return what a safetensors file holds.

    The header is 8 bytes of its length, then JSON. Values follow without holes.

    Raises:
        CheckpointError: the file is broken, or is not what its header says.
        OSError: it cannot be read.
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


def read_weight_file(path: Path) -> StoredFile:
    """Return the tensors of a file, without their values.

    Raises:
        CheckpointError: it is broken, or something else than weights.
    """
    try:
        refuse_impostor(path)
        if not path.stat().st_size:
            raise broken(path, "it is empty")
        return read_safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)
    except OSError as error:
        raise broken(path, error) from error

"""Reads where the tensors of one weight file are: of safetensors, GGUF, or pickled by torch."""

from __future__ import annotations

import io
import json
import math
import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import broken, is_gguf, refuse_impostor
from fminfer.models.stored.gguf_file import read_gguf
from fminfer.models.stored.pickles import PickledTensor, Storage, UnsafePickleError, read_pickle
from fminfer.models.stored.stored_tensors import (
    BITS,
    MOST_HEADER_BYTES,
    StoredFile,
    StoredTensor,
    plain_strides,
)


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
        if is_gguf(path):
            return read_gguf(path)[0]
        return read_safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)
    except OSError as error:
        raise broken(path, error) from error


MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the older form
# Training saves weights beside optimizers and settings, under one of these.
WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
WRONG_VALUES = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError),
    *(RecursionError, NotImplementedError, struct.error, zipfile.BadZipFile),
)
Span = tuple[int, int]


def read_torch_file(path: Path) -> StoredFile:
    """Return what a file of torch.save holds. No value is read, nothing it names is called.

    Raises:
        CheckpointError: the file is broken, or names what weights do not need.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            return _read_zip(path, file) if is_zip else _read_older(path, file)
    except UnsafePickleError as error:
        raise CheckpointError(
            f"{path} asks to load {error}, which no weights need, and nothing of it was run; take "
            "the model's safetensors, or save its weights alone: torch.save(model.state_dict(), …)"
        ) from error
    except zipfile.BadZipFile as error:
        raise broken(path, f"it is cut off: {error}") from error
    except WRONG_VALUES as error:
        raise broken(path, error or type(error).__name__) from error


def _read_zip(path: Path, file: BinaryIO) -> StoredFile:
    size = path.stat().st_size
    spans: dict[str, Span] = {}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename in spans:
                raise ValueError(f"{entry.filename} is in it twice")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"{entry.filename} is compressed, which torch.save does not do")
            spans[entry.filename] = _find_entry(file, entry, size)
    found = [name for name in spans if name.rpartition("/")[2] == "data.pkl"]
    if len(found) != 1:
        raise ValueError("it is no archive of torch.save: it should hold one data.pkl")
    top = found[0].removesuffix("data.pkl")
    if f"{top}byteorder" in spans and _read(file, spans[f"{top}byteorder"]) != b"little":
        raise ValueError("its numbers are big-endian")
    first, last = header = spans[found[0]]
    if last - first > MOST_HEADER_BYTES:
        raise ValueError(f"a data.pkl of {last - first} bytes; the most are {MOST_HEADER_BYTES}")
    value = read_pickle(io.BytesIO(_read(file, header)))
    return StoredFile(path, _find_tensors(path, value, spans, f"{top}data/"), header)


def _find_entry(file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> Span:
    """Return the bytes of an entry, whose own header may be longer than the directory says."""
    file.seek(entry.header_offset)
    start = file.read(30)
    if start[:4] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename} is not where the directory says")
    name_size, more_size = struct.unpack("<HH", start[26:30])
    first = entry.header_offset + 30 + name_size + more_size
    if first + entry.file_size > size or entry.file_size != entry.compress_size:
        raise ValueError(f"{entry.filename} should have {entry.file_size} bytes")
    return first, first + entry.file_size


def _read_older(path: Path, file: BinaryIO) -> StoredFile:
    """Read four pickles and a list of storages; each of these is its size, then its values."""
    size = path.stat().st_size
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        if read_pickle(stream) != MAGIC or read_pickle(stream) != PROTOCOL:
            raise ValueError("it is not of torch.save")
        if not read_pickle(stream).get("little_endian", True):
            raise ValueError("its numbers are big-endian")
        storages: dict[str, Storage] = {}
        value = read_pickle(stream, storages)
        keys = [str(key) for key in read_pickle(stream)]
        first = end = stream.tell()
        spans: dict[str, Span] = {}
        for key in keys:
            if end + 8 > size:
                raise ValueError(f"it is cut off: {size} bytes of at least {end + 8}")
            (num_values,) = struct.unpack("<q", stream[end : end + 8])
            start = end + 8
            end = start + max(0, num_values) * BITS[storages[key].dtype] // 8
            spans[key] = start, end
            if end > size:
                raise ValueError(f"it is cut off: {size} bytes of at least {end}")
    return StoredFile(path, _find_tensors(path, value, spans), (0, first))


def _find_tensors(
    path: Path, value: object, spans: dict[str, Span], top: str = ""
) -> dict[str, StoredTensor]:
    """Find the tensors of a state dict, which may stand in another dict, in their storages.

    Args:
        spans: of storages, by `top` and their keys.
    """
    found = {}
    for name, tensor in _tensors_of(value).items():
        try:
            found[name] = _storage_place(path, tensor, spans[top + tensor.storage.key])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
    return found


def _tensors_of(value: object) -> dict[str, PickledTensor]:
    for each in (value, *(value.get(name) for name in WRAPPERS if isinstance(value, dict))):
        if isinstance(each, dict):
            found = {name: t for name, t in each.items() if isinstance(t, PickledTensor)}
            if found:
                if not all(isinstance(name, str) for name in found):
                    raise ValueError("the names of its tensors are no strings")
                return found
    raise ValueError("it holds no dict of tensors")


def _storage_place(path: Path, pickled: PickledTensor, span: Span) -> StoredTensor:
    """Find a tensor in the bytes of its storage.

    Raises:
        ValueError: it would have more values than the storage.
    """
    shape, strides, offset = pickled.shape, pickled.strides, pickled.offset
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or type(offset) is not int:
        raise ValueError("it has no shape")
    numbers = (*shape, *strides, offset)
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("it has no shape")
    storage, bits = pickled.storage, BITS[pickled.dtype]
    start = span[0] + (storage.first * BITS[storage.dtype] + offset * bits) // 8
    tensor = StoredTensor(path, pickled.dtype, shape, start, strides)
    last = min(span[1], span[0] + storage.num_values * BITS[storage.dtype] // 8)
    num_bytes = math.prod(shape) * bits // 8
    if tensor.span[1] > last or num_bytes > max(0, last - start):
        raise ValueError(f"it should take {num_bytes} bytes, and the file has {last - start} of it")
    return tensor


def _read(file: BinaryIO, span: Span) -> bytes:
    file.seek(span[0])
    return file.read(span[1] - span[0])

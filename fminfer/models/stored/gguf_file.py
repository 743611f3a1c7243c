"""Reads the header of a GGUF file, llama.cpp's form of a model: its metadata and its tensors."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import MAGIC, check_no_impostor, naming_broken_files
from fminfer.models.stored.stored_tensors import (
    BLOCKS,
    GGUF_TYPES,
    MOST_HEADER_BYTES,
    StoredFile,
    StoredTensor,
    make_stored_file,
    plain_strides,
)

Metadata = dict[str, object]
FLOAT = 6
STRING = 8
ARRAY = 9  # kinds of values
ARRAY_START = 16  # bytes of an array before its items: kinds, and how many they are
# Values of the metadata: number → letter of numpy. 8 is a string, 9 an array.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TYPES = {number: name for number, (name, *_) in enumerate(GGUF_TYPES) if name != "-"}
ALIGNMENT = "general.alignment"
GGML_DIMENSIONS = 4  # at most, of a tensor
# Tensors whose first dimension counts experts, or heads.
STACKED = ("_exps.weight", "_exps.bias", ".attn_k_b.weight", ".attn_v_b.weight")
MOST_STACKED = 4096
# Keys whose values are of each layer, as tensors would be → the shape of one (Apertus).
OF_LAYERS: dict[str, tuple[int, ...]] = {
    "xielu.alpha_p": (1,),
    "xielu.alpha_n": (1,),
    "xielu.beta": (),
    "xielu.eps": (),
}
# A matrix of one row, which older files store as a vector.
ONE_ROW = ".ffn_gate_inp_shexp.weight"
# A vector, which files of ERNIE store as a matrix of one row.
VECTOR = ".exp_probs_b.bias"


def read_gguf(path: Path) -> tuple[StoredFile, Metadata]:
    """Return the tensors and the metadata of one GGUF file. No value of a tensor is read.

    A tensor in blocks has its rows in bytes: (…, outputs, bytes of a row). Stacked
    experts or heads are one tensor each, with their number before the end of the name.
    """
    check_no_impostor(path)
    with (
        naming_broken_files(path),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _read_header(path, _Cursor(data))


def read_float_vector(tensor: StoredTensor) -> list[float]:
    """Return the values of a vector of float32; a tensor of another kind is refused."""
    with naming_broken_files(tensor.file):
        if tensor.dtype != "F32" or len(tensor.shape) != 1:
            raise ValueError(
                f"{tensor.dtype} of shape {tensor.shape} where F32 of one is needed"
            )
        stored = np.fromfile(tensor.file, "<f4", tensor.shape[0], offset=tensor.start)
        return [float(each) for each in stored]


class _Cursor:
    """Reads little-endian values one after the other, and raises ValueError beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0
        self.size = len(data)
        self._end = min(self.size, MOST_HEADER_BYTES)

    def read_bytes(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        if num_bytes > (num_left := self._end - self.at):
            raise ValueError(
                f"{self._describe_cut()}: {num_left} of {num_bytes} bytes are left there"
            )
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]

    def _describe_cut(self) -> str:
        """Say why the header breaks off, as the beginning of a sentence."""
        if self._end < self.size:
            return f"its header is damaged, or longer than {MOST_HEADER_BYTES} bytes"
        return (
            f"it has {self.size} bytes and is cut off in its header, or that is damaged"
        )

    def read_numbers(self, form: str, num: int) -> list[Any]:
        """Return so many values, by their letter of numpy."""
        dtype = np.dtype(f"<{form}")
        return list(
            np.frombuffer(self.read_bytes(num * dtype.itemsize), dtype).tolist()
        )

    def read_integer(self, form: str = "I") -> int:
        """Return a whole number of 4 bytes, "Q": of 8."""
        return int(self.read_numbers(form, 1)[0])

    def read_texts(self, num: int) -> list[str]:
        """Return so many strings: each is its length in 8 bytes, then UTF-8.

        A vocabulary has a hundred thousand, so that `read_bytes` would be too slow.
        """
        data = self._data
        at = self.at
        end = self._end
        unpack = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(num):
            if (first := at + 8) > end or (at := first + unpack(data, at)[0]) > end:
                raise ValueError(f"{self._describe_cut()}: a text there is longer")
            texts.append(data[first:at].decode())
        self.at = at
        return texts

    def read_value(self) -> object:
        """Return a value of the metadata behind its kind; arrays are lists."""
        kind = self.read_integer()
        if kind == ARRAY:
            return self._read_values(self.read_integer(), self.read_integer("Q"))
        (value,) = self._read_values(kind, 1)
        # As it was written: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == FLOAT else value

    def _read_values(self, kind: int, num: int) -> list[Any]:
        if kind == STRING:
            return self.read_texts(num)
        if kind not in NUMBERS:
            raise ValueError(f"a value of the kind {kind}, which GGUF does not have")
        return self.read_numbers(NUMBERS[kind], num)


def _read_header(path: Path, cursor: _Cursor) -> tuple[StoredFile, Metadata]:
    if cursor.read_bytes(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.read_integer()
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is big-endian, which does not run; take one for x86 or ARM"
        )
    if version not in (2, 3):
        raise CheckpointError(
            f"{path} is GGUF version {version}; fminfer reads versions 2 and 3. "
            "Convert the model again with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.read_numbers("Q", 2)
    metadata: Metadata = {}
    parts: dict[str, StoredTensor] = {}
    for _ in range(num_keys):
        (key,) = cursor.read_texts(1)
        if key in metadata:
            raise ValueError(f"the key {key!r} is there twice")
        first = cursor.at
        metadata[key] = cursor.read_value()
        if key in OF_LAYERS:
            span = first + ARRAY_START, cursor.at
            parts |= _find_layer_values(path, key, metadata[key], span)
    tensors = [_read_tensor_entry(path, cursor) for _ in range(num_tensors)]
    end = cursor.at
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{ALIGNMENT} is {alignment!r}, which is no power of two")
    first = -(-end // alignment) * alignment
    full_size = first + max((tensor.span[1] for _, tensor in tensors), default=0)
    if full_size > cursor.size:
        raise ValueError(
            f"it is cut off, or its header is damaged: the file has {cursor.size} "
            f"bytes and should have {full_size}"
        )
    _check_spans(tensors, alignment)
    for name, part in (part for entry in tensors for part in _unstack_tensor(*entry)):
        if name in parts:
            raise ValueError(f"tensor {name!r} is there twice")
        parts[name] = replace(part, start=first + part.start)
    return make_stored_file(path, parts, (0, end)), metadata


def _find_layer_values(
    path: Path, key: str, values: object, span: tuple[int, int]
) -> dict[str, StoredTensor]:
    """Return a key's values, which lie at `span`, as tensors of layers."""
    start, end = span
    if not (
        isinstance(values, list)
        and {*map(type, values)} <= {float}
        and end - start == 4 * len(values)
        and len(values) <= MOST_STACKED
    ):
        raise ValueError(f"{key} is {f'{values!r:.60}'}, and no float32 of each layer")
    shape = OF_LAYERS[key]
    return {
        f"blk.{layer}.{key}": StoredTensor(
            path, "F32", shape, start + 4 * layer, plain_strides(shape)
        )
        for layer in range(len(values))
    }


def _read_tensor_entry(path: Path, cursor: _Cursor) -> tuple[str, StoredTensor]:
    """Return a tensor by its name; its start is an offset into the values of all."""
    (name,) = cursor.read_texts(1)
    num = cursor.read_integer()
    if num > GGML_DIMENSIONS:
        raise ValueError(
            f"tensor {name!r} has {num} dimensions; {GGML_DIMENSIONS} are the most"
        )
    shape = tuple(reversed(cursor.read_numbers("Q", num)))
    kind = cursor.read_integer()
    start = cursor.read_integer("Q")
    if (dtype := TYPES.get(kind)) is None:
        raise CheckpointError(
            f"{path} stores {name!r} as type {kind}, which fminfer does not know: the file is "
            "broken or newer. Take the same model in Q8_0, Q4_K_M or F16"
        )
    if dtype in BLOCKS:
        (size, num_bytes) = BLOCKS[dtype]
        row = shape[-1] if shape else 1
        if row % size:
            raise ValueError(
                f"tensor {name!r} has rows of {row}, no multiple of {size}"
            )
        shape = (*shape[:-1], row // size * num_bytes)
    return name, StoredTensor(path, dtype, shape, start, plain_strides(shape))


def _check_spans(tensors: list[tuple[str, StoredTensor]], alignment: int) -> None:
    """Raise a ValueError for tensors that are not aligned or that overlap."""
    end = 0
    before = ""
    for name, tensor in sorted(tensors, key=lambda item: item[1].span):
        last = tensor.span[1]
        if tensor.start % alignment:
            raise ValueError(
                f"tensor {name!r} begins at {tensor.start}, no multiple of {alignment}"
            )
        if tensor.start < end:
            raise ValueError(f"the tensors {before!r} and {name!r} overlap")
        end = last
        before = name


def _unstack_tensor(
    name: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each expert or head of a stacked tensor, or the tensor itself."""
    if name.endswith(ONE_ROW) and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape), strides=(*tensor.shape, 1))
    if name.endswith(VECTOR) and tensor.shape[:-1] == (1,):
        tensor = replace(tensor, shape=tensor.shape[1:], strides=tensor.strides[1:])
    if not name.endswith(STACKED) or len(tensor.shape) < 2:
        yield name, tensor
        return
    if tensor.shape[0] > MOST_STACKED:
        raise ValueError(
            f"tensor {name!r} stacks {tensor.shape[0]}; the most are {MOST_STACKED}"
        )
    stem, _, leaf = name.rpartition(".")
    item = replace(tensor, shape=tensor.shape[1:], strides=tensor.strides[1:])
    for number in range(tensor.shape[0]):
        start = tensor.slice_rows(number, number + 1).start
        yield f"{stem}.{number}.{leaf}", replace(item, start=start)

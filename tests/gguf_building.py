"""GGUF files laid out by hand, byte after byte, and changed copies of those of llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SAMPLES = Path(__file__).parent / "data" / "gguf"
LETTERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
U32 = 4
F32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
U64 = 10
Value = tuple[int, Any]  # its kind; of an array (kind of items, items)
Tensor = tuple[int, tuple[int, ...], bytes]  # ggml's type, outputs first, values
Keys = dict[str, Value]
Tensors = dict[str, Tensor]


def text(content: str, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q", len(content.encode())) + content.encode()


def value(kind: int, content: Any, order: str = "<") -> bytes:
    if kind == STRING:
        return text(content, order)
    if kind != ARRAY:
        return struct.pack(order + LETTERS[kind], content)
    of, items = content
    start = struct.pack(f"{order}IQ", of, len(items))
    return start + b"".join(value(of, each, order) for each in items)


def entry(
    name: str, kind: int, shape: tuple[int, ...], offset: int, order: str = "<"
) -> bytes:
    numbers = [*reversed(shape), kind, offset]
    form = f"{order}I{len(shape)}QIQ"
    return text(name, order) + struct.pack(form, len(shape), *numbers)


def build(
    keys: Mapping[str, Value],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    step: int = 32,
    order: str = "<",
) -> bytes:
    """Return the bytes of a file."""
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(keys))
    for key, (kind, content) in keys.items():
        head += (
            text(key, order)
            + struct.pack(f"{order}I", kind)
            + value(kind, content, order)
        )
    data = b""
    for name, (kind, shape, values) in tensors.items():
        head += entry(name, kind, shape, len(data), order)
        data += values + bytes(-len(values) % step)
    return head + bytes(-len(head) % step) + data


def f32(array: Any) -> Tensor:
    """Return an array as a tensor of float32."""
    array = np.asarray(array, np.float32)
    return 0, array.shape, array.tobytes()


def read(path: Path) -> tuple[Keys, Tensors]:
    """Read a file with llama.cpp's own package."""
    reader = gguf.GGUFReader(path)
    keys = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            kind = int(field.types[0])
            content = field.contents()
            keys[name] = (
                kind,
                (int(field.types[-1]), content) if kind == ARRAY else content,
            )
    return keys, {
        t.name: (
            int(t.tensor_type),
            tuple(map(int, reversed(t.shape))),
            t.data.tobytes(),
        )
        for t in reader.tensors
    }


def floats(tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor of float16 or float32."""
    kind, shape, values = tensor
    return np.frombuffer(values, np.float16 if kind == 1 else np.float32).reshape(shape)


def copy(
    name: str,
    target: Path,
    change: Callable[[Keys, Tensors], None] = lambda keys, tensors: None,
) -> Path:
    """Write a changed copy of a sample."""
    keys, tensors = read(SAMPLES / f"{name}.gguf")
    change(keys, tensors)
    target.write_bytes(build(keys, tensors))
    return target

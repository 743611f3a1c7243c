"""Names weight files that are not read, and refuses them if they are another model's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from fminfer.core.errors import CheckpointError
from fminfer.core.quantities import list_few
from fminfer.models.stored.stored_tensors import (
    BITS,
    DTYPES,
    FLOATS,
    StoredTensor,
    plain_strides,
)
from fminfer.models.stored.tensor_table import WeightHeaders, read_weight_file
from fminfer.models.stored.weight_folder import WeightFiles, find_weights

RIVALS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
PROJECTOR = "mmproj"  # a projector of images, which changes no text
NUM_VALUES = 1024  # compared, from the middle of each tensor
# For two dtypes: the precision of bfloat16, and the smallest steps of float16.
TOLERANCE = {"rtol": 2.0**-7, "atol": 2.0**-14}
MOST = torch.finfo(torch.float16).max  # larger values may be infinite in a copy
# A prefix of names that depends on whether the model was saved with its head.
BASE = re.compile(r"^(model|transformer|bert|roberta)\.")


def describe_unread_files(folder: Path) -> str:
    """Say which weight files of a folder are read, and which are not; "": all are read."""
    weights, others = _find_unread_files(folder)
    if not others:
        return ""
    read = list_few([file.name for file in weights.files], 1)
    return f"Weights are read from {read}. Not read: {list_few([f.name for f in others], 3)}."


def check_rival_files(folder: Path, headers: WeightHeaders) -> None:
    """Check that no unread file has other values in a tensor of the same name.

    Shapes are compared, and some values of each tensor. Many folders hold the same weights
    twice, in two formats or dtypes.

    Raises:
        CheckpointError: the folder holds two models, or a file that would be read is broken.
    """
    weights, others = _find_unread_files(folder)
    files = [headers.read(file)[0] for file in weights.files if others]
    table = {
        BASE.sub("", name): tensor
        for file in files
        for name, tensor in file.tensors.items()
        if weights.homes.get(name, file.path.name) == file.path.name
    }
    for other in others:
        if name := _find_different_tensor(table, other):
            raise CheckpointError(
                f"{folder} holds two models: {table[name].file.name} and {other.name} differ in "
                f"the tensor {name!r}. Delete what is not the model's: "
                f"{list_few([file.name for file in others], 3)}, or else "
                f"{list_few([file.name for file in weights.files], 3)}, which would be read"
            )


def _find_unread_files(folder: Path) -> tuple[WeightFiles, list[Path]]:
    """Find the weight files that are read, and other files that are named like weights.

    Incomplete weights have no other files here: loading refuses them.
    """
    weights = WeightFiles("safetensors", [])
    with suppress(CheckpointError):
        weights = find_weights(folder)
    patterns = RIVALS if weights.files and folder.is_dir() else ()
    named = {file for pattern in patterns for file in folder.glob(pattern)}
    others = named - {*weights.files}
    return weights, sorted(file for file in others if PROJECTOR not in file.name)


def _find_different_tensor(table: Mapping[str, StoredTensor], other: Path) -> str:
    """Return the first tensor that has other values in another file; "": none."""
    try:
        tensors = {
            BASE.sub("", n): t for n, t in read_weight_file(other).tensors.items()
        }
        names = sorted(tensors.keys() & table.keys())
        return next(
            (name for name in names if _has_other_values(table[name], tensors[name])),
            "",
        )
    except (CheckpointError, OSError):  # an incomplete download, which is not read
        return ""


def _has_other_values(mine: StoredTensor, theirs: StoredTensor) -> bool:
    if not {mine.dtype, theirs.dtype} <= {*FLOATS}:  # a quantized copy
        return False
    values = _read_sample(mine).float().clamp(-MOST, MOST)
    others = _read_sample(theirs).float().clamp(-MOST, MOST)
    tolerance = {"rtol": 0.0, "atol": 0.0} if mine.dtype == theirs.dtype else TOLERANCE
    return mine.shape != theirs.shape or (
        len(values) == len(others)  # else one of them is not contiguous
        and not torch.allclose(values, others, equal_nan=True, **tolerance)
    )


def _read_sample(tensor: StoredTensor) -> torch.Tensor:
    """Return values from a tensor's middle; none if the tensor is not contiguous."""
    count = math.prod(tensor.shape)
    if not count or tensor.strides != plain_strides(tensor.shape):
        return torch.empty(0)
    size = BITS[tensor.dtype] // 8
    num = min(NUM_VALUES, count)
    with tensor.file.open("rb") as file:
        file.seek(tensor.start + (count - num) // 2 * size)
        return torch.frombuffer(
            bytearray(file.read(num * size)), dtype=DTYPES[tensor.dtype]
        )

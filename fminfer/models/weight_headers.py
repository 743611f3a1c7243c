"""What the headers of weight files tell of a checkpoint, before any values are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.origins import ModelOrigins, find_origins, is_left_out
from fminfer.models.stored.stored_tensors import FLOATS
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.stored.weight_folder import indexed_names, weight_files


def check_tensors(checkpoint: Checkpoint, *, has_weights: bool = True) -> None:
    """Refuse what `load_tensors` would refuse, by the headers of the weight files alone.

    Args:
        has_weights: otherwise the names of an index are checked, if there is one.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, unexpected, or misshapen.
    """
    if checkpoint.folder is None:
        return
    if has_weights:
        find_stored(checkpoint, open_files(checkpoint, checkpoint.folder))
    elif names := indexed_names(checkpoint.folder):
        _find_origins(checkpoint, dict.fromkeys(names))


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype of most weights by their files' headers, or the config's without files.

    A config may lack it, or name another one. None: a dtype that does not run here, or a broken
    file, which loading will name.
    """
    folder = checkpoint.folder
    try:
        if folder is None or not weight_files(folder):
            own: torch.dtype | None = checkpoint.config.dtype
            return own
        return open_files(checkpoint, folder).main_dtype()
    except CheckpointError:
        return None


def open_files(checkpoint: Checkpoint, folder: Path) -> TensorFiles:
    """Read the headers of all weight files."""
    return TensorFiles(folder, checkpoint.architecture.prefix)


def _refuse_types(files: TensorFiles, left_out: str, name: str) -> None:
    """Refuse values that are no plain floats, such as those of quantized weights."""
    for tensor, dtype in files.types.items():
        if dtype not in FLOATS and not is_left_out(tensor, left_out):
            why = "weights have one of " + ", ".join(FLOATS)
            if dtype not in ("I64", "BOOL", "C64"):
                why = "quantized weights do not run yet"
            raise CheckpointError(
                f"{name} stores {tensor!r} as {dtype}: {why}. Take a checkpoint in 16 or 32 bits"
            )


def find_stored(checkpoint: Checkpoint, files: TensorFiles) -> ModelOrigins:
    """Return of which stored tensors each of ours is made.

    Raises:
        CheckpointError: a tensor is missing, unexpected, misshapen, or of a type that does not run.
    """
    _refuse_types(files, checkpoint.architecture.left_out, checkpoint.name)
    return _find_origins(checkpoint, files.shapes)


def _find_origins(
    checkpoint: Checkpoint, stored: Mapping[str, tuple[int, ...] | None]
) -> ModelOrigins:
    is_tied = bool(checkpoint.config.tie_word_embeddings)
    return find_origins(checkpoint.architecture, stored, is_tied=is_tied, name=checkpoint.name)

"""What the headers of weight files tell of a checkpoint, before any values are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fminfer.compute.weights import Dense, Format
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.formats import FORMATS
from fminfer.models.origins import ModelOrigins, find_origins
from fminfer.models.stored.stored_tensors import FLOATS
from fminfer.models.stored.tensor_table import DTYPES, TensorFiles
from fminfer.models.stored.weight_folder import indexed_names, weight_files


def check_tensors(checkpoint: Checkpoint, *, has_weights: bool = True) -> None:
    """Refuse what `open_weights` would refuse, by the headers of the weight files alone.

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


def stored_formats(checkpoint: Checkpoint) -> tuple[Format, ...]:
    """Return the format of most weights by their files' headers, or the config's without files.

    A config may lack it, or name another one. None: random weights, a format that does not run
    here, or a broken file, which loading will name.
    """
    folder = checkpoint.folder
    try:
        if folder is None or not weight_files(folder):
            own = None if folder is None else checkpoint.config.dtype
            return () if own is None else (Dense(own),)
        found = open_files(checkpoint, folder).main_type()
    except CheckpointError:
        return ()
    if found in FLOATS:
        return (Dense(DTYPES[found]),)
    return tuple(each for each in FORMATS if found in each.types)[:1]


def open_files(checkpoint: Checkpoint, folder: Path) -> TensorFiles:
    """Read the headers of all weight files."""
    return TensorFiles(folder, checkpoint.architecture.prefix)


def find_stored(checkpoint: Checkpoint, files: TensorFiles) -> ModelOrigins:
    """Return of which stored tensors each of ours is made.

    Raises:
        CheckpointError: a tensor is missing, unexpected, misshapen, or of a type that does not run.
    """
    return _find_origins(checkpoint, files.shapes, files.types)


def _find_origins(
    checkpoint: Checkpoint,
    stored: Mapping[str, tuple[int, ...] | None],
    types: Mapping[str, str] | None = None,
) -> ModelOrigins:
    is_tied = bool(checkpoint.config.tie_word_embeddings)
    architecture, name = checkpoint.architecture, checkpoint.name
    return find_origins(architecture, stored, is_tied=is_tied, name=name, types=types)

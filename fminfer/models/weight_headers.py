"""What the headers of weight files tell of a checkpoint, before any values are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fminfer.compute.weights import Dense, Format
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.origins import Origin, find_origins
from fminfer.models.stored.tensor_table import DTYPES, TensorFiles
from fminfer.models.stored.weight_folder import indexed_names, weight_files
from fminfer.models.tensor_specs import model_specs


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
        files = open_files(checkpoint, checkpoint.folder)
        find_origins(checkpoint, files.shapes, files.types)
    elif names := indexed_names(checkpoint.folder):
        find_origins(checkpoint, dict.fromkeys(names))


def stored_formats(checkpoint: Checkpoint) -> dict[str, list[tuple[Format, int]]]:
    """Return in which formats each matrix is stored, as `Holding.of` takes them.

    Names are those of `part_specs`. Files say it by their headers; the config does where there are
    none. Nothing: random weights, or files that are broken, which loading will name.
    """
    folder, model = checkpoint.folder, checkpoint.model
    if folder is None:
        return {}
    try:
        if weight_files(folder):
            files = open_files(checkpoint, folder)
            origins = find_origins(checkpoint, files.shapes, files.types).by_name()
            origins.setdefault("head.weight", origins["embed.weight"])  # one that is tied
            return {name: stored_parts(each, files.types) for name, each in origins.items()}
    except CheckpointError:
        return {}
    own = checkpoint.config.dtype
    specs = model_specs(model) if own else {}
    return {name: [(Dense(own), each.shape[0])] for name, each in specs.items()}


def stored_parts(origin: Origin, types: Mapping[str, str]) -> list[tuple[Format, int]]:
    """Return in which formats a tensor is stored, as `Holding.of` takes them.

    Args:
        types: of the stored tensors.
    """
    return [
        (piece.format or Dense(DTYPES[types[name]]), piece.last - piece.first)
        for piece in origin.pieces
        for name in [*piece.stored][:1]
    ]


def open_files(checkpoint: Checkpoint, folder: Path) -> TensorFiles:
    """Read the headers of all weight files."""
    return TensorFiles(folder, checkpoint.architecture.prefix, checkpoint.dense_folders)

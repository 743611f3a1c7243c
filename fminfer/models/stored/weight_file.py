"""Reads what a weight file holds, of any kind."""

from __future__ import annotations

from pathlib import Path

from fminfer.core.impostors import broken, refuse_impostor
from fminfer.models.stored.safetensors_file import read_safetensors
from fminfer.models.stored.stored_tensors import StoredFile
from fminfer.models.stored.torch_file import read_torch_file


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

"""Reads the safetensors files of a checkpoint as one table of tensors."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fminfer.errors import CheckpointError
from fminfer.models.weight_files import indexed_homes, weight_files

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TensorFiles:
    """All tensors of a checkpoint by their stored names. Values are read on demand.

    If several files hold a tensor, the index says which one counts.

    Raises:
        CheckpointError: there are no files, one is broken or missing, or a tensor is there twice.
    """

    def __init__(self, folder: Path) -> None:
        files = weight_files(folder)
        if not files:
            raise CheckpointError(
                f"{folder} holds no .safetensors file; convert other weights with transformers' "
                "save_pretrained"
            )
        homes = indexed_homes(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}  # None: one that does not run here
        self._files: dict[str, tuple[Path, Any]] = {}
        self._sizes: Counter[str] = Counter()  # numbers of each stored dtype
        for path in files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is broken ({error}); fetch it again") from error
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                if homes.get(name, path.name) == path.name:
                    self._add(name, path, file)

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor, a view of its mapped file.

        Raises:
            CheckpointError: the file is broken.
        """
        path, file = self._files[name]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is broken ({error}); fetch it again") from error
        return tensor

    def main_dtype(self) -> torch.dtype | None:
        """Return the dtype of most weights; None: one that does not run here."""
        return DTYPES.get(max(self._sizes, key=self._sizes.__getitem__, default=""))

    def _add(self, name: str, path: Path, file: Any) -> None:
        if name in self._files:
            raise CheckpointError(
                f"{path.parent} holds the tensor {name!r} twice, in {self._files[name][0].name} "
                f"and {path.name}, and no model.safetensors.index.json says which one counts; take "
                "the file away that does not belong to the model, or fetch the index"
            )
        self._files[name] = path, file
        header = file.get_slice(name)
        self.shapes[name] = tuple(header.get_shape())
        self.dtypes[name] = DTYPES.get(header.get_dtype())
        self._sizes[header.get_dtype()] += math.prod(self.shapes[name])

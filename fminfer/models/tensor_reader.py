"""Reads a part's tensors: joins and lays out what is stored, in the type of the arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fminfer.compute.spec import Attention
from fminfer.models.origins import Origin, Origins
from fminfer.models.stored.read_ahead import Waiting
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.tensor_shapes import Tensors, is_precise, may_stay_stored

OnProgress = Callable[[int, int], None]


class TensorReader:
    """Reads from one checkpoint's files.

    Args:
        dtype: of the arithmetic.
        on_progress: called with (bytes read, bytes in all) after each tensor.
        keeps_bfloat16: what is stored so and multiplied or looked up stays so.
    """

    def __init__(
        self,
        files: TensorFiles,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        *,
        keeps_bfloat16: bool,
    ) -> None:
        self._files, self._dtype, self._device = files, dtype, device
        self._on_progress, self._keeps_bfloat16 = on_progress, keeps_bfloat16
        self.done = self.total = 0

    def read_all(self, origins: Origins, attention: Attention | None) -> Tensors:
        return {name: self.read(name, origin, attention) for name, origin in origins.items()}

    def read(self, name: str, origin: Origin, attention: Attention | None) -> torch.Tensor:
        dtype = self._dtype_of(name, origin)
        stored = tensor = self._join(origin, dtype)
        if origin.layout is not None:
            assert attention is not None, "only a layer's tensors are laid out otherwise"
            tensor = origin.layout.change(tensor, attention)
        tensor = tensor.to(self._device, dtype).contiguous()  # itself, where it is so
        if origin.is_one_piece and tensor.data_ptr() != stored.data_ptr():
            self._files.drop(origin.pieces[0].stored)
        self.done += tensor.nbytes
        self._on_progress(min(self.done, self.total), self.total)
        return tensor

    def waiting(self, origins: Origins) -> list[Waiting]:
        """Return the parts of files of which tensors are made, not read yet."""
        found: list[Waiting] = []
        for name, origin in origins.items():
            stays = self._stays(name, origin)
            for piece in origin.pieces:
                found += self._files.waiting(piece.stored, is_used_there=stays)
        return found

    def _stays(self, name: str, origin: Origin) -> bool:
        """Tell whether a tensor is the stored one, where it lies."""
        stored = origin.pieces[0].stored
        return (
            origin.is_one_piece
            and origin.layout is None
            and self._device.type == "cpu"
            and self._files.dtypes[stored] == self._dtype_of(name, origin)
            and self._files.is_in_place(stored)
        )

    def count_bytes(self, origins: Origins) -> int:
        """Return what tensors will take in memory."""
        return sum(
            torch.Size(origin.shape).numel() * self._dtype_of(name, origin).itemsize
            for name, origin in origins.items()
        )

    def _dtype_of(self, name: str, origin: Origin) -> torch.dtype:
        """Return the type of a tensor in memory."""
        if is_precise(name):
            return torch.float32
        stays = self._keeps_bfloat16 and may_stay_stored(name)
        if stays and all(self._files.dtypes[p.stored] == torch.bfloat16 for p in origin.pieces):
            return torch.bfloat16
        return self._dtype

    def _join(self, origin: Origin, dtype: torch.dtype) -> torch.Tensor:
        first = origin.pieces[0]
        if origin.is_one_piece and self._files.is_in_place(first.stored):
            return self._files.read(first.stored)
        shape = first.shape if origin.is_one_piece else origin.shape
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for piece in origin.pieces:
            target = whole if piece.item is None else whole[piece.item]
            rows = target if origin.is_one_piece else target[piece.first : piece.last]
            self._files.copy(piece.stored, rows)
        return whole

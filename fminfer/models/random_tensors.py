"""Draws random weights, which do not depend on how the model is split."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from fminfer.models.tensor_shapes import Shapes, Tensors, is_precise


@dataclass(slots=True, frozen=True)
class RandomTensors:
    """Draws tensors.

    Args:
        spread: the standard deviation of weights.
        of_norms: what the weights of norms are.
    """

    seed: int
    spread: float
    of_norms: float
    dtype: torch.dtype
    device: torch.device

    def draw(self, shapes: Shapes, where: str) -> Tensors:
        """Draw tensors of these shapes. Each has a seed of its own, by its name and `where`."""
        return {name: self._one(name, shape, where) for name, shape in shapes.items()}

    def _one(self, name: str, shape: tuple[int, ...], where: str) -> torch.Tensor:
        """Draw one tensor. Norms multiply by 1, biases are 0, the rest is normal."""
        dtype, device = torch.float32 if is_precise(name) else self.dtype, self.device
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=dtype, device=device)
        if "norm" in name or name.startswith(("before_", "after_", "sum_")):
            return torch.full(shape, self.of_norms, dtype=dtype, device=device)
        key = f"{self.seed} {where}{name}"
        generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(0, self.spread, generator=generator)

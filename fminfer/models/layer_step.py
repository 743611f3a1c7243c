"""What all layers of a step share: positions, attention, and the tokens that are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fminfer.compute.attention.kv_cache import StepAttention
from fminfer.compute.layers.bodies import RotateBody


@dataclass(slots=True)
class LayerStep:
    """What all layers of a step share."""

    positions: torch.Tensor  # (tokens,) int64
    attend: StepAttention
    kept: torch.Tensor | None = None  # (wanted,) int64: tokens the last layer returns; None: all

    _turns: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kept is None else x[self.kept]

    def turns(self, rotate: RotateBody, table: torch.Tensor) -> torch.Tensor:
        """Return the cosines and sines of the step's tokens, looked up once for all layers."""
        if id(table) not in self._turns:
            self._turns[id(table)] = rotate.turns(table, self.positions)
        return self._turns[id(table)]

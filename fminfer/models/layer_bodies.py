"""Makes what computes the parts of a layer: norms, products, rotary positions, experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import NormBody
from fminfer.compute.layers.experts import Mix
from fminfer.compute.layers.plain import Function
from fminfer.compute.registry import Registry
from fminfer.compute.spec import Moe, Norm, Rope
from fminfer.compute.weights import dense
from fminfer.models.tensor_specs import Tensors


@dataclass(slots=True)
class Bodies:
    """Makes the bodies of layers.

    Args:
        registry: chooses them.
        num_positions: the longest sequence.
    """

    registry: Registry
    num_positions: int
    _tables: dict[Rope, torch.Tensor] = field(default_factory=dict)

    def norm(self, how: Norm | None, tensors: Tensors, name: str) -> NormBody | None:
        if how is None:
            return None
        return self.registry.parts.norm(
            how, tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
        )

    def norms(
        self, pair: tuple[Norm | None, Norm | None], tensors: Tensors, side: str
    ) -> tuple[NormBody | None, NormBody | None]:
        first, second = (
            self.norm(how, tensors, f"{side}_{part}")
            for how, part in zip(pair, ("attention", "mlp"), strict=True)
        )
        return first, second

    def product(self, tensors: Tensors, name: str) -> Function:
        weight = dense(tensors[f"{name}.weight"], "product")
        return self.registry.product(weight, tensors.get(f"{name}.bias"))

    def experts(self, how: Moe, tensors: Tensors) -> Mix | None:
        up, down = (dense(tensors[f"{name}.weight"], "product") for name in ("up", "down"))
        return self.registry.experts(how, up, down)

    def table(self, how: Rope, device: torch.device) -> torch.Tensor:
        """Return the cosines and sines of all positions, made once for each `Rope`."""
        if how not in self._tables:
            self._tables[how] = plain.rotary_table(how, self.num_positions, device)
        return self._tables[how]

"""Makes what computes the parts of a layer: norms, products, rotary positions, experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import NormBody
from fminfer.compute.registry import Registry
from fminfer.compute.spec import Norm, Rope
from fminfer.compute.weights import Function
from fminfer.models.tensor_specs import Weights, plain_of


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

    def norm(self, how: Norm | None, weights: Weights, name: str) -> NormBody | None:
        if how is None:
            return None
        pair = (plain_of(weights, f"{name}.{leaf}") for leaf in ("weight", "bias"))
        return self.registry.parts.norm(how, *pair)

    def norms(
        self, pair: tuple[Norm | None, Norm | None], weights: Weights, side: str
    ) -> tuple[NormBody | None, NormBody | None]:
        first, second = (
            self.norm(how, weights, f"{side}_{part}")
            for how, part in zip(pair, ("attention", "mlp"), strict=True)
        )
        return first, second

    def product(self, weights: Weights, name: str) -> Function:
        return self.registry.product(weights[f"{name}.weight"], plain_of(weights, f"{name}.bias"))

    def table(self, how: Rope, device: torch.device) -> torch.Tensor:
        """Return the cosines and sines of all positions, made once for each `Rope`."""
        if how not in self._tables:
            self._tables[how] = plain.rotary_table(how, self.num_positions, device)
        return self._tables[how]

"""Makes what computes the parts of a layer: norms, products, rotary positions, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import NormBody, Parts
from fminfer.compute.layers.experts import KernelExperts
from fminfer.compute.linear.products import Products
from fminfer.compute.spec import Norm, Rope
from fminfer.models.tensor_specs import Tensors

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Bodies:
    """Makes the bodies of layers.

    Args:
        num_positions: the longest sequence.
        experts: makes compiled mixtures of experts; None: their products are made one by one.
    """

    parts: Parts
    products: Products
    num_positions: int
    experts: KernelExperts | None = None
    _tables: dict[Rope, torch.Tensor] = field(default_factory=dict)

    def norm(self, how: Norm | None, tensors: Tensors, name: str) -> NormBody | None:
        if how is None:
            return None
        return self.parts.norm(how, tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias"))

    def norms(
        self, pair: tuple[Norm | None, Norm | None], tensors: Tensors, side: str
    ) -> tuple[NormBody | None, NormBody | None]:
        first, second = (
            self.norm(how, tensors, f"{side}_{part}")
            for how, part in zip(pair, ("attention", "mlp"), strict=True)
        )
        return first, second

    def product(self, tensors: Tensors, name: str) -> Function:
        return self.products.make(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def table(self, how: Rope, device: torch.device) -> torch.Tensor:
        """Return the cosines and sines of all positions, made once for each `Rope`."""
        if how not in self._tables:
            self._tables[how] = plain.rotary_table(how, self.num_positions, device)
        return self._tables[how]

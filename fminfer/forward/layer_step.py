"""What layers share: the maker of their bodies, and what they see of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fminfer.compute.attention.kv_cache import StepAttention
from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import WeightedNorm
from fminfer.compute.shards import ShardGroup
from fminfer.compute.values.spec import Norm, Rope
from fminfer.compute.values.weights import Function
from fminfer.forward.registry import Registry
from fminfer.models.tensor_specs import Weights, find_plain_tensor


@dataclass(slots=True)
class Bodies:
    """Makes what computes the parts of layers: norms, products, rotary positions."""

    registry: Registry
    num_positions: int  # of the longest sequence
    _tables: dict[Rope, torch.Tensor] = field(default_factory=dict)

    def norm(
        self, how: Norm | None, weights: Weights, name: str
    ) -> WeightedNorm | None:
        if how is None:
            return None
        pair = (
            find_plain_tensor(weights, f"{name}.{leaf}") for leaf in ("weight", "bias")
        )
        return self.registry.parts.make_norm(how, *pair)

    def norms(
        self, pair: tuple[Norm | None, Norm | None], weights: Weights, side: str
    ) -> list[WeightedNorm | None]:
        sides = zip(pair, ("attention", "mlp"), strict=True)
        return [self.norm(how, weights, f"{side}_{of}") for how, of in sides]

    def product(self, weights: Weights, name: str) -> Function:
        return self.registry.product(
            weights[f"{name}.weight"], find_plain_tensor(weights, f"{name}.bias")
        )

    def table(self, how: Rope, device: torch.device) -> torch.Tensor:
        """Return the cosines and sines of all positions, made once for each `Rope`."""
        if how not in self._tables:
            self._tables[how] = plain.compute_rotary_table(
                how, self.num_positions, device
            )
        return self._tables[how]


@dataclass(slots=True)
class LayerStep:
    """What all layers of a step share."""

    positions: torch.Tensor  # (tokens,) int64
    attend: StepAttention
    # (wanted,) int64: tokens the last layer returns; None: all
    kept: torch.Tensor | None = None
    # the ranks that share each layer; None: this one has it whole
    shards: ShardGroup | None = None
    # Attention to what the encoder gave, which is stored under the keys that `memory` becomes:
    # (tokens of prompts that enter, hidden). Each query sees all keys of its prompt.
    cross: StepAttention | None = None
    memory: torch.Tensor | None = None

    _turns: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kept is None else x[self.kept]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of what all shards of a layer give; x may be overwritten."""
        return x if self.shards is None else self.shards.sum(x)

    def turns(self, table: torch.Tensor) -> torch.Tensor:
        """Return the cosines and sines of the step's tokens, looked up once for all layers."""
        if id(table) not in self._turns:
            self._turns[id(table)] = table[:, self.positions]
        return self._turns[id(table)]

"""What layers share: the builder of their parts, and what they see of a step."""

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
class PartBuilder:
    """Makes what computes the parts of layers: norms, products, rotary positions."""

    registry: Registry
    num_positions: int  # of the longest sequence
    _tables: dict[Rope, torch.Tensor] = field(default_factory=dict)

    def make_norm(
        self, spec: Norm | None, weights: Weights, name: str
    ) -> WeightedNorm | None:
        if spec is None:
            return None
        pair = (
            find_plain_tensor(weights, f"{name}.{leaf}") for leaf in ("weight", "bias")
        )
        return self.registry.parts.make_norm(spec, *pair)

    def make_norms(
        self, pair: tuple[Norm | None, Norm | None], weights: Weights, side: str
    ) -> list[WeightedNorm | None]:
        sides = zip(pair, ("attention", "mlp"), strict=True)
        return [self.make_norm(spec, weights, f"{side}_{of}") for spec, of in sides]

    def make_product(self, weights: Weights, name: str) -> Function:
        return self.registry.choose_product(
            weights[f"{name}.weight"], find_plain_tensor(weights, f"{name}.bias")
        )

    def find_rotary_table(self, spec: Rope, device: torch.device) -> torch.Tensor:
        """Return the cosines and sines of all positions, made once for each `Rope`."""
        if spec not in self._tables:
            self._tables[spec] = plain.compute_rotary_table(
                spec, self.num_positions, device
            )
        return self._tables[spec]


@dataclass(slots=True)
class LayerStep:
    """What all layers of a step share."""

    positions: torch.Tensor  # (tokens,) int64
    attend: StepAttention
    # (wanted,) int64: tokens the last layer returns; None: all
    kept: torch.Tensor | None = None
    # the ranks that share each layer; None: this one has it whole
    shards: ShardGroup | None = None
    # Attention to the encoder output, which is stored as the keys that it becomes:
    # (tokens of prompts that enter, hidden). Each query sees all keys of its prompt.
    cross: StepAttention | None = None
    encoder_output: torch.Tensor | None = None

    _turns: dict[int, torch.Tensor] = field(default_factory=dict)

    def select_kept(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kept is None else x[self.kept]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of what all shards of a layer compute; x may be overwritten."""
        return x if self.shards is None else self.shards.sum(x)

    def find_rotations(self, table: torch.Tensor) -> torch.Tensor:
        """Return the cosines and sines of the step's tokens, looked up once for all layers."""
        if id(table) not in self._turns:
            self._turns[id(table)] = table[:, self.positions]
        return self._turns[id(table)]

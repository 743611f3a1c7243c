"""The MLP of a layer: a plain one, or a mixture of experts."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from fminfer.compute.layers import plain
from fminfer.compute.layers.experts import Mix, PlainExperts
from fminfer.compute.layers.routing import route
from fminfer.compute.spec import Mlp, Moe
from fminfer.models.layer_bodies import Bodies, Function
from fminfer.models.tensor_shapes import Tensors


class MlpOf:
    """The MLP of a layer or of an expert: two products with an activation between them."""

    def __init__(self, how: Mlp, tensors: Tensors, bodies: Bodies) -> None:
        self.products = {name: bodies.product(tensors, name) for name in ("up", "down")}
        parts = bodies.parts
        if how.activation == "xielu":
            self._act: Function = partial(plain.xielu, **_under("xielu.", tensors))
        elif how.limit is not None:
            self._act = partial(plain.limited_gate, activation=how.activation, limit=how.limit)
        else:
            self._act = (parts.gate if how.is_gated else parts.activation)(how.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.products["down"](self._act(self.products["up"](x)))


class MoeOf:
    """A mixture of experts: chooses those of each token, and how much each counts."""

    def __init__(self, how: Moe, tensors: Tensors, bodies: Bodies) -> None:
        self._how = how
        # Not packed: with few outputs it is no faster, and its rounding could choose other experts.
        self._router = tensors["router.weight"]  # float32, until it is rounded as hidden states are
        self._router_bias = tensors["router.bias"] if how.has_router_bias else None
        self._bias = tensors["choice.bias"] if how.has_choice_bias else None
        self._shared = (
            None if how.shared is None else MlpOf(how.shared, _under("shared.", tensors), bodies)
        )
        self._shared_gate = tensors["shared_gate.weight"] if how.has_shared_gate else None
        own, mix = _under("experts.", tensors), None
        if bodies.experts is not None:
            mix = bodies.experts.make(how, own["up.weight"], own["down.weight"])
        self.mix: Mix = mix or PlainExperts(
            how,
            [
                MlpOf(how.expert, {name: each[number] for name, each in own.items()}, bodies)
                for number in range(how.num_experts)
            ],
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self._choose(x)
        return self._with_shared(x, self.mix(x, chosen, shares))

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shares and numbers of each token's experts, (tokens, top_k)."""
        if self._how.scores == "sigmoid" or self._how.is_precise:
            x = x.float()  # scores that are near to each other stay apart
        self._router = self._router.to(x.dtype)  # once
        logits = nn.functional.linear(x, self._router, self._router_bias).float()
        return route(self._how, logits, self._bias)

    def _with_shared(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add what the shared expert gives, if there is one."""
        if self._shared is None:
            return out
        more = self._shared(x)
        if self._shared_gate is not None:
            more = more * nn.functional.linear(x, self._shared_gate).sigmoid()
        return out + more


def _under(top: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(top): each for name, each in tensors.items() if name.startswith(top)}

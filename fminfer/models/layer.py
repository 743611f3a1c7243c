"""One layer of a model: attention and MLP, with the norms and sums around them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import NormBody
from fminfer.compute.layers.experts import Mix, PlainExperts
from fminfer.compute.layers.routing import route
from fminfer.compute.spec import Layer, Mlp, Moe
from fminfer.models.layer_attention import AttentionOf, LatentAttentionOf
from fminfer.models.layer_bodies import Bodies, Function
from fminfer.models.layer_step import LayerStep
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


class LayerOf:
    """A layer with its tensors."""

    def __init__(self, how: Layer, tensors: Tensors, bodies: Bodies) -> None:
        self.how = how
        self.attention: AttentionOf | LatentAttentionOf
        if how.attention.latent is not None:
            self.attention = LatentAttentionOf(how.attention, tensors, bodies)
        else:
            self.attention = AttentionOf(how.attention, tensors, bodies)
        self.mlp: Function
        if isinstance(how.mlp, Moe):
            self.mlp = MoeOf(how.mlp, tensors, bodies)
        else:
            self.mlp = MlpOf(how.mlp, tensors, bodies)
        self.products = self.attention.products  # and those of a plain MLP
        if isinstance(self.mlp, MlpOf):
            self.products = self.products | self.mlp.products
        self._before = bodies.norms(how.before, tensors, "before")
        self._after = bodies.norms(how.after, tensors, "after")
        self._of_sum = bodies.norms(how.of_sum, tensors, "sum")

    def __call__(
        self, x: torch.Tensor, more: torch.Tensor | None, number: int, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states after the layer as two terms; the second may be None.

        The next norm adds them. The hidden states before the layer are x + more.
        """
        how = self.how
        x, normed = normed_sum(self._before[0], x, more)
        attended = self.attention(normed, number, step)
        x, normed = step.keep(x), step.keep(normed)
        if self._after[0]:
            attended = self._after[0](attended)
        attended = self._scaled(attended)
        if how.is_parallel:
            if self._before[1]:
                normed = self._before[1](x)
            return x, attended + self._scaled(self.mlp(normed))
        x, more = _added(self._of_sum[0], normed if how.adds_normed else x, attended)
        x, normed = normed_sum(self._before[1], x, more)
        out = self.mlp(normed)
        if self._after[1]:
            out = self._after[1](out)
        return _added(self._of_sum[1], normed if how.adds_normed else x, self._scaled(out))

    def _scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.how.residual_scale == 1.0 else out * self.how.residual_scale


def normed_sum(
    norm: NormBody | None, x: torch.Tensor, more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + more, and its norm."""
    if norm is not None:
        return norm.of_sum(x, more)
    if more is not None:
        x = x + more
    return x, x


def _added(
    norm: NormBody | None, x: torch.Tensor, more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (x, more) if norm is None else (norm.of_sum(x, more)[1], None)

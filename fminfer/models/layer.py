"""One layer of a model: attention and MLP, with the norms and sums around them."""

from __future__ import annotations

import torch

from fminfer.compute.layers.bodies import NormBody
from fminfer.compute.spec import Layer, Moe
from fminfer.models.layer_attention import AttentionOf, LatentAttentionOf
from fminfer.models.layer_bodies import Bodies, Function
from fminfer.models.layer_mlp import MlpOf, MoeOf
from fminfer.models.layer_step import LayerStep
from fminfer.models.tensor_shapes import Tensors


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

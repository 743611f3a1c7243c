"""One transformer for every spec, over the packed tokens of a step's rows.

Nothing here knows an architecture by name, a row of a step or a request. Products, norms,
activations and attention are bodies that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fminfer.compute import plain
from fminfer.models.load import PartTensors, Tensors
from fminfer.models.spec import Attention, Layer, Mlp, Model, Moe, Norm, Rope

Function = Callable[[torch.Tensor], torch.Tensor]


class Attend(Protocol):
    """The paged cache of all layers, and the product over it."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # (tokens, heads, head_dim)
        key: torch.Tensor,  # (tokens, KV heads, head_dim)
        value: torch.Tensor,
    ) -> torch.Tensor:  # (tokens that are kept, heads, head_dim)
        """Store a step's new keys and values in a layer's cache, then attend."""


@dataclass(slots=True)
class Step:
    """What the layers are told of a step."""

    positions: torch.Tensor  # (tokens,) int64
    attend: Attend
    kept: torch.Tensor | None = None  # (wanted,) int64: the last layer's outputs; None: all

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kept is None else x[self.kept]


class RotaryTables:
    """Cosines and sines by position, made once for each way to turn."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._num_positions, self._device = num_positions, device
        self._tables: dict[Rope, torch.Tensor] = {}

    def of(self, how: Rope) -> torch.Tensor:
        if how not in self._tables:
            self._tables[how] = plain.rotary_table(how, self._num_positions, self._device)
        return self._tables[how]


class NormOf:
    """A norm with its weights; a sum before it joins it."""

    def __init__(self, how: Norm, tensors: Tensors, name: str) -> None:
        self._how = how
        self._weight, self._bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return plain.norm(x, self._how, self._weight, self._bias)

    def of_sum(
        self, x: torch.Tensor, more: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + more, and that normed."""
        if more is not None:
            x = x + more
        return x, self(x)


def norm_of(how: Norm | None, tensors: Tensors, name: str) -> NormOf | None:
    return None if how is None else NormOf(how, tensors, name)


def product_of(tensors: Tensors, name: str) -> Function:
    """Return x·Wᵀ + b."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    return lambda x: nn.functional.linear(x, weight, bias)


class AttentionOf:
    """A layer's attention, from normed hidden states to what is added to them."""

    def __init__(self, how: Attention, tensors: Tensors, tables: RotaryTables) -> None:
        self._how = how
        self._qkv, self._out = product_of(tensors, "qkv"), product_of(tensors, "out")
        self._q_norm = norm_of(how.qk_norm, tensors, "q_norm")
        self._k_norm = norm_of(how.qk_norm, tensors, "k_norm")
        self._table = tables.of(how.rope) if how.rope else None
        self._slopes: torch.Tensor | None = None
        if how.alibi is not None:
            device = tensors["qkv.weight"].device
            self._slopes = torch.tensor(how.alibi.slopes, device=device)

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        how = self._how
        q, k, v = self._qkv(x).split(how.qkv_sizes, -1)
        if how.clip:
            q, k, v = (part.clamp(-how.clip, how.clip) for part in (q, k, v))
        if self._q_norm and self._k_norm and how.qk_norm_over == "all":
            q, k = self._q_norm(q), self._k_norm(k)
        q, k, v = (part.view(len(x), -1, how.head_dim) for part in (q, k, v))
        if self._q_norm and self._k_norm and how.qk_norm_over != "all":
            q, k = self._q_norm(q), self._k_norm(k)
        if how.rope and self._table is not None:
            turn = self._table[:, step.positions]
            q, k = plain.rotate(q, how.rope, turn), plain.rotate(k, how.rope, turn)
        if how.keeps_bias:
            q, k, v = self._with_bias(q, k, v, step.positions)
        out = step.attend(layer, q, k, v)[..., : how.head_dim]
        return self._out(out.flatten(1))

    def _with_bias(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep Falcon's ALiBi as one more element of the key, which the query meets with a 1.

        It adds slope · position of the key to query · key before both are scaled, rounded to
        bfloat16: by up to 4 where positions pass 1000, so that the rounding is part of the model.
        """
        assert self._slopes is not None, "slopes"
        bias = (self._slopes.bfloat16() * positions[:, None]).to(k.dtype)
        group = self._how.heads // k.shape[1]
        k = torch.cat([k.repeat_interleave(group, 1), bias[..., None]], -1)
        v = nn.functional.pad(v.repeat_interleave(group, 1), (0, 1))
        return nn.functional.pad(q, (0, 1), value=1.0), k, v


class MlpOf:
    """Two products with an activation between them."""

    def __init__(self, how: Mlp, tensors: Tensors) -> None:
        self._how = how
        self._up, self._down = product_of(tensors, "up"), product_of(tensors, "down")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._up(x)
        if self._how.is_gated:
            return self._down(plain.gate(x, self._how.activation))
        return self._down(plain.ACTIVATIONS[self._how.activation](x))


class MoeOf:
    """A mixture of experts, the tokens of each side by side."""

    def __init__(self, how: Moe, tensors: Tensors) -> None:
        self._how, self._router = how, product_of(tensors, "router")
        up, down = tensors["experts.up.weight"], tensors["experts.down.weight"]
        self._experts = [
            MlpOf(how.expert, {"up.weight": up[number], "down.weight": down[number]})
            for number in range(how.num_experts)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        how = self._how
        scores = self._router(x).float().softmax(-1)
        weights, chosen = scores.topk(how.top_k)
        if how.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=how.num_experts).tolist()
        parts = torch.split(x[order // how.top_k], counts)
        outs = [e(part) for e, part in zip(self._experts, parts, strict=True) if len(part)]
        joined = torch.cat(outs)
        out = torch.empty_like(joined)
        out[order] = joined
        weighted = out.view(len(x), how.top_k, -1) * weights[..., None]
        return weighted.sum(1).to(x.dtype)


class LayerOf:
    """A layer with its tensors."""

    def __init__(self, how: Layer, tensors: Tensors, tables: RotaryTables) -> None:
        self._how = how
        self._attention = AttentionOf(how.attention, tensors, tables)
        self._mlp = (MoeOf if isinstance(how.mlp, Moe) else MlpOf)(how.mlp, tensors)  # type: ignore[arg-type]
        self._before = _pair(how.before, tensors, "before")
        self._after = _pair(how.after, tensors, "after")
        self._of_sum = _pair(how.of_sum, tensors, "sum")

    def __call__(
        self, x: torch.Tensor, more: torch.Tensor | None, number: int, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states behind the layer as two terms, of which the last may be absent.

        Their sum is left to the next norm. Before the layer they are x + more.
        """
        how = self._how
        x, normed = _normed(self._before[0], x, more)
        attended = self._attention(normed, number, step)
        x, normed = step.keep(x), step.keep(normed)
        if self._after[0]:
            attended = self._after[0](attended)
        if how.is_parallel:
            if self._before[1]:
                normed = self._before[1](x)
            return x, attended + self._mlp(normed)
        x, more = _added(self._of_sum[0], normed if how.adds_normed else x, attended)
        x, normed = _normed(self._before[1], x, more)
        out = self._mlp(normed)
        if self._after[1]:
            out = self._after[1](out)
        return _added(self._of_sum[1], normed if how.adds_normed else x, out)


def _pair(
    pair: tuple[Norm | None, Norm | None], tensors: Tensors, side: str
) -> tuple[NormOf | None, NormOf | None]:
    first, second = pair
    return norm_of(first, tensors, f"{side}_attention"), norm_of(second, tensors, f"{side}_mlp")


def _normed(
    norm: NormOf | None, x: torch.Tensor, more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm is not None:
        return norm.of_sum(x, more)
    if more is not None:
        x = x + more
    return x, x


def _added(
    norm: NormOf | None, x: torch.Tensor, more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (x, more) if norm is None else (norm.of_sum(x, more)[1], None)


class Transformer:
    """A model, or the layers of one stage.

    Args:
        first: the number of the first of its layers in the model.
        num_positions: most tokens of a sequence.
    """

    def __init__(
        self,
        model: Model,
        tensors: PartTensors,
        *,
        first: int,
        num_positions: int,
        device: torch.device,
    ) -> None:
        self._model, self._entry, self._exit = model, tensors.entry, tensors.exit
        tables = RotaryTables(num_positions, device)
        own = model.layers[first : first + len(tensors.layers)]
        self.layers = [
            LayerOf(how, each, tables) for how, each in zip(own, tensors.layers, strict=True)
        ]
        self._embed_norm = norm_of(model.embed_norm, self._entry, "embed_norm")
        final_norm = model.final_norm if self._exit else None  # of the last stage
        self._final_norm = norm_of(final_norm, self._exit, "final_norm")

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states before the first layer, (tokens, hidden), of (tokens,) ids."""
        model, entry = self._model, self._entry
        x = nn.functional.embedding(ids, entry["embed.weight"])
        if model.embed_scale != 1.0:  # rounded to the dtype, as Gemma was trained
            x = x * torch.tensor(model.embed_scale, dtype=x.dtype)
        if "project_in.weight" in entry:
            x = nn.functional.linear(x, entry["project_in.weight"])
        if model.num_positions:
            x = x + entry["positions.weight"][positions + model.position_offset]
        return x if self._embed_norm is None else self._embed_norm(x)

    def run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Run the layers; on the last stage also what stands between them and the head.

        Args:
            x: (tokens, hidden) before the first of them.
        """
        more: torch.Tensor | None = None
        kept, step.kept = step.kept, None
        for number, layer in enumerate(self.layers):
            if number == len(self.layers) - 1:
                step.kept = kept
            x, more = layer(x, more, number, step)
        _, x = _normed(self._final_norm, x, more)
        if "project_out.weight" in self._exit:
            x = nn.functional.linear(x, self._exit["project_out.weight"])
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, vocab) float32 of what the last stage's `run` gave."""
        weight, bias = self._exit["head.weight"], self._exit.get("head.bias")
        logits = nn.functional.linear(x, weight, bias).float()
        cap = self._model.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

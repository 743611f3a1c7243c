"""One layer of a model: attention and MLP, with the norms and sums around them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from fminfer.compute.attention.scoring import make_scoring
from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import WeightedNorm
from fminfer.compute.layers.experts import Mix, PlainExperts
from fminfer.compute.layers.products import Linear
from fminfer.compute.values.spec import Attention, Cross, Layer, Mlp, Moe
from fminfer.compute.values.weights import Function
from fminfer.forward.layer_step import Bodies, LayerStep
from fminfer.models.tensor_specs import Weights, find_plain_tensor

WIDEST = torch.finfo(torch.float16).max - 1000.0  # as in transformers


def route(
    how: Moe, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, float32, and numbers of each token's experts, (tokens, top_k).

    Logits of the router are (tokens, experts) float32. The bias counts for the choice alone.
    """
    if how.scores == "sparsemixer":
        return _mix_sparsely(how, logits)
    scores = logits.sigmoid() if how.scores == "sigmoid" else logits.softmax(-1)
    rated = scores if bias is None else scores + bias
    if how.groups > 1:  # those outside the best groups are not chosen
        grouped = rated.view(len(rated), how.groups, -1)
        best = grouped.topk(how.rated_by).values.sum(-1).topk(how.top_groups).indices
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=rated.device)
        is_out.scatter_(1, best, False)
        rated = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    chosen = rated.topk(how.top_k).indices
    weights = scores.gather(1, chosen)
    if how.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * how.scale, chosen


def _mix_sparsely(how: Moe, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as SparseMixer does (Liu et al. 2023): one expert, then one of the others,
    and so on.

    The weight of each is its part in a softmax over those whose scores are near to its own.
    """
    weights = []
    chosen = []
    left = logits
    for _ in range(how.top_k):
        best, number = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * how.mixer_eps
        near = left.masked_fill(is_far, float("-inf")).softmax(-1)
        weights.append(near.gather(1, number))
        chosen.append(number)
        left = left.scatter(1, number, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


class AttentionOf:
    """The attention of a layer with its products, norms of queries and keys, and positions."""

    def __init__(self, how: Attention, weights: Weights, bodies: Bodies) -> None:
        self._how = how
        self.products = {name: bodies.product(weights, name) for name in ("qkv", "out")}
        self._q_norm = bodies.norm(how.qk_norm, weights, "q_norm")
        self._k_norm = bodies.norm(how.qk_norm, weights, "k_norm")
        self._norm_weights = [
            find_plain_tensor(weights, f"{n}_norm.weight") for n in "qk"
        ]
        device = weights["qkv.weight"].device
        self._rotate = None
        self._table = torch.empty(0, device=device)
        if how.rope is not None:
            self._rotate = bodies.registry.parts.make_rotate(how.rope)
            self._table = bodies.table(how.rope, device)
        slopes = () if how.alibi is None else how.alibi.slopes
        self._slopes = torch.tensor(slopes, device=device).bfloat16()
        sinks = weights["sinks.weight"].plain.float() if how.has_sinks else None
        self.scoring = make_scoring(
            how, device, sinks, find_plain_tensor(weights, "relative.weight")
        )

    def __call__(self, x: torch.Tensor, layer: int, step: LayerStep) -> torch.Tensor:
        how = self._how
        qkv = self.products["qkv"](x)
        if how.clip:
            qkv = qkv.clamp(-how.clip, how.clip)
        q, k = self._turned(qkv, step)
        v = qkv[:, -how.qkv_sizes[2] :].view(len(x), how.kv_heads, how.head_dim)
        if how.has_cached_bias:
            q, k, v = self._with_bias(q, k, v, step.positions)
        out = step.attend(layer, q, k, v, self.scoring)[..., : how.head_dim]
        return self.products["out"](out.flatten(1))

    def _turned(
        self, qkv: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys after their norms and positions, (tokens, heads, head_dim)."""
        how = self._how
        both = qkv[:, : -how.qkv_sizes[2]]
        if self._q_norm is None or self._k_norm is None:  # in one pass
            both = self._rotated(both.view(len(qkv), -1, how.head_dim), step)
            return both[:, : how.heads], both[:, how.heads :]
        q = both[:, : how.qkv_sizes[0]]
        k = both[:, how.qkv_sizes[0] :]
        is_over_all = how.qk_norm_over == "all"
        if is_over_all and step.shards is not None:
            q, k = self._norm_over_ranks(q, k, step)
        elif is_over_all:
            q = self._q_norm(q)
            k = self._k_norm(k)
        q, k = (part.view(len(qkv), -1, how.head_dim) for part in (q, k))
        if how.qk_norm_is_last:
            return self._q_norm(self._rotated(q, step)), self._k_norm(
                self._rotated(k, step)
            )
        if not is_over_all:
            q = self._q_norm(q)
            k = self._k_norm(k)
        return self._rotated(q, step), self._rotated(k, step)

    def _norm_over_ranks(
        self, q: torch.Tensor, k: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm queries, and keys, over the heads of all ranks by one sum of their squares."""
        how = self._how
        norm = self._how.qk_norm
        of_all = self._how.stage_heads
        assert norm is not None and norm.is_rms and of_all is not None, (
            "a cut norm over all heads"
        )
        squares = torch.stack([each.float().square().sum(-1) for each in (q, k)])
        squares[1] /= of_all.kv_copies
        found = []
        totals = step.sum(squares)
        counts = (of_all.heads, of_all.kv_heads)
        for x, total, num, weight in zip(
            (q, k), totals, counts, self._norm_weights, strict=True
        ):
            means = total[:, None] / (num * how.head_dim)
            y = x.float() * torch.rsqrt(means + norm.eps)
            y = y if weight is None else y * (weight.float() + norm.offset)
            found.append(y.to(x.dtype))
        return found[0], found[1]

    def _rotated(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        turns = self.turns(step)
        return x if self._rotate is None or turns is None else self._rotate(x, turns)

    def turns(self, step: LayerStep) -> torch.Tensor | None:
        """Return the cosines and sines of the step's tokens; None: no rotary positions."""
        return None if self._rotate is None else step.turns(self._table)

    def _with_bias(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append Falcon's ALiBi bias to the key, and a 1 to the query.

        Query · key then includes slope · position of the key, before it is scaled. The bias is
        rounded to bfloat16, by up to 4 beyond position 1000: the rounding is part of the model.
        """
        bias = (self._slopes * positions[:, None]).to(k.dtype)
        group = self._how.heads // k.shape[1]
        k = torch.cat([k.repeat_interleave(group, 1), bias[..., None]], -1)
        v = nn.functional.pad(v.repeat_interleave(group, 1), (0, 1))
        return nn.functional.pad(q, (0, 1), value=1.0), k, v


class CrossAttentionOf:
    """The attention of a decoder's layer to what the encoder gave."""

    def __init__(self, how: Cross, weights: Weights, bodies: Bodies) -> None:
        self._how = how.attention
        names = ("cross_q", "cross_kv", "cross_out")
        self.products = {name: bodies.product(weights, name) for name in names}
        self._scoring = make_scoring(how.attention, weights["cross_q.weight"].device)

    def __call__(self, x: torch.Tensor, layer: int, step: LayerStep) -> torch.Tensor:
        how = self._how
        memory = step.memory
        assert step.cross is not None, "a decoder's step"
        q = self.products["cross_q"](x).view(len(x), how.heads, how.head_dim)
        new = q.new_empty((0, 2, how.kv_heads, how.head_dim))
        if memory is not None:
            new = self.products["cross_kv"](memory).view(len(memory), *new.shape[1:])
        out = step.cross(layer, q, new[:, 0], new[:, 1], self._scoring)
        return self.products["cross_out"](out.flatten(1))


class LatentAttentionOf:
    """Latent attention, with what makes keys and values of the latent moved to queries
    and out."""

    def __init__(self, how: Attention, weights: Weights, bodies: Bodies) -> None:
        assert how.latent is not None and how.rope is not None, "latent attention"
        self._how = how
        self._latent = how.latent
        names = ("q",) if how.latent.query_rank is None else ("q_down", "q_up")
        self.products = {
            n: bodies.product(weights, n) for n in (*names, "kv_down", "out")
        }
        norm = None if how.latent.query_rank is None else how.latent.norm
        self._q_norm = bodies.norm(norm, weights, "q_norm")
        self._kv_norm = bodies.norm(how.latent.norm, weights, "kv_norm")
        weight = weights["kv_up.weight"].plain
        by_head = weight.view(how.heads, -1, how.latent.rank)
        of_values = by_head[:, how.latent.key_dim :]
        # (heads, key_dim, rank) and (heads, rank, value_dim)
        self._to_latent = by_head[:, : how.latent.key_dim].contiguous()
        self._from_latent = of_values.transpose(1, 2).contiguous()
        self._rotate = bodies.registry.parts.make_rotate(how.rope)
        self._table = bodies.table(how.rope, weight.device)
        self.scoring = make_scoring(how, weight.device)

    def __call__(self, x: torch.Tensor, layer: int, step: LayerStep) -> torch.Tensor:
        latent = self._latent
        turns = self.turns(step)
        if self._q_norm is None:
            q = self.products["q"](x)
        else:
            q = self.products["q_up"](self._q_norm(self.products["q_down"](x)))
        q = q.view(len(x), self._how.heads, -1)
        q_turned = self._rotate(q[..., latent.key_dim :].contiguous(), turns)
        asked = _by_heads(q[..., : latent.key_dim], self._to_latent)
        kv = self.products["kv_down"](x)
        assert self._kv_norm is not None, "latent attention has a norm"
        kept = self._kv_norm(kv[:, : latent.rank].contiguous())[:, None]
        k_turned = self._rotate(kv[:, None, latent.rank :].contiguous(), turns)
        key = torch.cat([kept, k_turned], -1)
        out = step.attend(
            layer, torch.cat([asked, q_turned], -1), key, key, self.scoring
        )
        values = _by_heads(out[..., : latent.rank], self._from_latent)
        return self.products["out"](values.flatten(1))

    def turns(self, step: LayerStep) -> torch.Tensor:
        """Return the cosines and sines of the step's tokens."""
        return step.turns(self._table)


def _by_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply (tokens, heads, inputs) by a weight of each head, (heads, inputs, outputs)."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


class MlpOf:
    """The MLP of a layer or of an expert: two products with an activation between them."""

    def __init__(self, how: Mlp, weights: Weights, bodies: Bodies) -> None:
        self.products = {name: bodies.product(weights, name) for name in ("up", "down")}
        parts = bodies.registry.parts
        if how.activation == "xielu":
            own = {name: each.plain for name, each in _under("xielu.", weights).items()}
            self._act: Function = partial(plain.xielu, **own)
        elif how.limit is not None:
            self._act = partial(plain.gate, activation=how.activation, limit=how.limit)
        else:
            self._act = (parts.make_gate if how.is_gated else parts.make_activation)(
                how.activation
            )
        self._is_wide = how.is_wide

    def __call__(self, x: torch.Tensor, step: LayerStep | None = None) -> torch.Tensor:
        x = self._act(self.products["up"](x))
        if self._is_wide and x.dtype == torch.float16:
            return self.products["down"](x.float()).clamp(-WIDEST, WIDEST).half()
        return self.products["down"](x)


class MoeOf:
    """A mixture of experts: chooses those of each token, and how much each counts."""

    def __init__(self, how: Moe, weights: Weights, bodies: Bodies) -> None:
        self._how = how
        # Not packed: with few outputs it is no faster, and its rounding could choose
        # other experts. It is float32, until it is rounded as hidden states are.
        self._router = weights["router.weight"].plain
        self._router_bias = (
            weights["router.bias"].plain if how.has_router_bias else None
        )
        self._bias = weights["choice.bias"].plain if how.has_choice_bias else None
        self._shared = (
            MlpOf(how.shared, _under("shared.", weights), bodies)
            if how.shared
            else None
        )
        self._shared_gate = (
            weights["shared_gate.weight"].plain if how.has_shared_gate else None
        )
        own = _under("experts.", weights)
        mix = bodies.registry.experts(how, own["up.weight"], own["down.weight"])
        shared = [] if self._shared is None else [self._shared]
        experts = [
            MlpOf(
                how.expert, {name: each.expert(n) for name, each in own.items()}, bodies
            )
            for n in range(0 if mix else how.num_experts)
        ]
        self.mix: Mix = mix or PlainExperts(how, experts)
        self.products = [
            p for mlp in (*shared, *experts) for p in mlp.products.values()
        ]

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        shares, chosen = self._choose(x, step)
        out = self.mix(x, chosen, shares)
        if self._shared is None:
            return out
        more = self._shared(x)
        if self._shared_gate is not None:
            more = more * nn.functional.linear(x, self._shared_gate).sigmoid()
        return out + more

    def _choose(
        self, x: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shares and numbers of each token's experts, (tokens, top_k)."""
        if self._how.scores == "sigmoid" or self._how.is_precise:
            x = x.float()  # scores that are near to each other stay apart
        self._router = self._router.to(x.dtype)  # once
        logits = nn.functional.linear(x, self._router, self._router_bias).float()
        if step.shards is not None:  # all have to choose the same, whatever they round
            logits = step.shards.gather(logits)[0]
        return route(self._how, logits, self._bias)


def _under(top: str, weights: Weights) -> Weights:
    return {
        name.removeprefix(top): each
        for name, each in weights.items()
        if name.startswith(top)
    }


class LayerOf:
    """A layer with its weights."""

    def __init__(self, how: Layer, weights: Weights, bodies: Bodies) -> None:
        self.how = how
        attend = AttentionOf if how.attention.latent is None else LatentAttentionOf
        self.attention = attend(how.attention, weights, bodies)
        self.products = self.attention.products  # and those of a plain MLP
        self.mlp: MlpOf | MoeOf
        if isinstance(how.mlp, Moe):
            self.mlp = MoeOf(how.mlp, weights, bodies)
        else:
            self.mlp = MlpOf(how.mlp, weights, bodies)
            self.products = self.products | self.mlp.products
        self._before = bodies.norms(how.input_norms, weights, "before")
        self._after = bodies.norms(how.output_norms, weights, "after")
        self._of_sum = bodies.norms(how.sum_norms, weights, "sum")
        self._cross: CrossAttentionOf | None = None
        if how.cross is not None:
            self._cross = CrossAttentionOf(how.cross, weights, bodies)
            self.products = self.products | self._cross.products
            self._before_cross = bodies.norm(
                how.cross.input_norm, weights, "before_cross"
            )
            self._of_cross_sum = bodies.norm(how.cross.sum_norm, weights, "sum_cross")
        self._is_wide = isinstance(how.mlp, Mlp) and how.mlp.is_wide
        norms = {
            n: each
            for n, each in weights.items()
            if each.spec.use in ("norm", "norm_bias")
        }
        self.norm_weights = {
            name: each.plain.contiguous() for name, each in norms.items()
        }

    @property
    def is_packed(self) -> bool:
        """Whether all its products have packed forms in the place of their weights."""
        products = [*self.products.values()]
        if isinstance(self.mlp, MoeOf):
            products += self.mlp.products
        return not any(isinstance(product, Linear) for product in products)

    def __call__(
        self, x: torch.Tensor, more: torch.Tensor | None, number: int, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states after the layer as two terms; the second may be None.

        The next norm adds them. The hidden states before the layer are x + more.
        """
        how = self.how
        x, normed = normed_sum(self._before[0], x, more)
        attended = self.attention(normed, number, step)
        # with what the MLP gives
        is_summed_once = how.is_parallel and not self._after[0]
        if not is_summed_once:
            attended = step.sum(attended)
        x = step.keep(x)
        normed = step.keep(normed)
        if self._after[0]:
            attended = self._after[0](attended)
        attended = self._scaled(attended)
        if how.is_parallel:
            if self._before[1]:
                normed = self._before[1](x)
            out = self._scaled(self.mlp(normed, step))
            return x, step.sum(
                attended + out
            ) if is_summed_once else attended + step.sum(out)
        x, more = self._added(
            self._of_sum[0], normed if how.adds_normed else x, attended
        )
        if self._cross is not None:
            x, normed = normed_sum(self._before_cross, x, more)
            out = step.sum(self._cross(normed, number, step))
            x, more = self._added(self._of_cross_sum, x, out)
        x, normed = normed_sum(self._before[1], x, more)
        out = step.sum(self.mlp(normed, step))
        if self._after[1]:
            out = self._after[1](out)
        return self._added(
            self._of_sum[1], normed if how.adds_normed else x, self._scaled(out)
        )

    def _added(
        self, norm: WeightedNorm | None, x: torch.Tensor, more: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if norm is not None:
            return norm.norm_sum(x, more)[1], None
        if self._is_wide and x.dtype == torch.float16:  # what is too large stays finite
            return (x.float() + more.float()).clamp(-WIDEST, WIDEST).half(), None
        return x, more

    def _scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.how.residual_scale == 1.0 else out * self.how.residual_scale


def normed_sum(
    norm: WeightedNorm | None, x: torch.Tensor, more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + more, and its norm."""
    if norm is not None:
        return norm.norm_sum(x, more)
    if more is not None:
        x = x + more
    return x, x

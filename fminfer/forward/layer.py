"""One layer of a model: attention and MLP, with the norms and sums around them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from fminfer.compute.attention.scoring import make_scoring
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import WeightedNorm
from fminfer.compute.layers.experts import Mix, Mixture, PlainExperts
from fminfer.compute.layers.products import Linear
from fminfer.compute.values.spec import Attention, Cross, Layer, Mlp, Moe
from fminfer.compute.values.weights import Function
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.models.tensor_specs import Weights, find_plain_tensor

WIDEST = torch.finfo(torch.float16).max - 1000.0  # as in transformers


def choose_experts(
    spec: Moe, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, float32, and numbers of each token's experts, (tokens, top_k).

    Logits of the router are (tokens, experts) float32. The bias counts for the choice alone.
    """
    if spec.scores == "sparsemixer":
        return _choose_sparsely(spec, logits)
    scores = plain.sigmoid(logits) if spec.scores == "sigmoid" else logits.softmax(-1)
    rated = scores if bias is None else scores + bias
    if spec.groups > 1:  # those outside the best groups are not chosen
        grouped = rated.view(len(rated), spec.groups, -1)
        best = grouped.topk(spec.rated_by).values.sum(-1).topk(spec.top_groups).indices
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=rated.device)
        is_out.scatter_(1, best, False)
        rated = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    chosen = rated.topk(spec.top_k).indices
    weights = scores.gather(1, chosen)
    if spec.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * spec.scale, chosen


def _choose_sparsely(
    spec: Moe, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as SparseMixer does (Liu et al. 2023): the best, then the best of the rest.

    The weight of each is its part in a softmax over the scores that are near to its own.
    """
    weights = []
    chosen = []
    left = logits
    for _ in range(spec.top_k):
        best, number = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * spec.mixer_eps
        near = left.masked_fill(is_far, float("-inf")).softmax(-1)
        weights.append(near.gather(1, number))
        chosen.append(number)
        left = left.scatter(1, number, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


class SelfAttention:
    """The attention of a layer with its products, norms of queries and keys, and positions."""

    def __init__(self, spec: Attention, weights: Weights, builder: PartBuilder) -> None:
        self._spec = spec
        self.products = {
            name: builder.make_product(weights, name) for name in ("qkv", "out")
        }
        self._q_norm = builder.make_norm(spec.qk_norm, weights, "q_norm")
        self._k_norm = builder.make_norm(spec.qk_norm, weights, "k_norm")
        self._norm_weights = [
            find_plain_tensor(weights, f"{n}_norm.weight") for n in "qk"
        ]
        device = weights["qkv.weight"].device
        self._rotate = None
        self._table = torch.empty(0, device=device)
        if spec.rope is not None:
            self._rotate = builder.registry.parts.make_rotate(spec.rope)
            self._table = builder.find_rotary_table(spec.rope, device)
        slopes = () if spec.alibi is None else spec.alibi.slopes
        self._slopes = torch.tensor(slopes, device=device).bfloat16()
        sinks = weights["sinks.weight"].plain.float() if spec.has_sinks else None
        self.scoring = make_scoring(
            spec, device, sinks, find_plain_tensor(weights, "relative.weight")
        )

    def __call__(self, x: torch.Tensor, layer: int, step: LayerStep) -> torch.Tensor:
        spec = self._spec
        qkv = self.products["qkv"](x)
        if spec.clip:
            qkv = qkv.clamp(-spec.clip, spec.clip)
        q, k = self._norm_and_rotate(qkv, step)
        v = qkv[:, -spec.qkv_sizes[2] :].view(len(x), spec.kv_heads, spec.head_dim)
        if spec.has_cached_bias:
            q, k, v = self._append_bias(q, k, v, step.positions)
        out = step.attend(layer, q, k, v, self.scoring)[..., : spec.head_dim]
        return self.products["out"](out.flatten(1))

    def _norm_and_rotate(
        self, qkv: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys after their norms and positions, (tokens, heads, head_dim)."""
        spec = self._spec
        both = qkv[:, : -spec.qkv_sizes[2]]
        if self._q_norm is None or self._k_norm is None:  # in one pass
            both = self._rotate_heads(both.view(len(qkv), -1, spec.head_dim), step)
            return both[:, : spec.heads], both[:, spec.heads :]
        q = both[:, : spec.qkv_sizes[0]]
        k = both[:, spec.qkv_sizes[0] :]
        is_over_all = spec.qk_norm_over == "all"
        if is_over_all and step.shards is not None:
            q, k = self._norm_over_ranks(q, k, step)
        elif is_over_all:
            q = self._q_norm(q)
            k = self._k_norm(k)
        q, k = (part.view(len(qkv), -1, spec.head_dim) for part in (q, k))
        if spec.qk_norm_is_last:
            return self._q_norm(self._rotate_heads(q, step)), self._k_norm(
                self._rotate_heads(k, step)
            )
        if not is_over_all:
            q = self._q_norm(q)
            k = self._k_norm(k)
        return self._rotate_heads(q, step), self._rotate_heads(k, step)

    def _norm_over_ranks(
        self, q: torch.Tensor, k: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm queries, and keys, over the heads of all ranks by one sum of their squares."""
        spec = self._spec
        norm = self._spec.qk_norm
        of_all = self._spec.stage_heads
        assert norm is not None and norm.is_rms and of_all is not None, (
            "a cut norm over all heads"
        )
        squares = torch.stack([each.float().square().sum(-1) for each in (q, k)])
        squares[1] /= of_all.kv_copies
        normed = []
        totals = step.sum(squares)
        counts = (of_all.heads, of_all.kv_heads)
        for x, total, num, weight in zip(
            (q, k), totals, counts, self._norm_weights, strict=True
        ):
            means = total[:, None] / (num * spec.head_dim)
            y = x.float() * torch.rsqrt(means + norm.eps)
            y = y if weight is None else y * (weight.float() + norm.offset)
            normed.append(y.to(x.dtype))
        return normed[0], normed[1]

    def _rotate_heads(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        turns = self.find_rotations(step)
        return x if self._rotate is None or turns is None else self._rotate(x, turns)

    def find_rotations(self, step: LayerStep) -> torch.Tensor | None:
        """Return the cosines and sines of the step's tokens; None: no rotary positions."""
        return None if self._rotate is None else step.find_rotations(self._table)

    def _append_bias(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append Falcon's ALiBi bias to the key, and a 1 to the query.

        Query · key then includes slope · position of the key, before it is scaled. The bias is
        rounded to bfloat16, by up to 4 beyond position 1000: the rounding is part of the model.
        """
        bias = (self._slopes * positions[:, None]).to(k.dtype)
        group = self._spec.heads // k.shape[1]
        k = torch.cat([k.repeat_interleave(group, 1), bias[..., None]], -1)
        v = nn.functional.pad(v.repeat_interleave(group, 1), (0, 1))
        return nn.functional.pad(q, (0, 1), value=1.0), k, v


class CrossAttention:
    """The attention of a decoder's layer to the encoder output."""

    def __init__(self, spec: Cross, weights: Weights, builder: PartBuilder) -> None:
        self._spec = spec.attention
        names = ("cross_q", "cross_kv", "cross_out")
        self.products = {name: builder.make_product(weights, name) for name in names}
        self._scoring = make_scoring(spec.attention, weights["cross_q.weight"].device)

    def __call__(self, x: torch.Tensor, layer: int, step: LayerStep) -> torch.Tensor:
        spec = self._spec
        encoder_output = step.encoder_output
        assert step.cross is not None, "a decoder's step"
        q = self.products["cross_q"](x).view(len(x), spec.heads, spec.head_dim)
        new = q.new_empty((0, 2, spec.kv_heads, spec.head_dim))
        if encoder_output is not None:
            new = self.products["cross_kv"](encoder_output).view(
                len(encoder_output), *new.shape[1:]
            )
        out = step.cross(layer, q, new[:, 0], new[:, 1], self._scoring)
        return self.products["cross_out"](out.flatten(1))


class LatentAttention:
    """Latent attention, whose up-projections work on queries and outputs, not on keys."""

    def __init__(self, spec: Attention, weights: Weights, builder: PartBuilder) -> None:
        assert spec.latent is not None and spec.rope is not None, "latent attention"
        self._spec = spec
        self._latent = spec.latent
        names = ("q",) if spec.latent.query_rank is None else ("q_down", "q_up")
        self.products = {
            n: builder.make_product(weights, n) for n in (*names, "kv_down", "out")
        }
        norm = None if spec.latent.query_rank is None else spec.latent.norm
        self._q_norm = builder.make_norm(norm, weights, "q_norm")
        self._kv_norm = builder.make_norm(spec.latent.norm, weights, "kv_norm")
        weight = weights["kv_up.weight"].plain
        by_head = weight.view(spec.heads, -1, spec.latent.rank)
        of_values = by_head[:, spec.latent.key_dim :]
        # (heads, key_dim, rank) and (heads, rank, value_dim)
        self._to_latent = builder.registry.choose_items_product(
            by_head[:, : spec.latent.key_dim].contiguous()
        )
        self._from_latent = builder.registry.choose_items_product(
            of_values.transpose(1, 2).contiguous()
        )
        self._rotate = builder.registry.parts.make_rotate(spec.rope)
        self._table = builder.find_rotary_table(spec.rope, weight.device)
        self.scoring = make_scoring(spec, weight.device)

    def __call__(self, x: torch.Tensor, layer: int, step: LayerStep) -> torch.Tensor:
        latent = self._latent
        turns = self.find_rotations(step)
        if self._q_norm is None:
            q = self.products["q"](x)
        else:
            q = self.products["q_up"](self._q_norm(self.products["q_down"](x)))
        q = q.view(len(x), self._spec.heads, -1)
        q_turned = self._rotate(q[..., latent.key_dim :].contiguous(), turns)
        query = self._to_latent(q[..., : latent.key_dim])
        kv = self.products["kv_down"](x)
        assert self._kv_norm is not None, "latent attention has a norm"
        compressed = self._kv_norm(kv[:, : latent.rank].contiguous())[:, None]
        k_turned = self._rotate(kv[:, None, latent.rank :].contiguous(), turns)
        key = torch.cat([compressed, k_turned], -1)
        out = step.attend(
            layer, torch.cat([query, q_turned], -1), key, key, self.scoring
        )
        values = self._from_latent(out[..., : latent.rank])
        return self.products["out"](values.flatten(1))

    def find_rotations(self, step: LayerStep) -> torch.Tensor:
        """Return the cosines and sines of the step's tokens."""
        return step.find_rotations(self._table)


class FeedForward:
    """The MLP of a layer or of an expert: two products with an activation between them."""

    def __init__(self, spec: Mlp, weights: Weights, builder: PartBuilder) -> None:
        self.products = {
            name: builder.make_product(weights, name) for name in ("up", "down")
        }
        parts = builder.registry.parts
        if spec.activation == "xielu":
            parameters = {
                name: each.plain
                for name, each in _find_under("xielu.", weights).items()
            }
            self._act: Function = partial(plain.xielu, **parameters)
        elif spec.limit is not None:
            self._act = partial(
                plain.gate, activation=spec.activation, limit=spec.limit
            )
        else:
            self._act = (parts.make_gate if spec.is_gated else parts.make_activation)(
                spec.activation
            )
        self._is_wide = spec.is_wide

    def __call__(self, x: torch.Tensor, step: LayerStep | None = None) -> torch.Tensor:
        x = self._act(self.products["up"](x))
        if self._is_wide and x.dtype == torch.float16:
            return self.products["down"](x.float()).clamp(-WIDEST, WIDEST).half()
        return self.products["down"](x)


class ExpertLayer:
    """A mixture of experts: chooses those of each token, and how much each counts."""

    def __init__(self, spec: Moe, weights: Weights, builder: PartBuilder) -> None:
        self._spec = spec
        # In float32 scores that are near to each other stay apart.
        is_precise = spec.scores == "sigmoid" or spec.is_precise
        self._router_dtype = torch.float32 if is_precise else builder.registry.dtype
        router = weights["router.weight"].plain.to(self._router_dtype)
        self._router = builder.registry.choose_steady_product(
            make_dense_weight(router, "router"),
            weights["router.bias"].plain if spec.has_router_bias else None,
        )
        self._bias = weights["choice.bias"].plain if spec.has_choice_bias else None
        self._shared = (
            FeedForward(spec.shared, _find_under("shared.", weights), builder)
            if spec.shared
            else None
        )
        self._shared_gate: Function | None = None
        if spec.has_shared_gate:
            self._shared_gate = builder.registry.choose_steady_product(
                weights["shared_gate.weight"], None
            )
        expert_weights = _find_under("experts.", weights)
        mix = builder.registry.choose_experts_kernel(
            Mixture(
                spec=spec,
                up=expert_weights["up.weight"],
                down=expert_weights["down.weight"],
                up_bias=find_plain_tensor(expert_weights, "up.bias"),
                down_bias=find_plain_tensor(expert_weights, "down.bias"),
            )
        )
        shared = [] if self._shared is None else [self._shared]
        experts = [
            FeedForward(
                spec.expert,
                {name: each.expert(n) for name, each in expert_weights.items()},
                builder,
            )
            for n in range(0 if mix else spec.num_experts)
        ]
        self.mix: Mix = mix or PlainExperts(spec, experts)
        self.products = [
            p for mlp in (*shared, *experts) for p in mlp.products.values()
        ]

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        shares, chosen = self._route(x, step)
        out = self.mix(x, chosen, shares)
        if self._shared is None:
            return out
        more = self._shared(x)
        if self._shared_gate is not None:
            more = more * plain.sigmoid(self._shared_gate(x))
        return out + more

    def _route(
        self, x: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shares and numbers of each token's experts, (tokens, top_k)."""
        logits = self._router(x.to(self._router_dtype)).float()
        if step.shards is not None:  # all have to choose the same, whatever they round
            logits = step.shards.gather(logits)[0]
        return choose_experts(self._spec, logits, self._bias)


def _find_under(top: str, weights: Weights) -> Weights:
    return {
        name.removeprefix(top): each
        for name, each in weights.items()
        if name.startswith(top)
    }


class TransformerLayer:
    """A layer with its weights."""

    def __init__(self, spec: Layer, weights: Weights, builder: PartBuilder) -> None:
        self.spec = spec
        attend = SelfAttention if spec.attention.latent is None else LatentAttention
        self.attention = attend(spec.attention, weights, builder)
        self.products = self.attention.products  # and those of a plain MLP
        self.mlp: FeedForward | ExpertLayer
        if isinstance(spec.mlp, Moe):
            self.mlp = ExpertLayer(spec.mlp, weights, builder)
        else:
            self.mlp = FeedForward(spec.mlp, weights, builder)
            self.products = self.products | self.mlp.products
        self._before = builder.make_norms(spec.input_norms, weights, "before")
        self._after = builder.make_norms(spec.output_norms, weights, "after")
        self._of_sum = builder.make_norms(spec.sum_norms, weights, "sum")
        self._cross: CrossAttention | None = None
        if spec.cross is not None:
            self._cross = CrossAttention(spec.cross, weights, builder)
            self.products = self.products | self._cross.products
            self._before_cross = builder.make_norm(
                spec.cross.input_norm, weights, "before_cross"
            )
            self._of_cross_sum = builder.make_norm(
                spec.cross.sum_norm, weights, "sum_cross"
            )
        self._is_wide = isinstance(spec.mlp, Mlp) and spec.mlp.is_wide
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
        if isinstance(self.mlp, ExpertLayer):
            products += self.mlp.products
        return not any(isinstance(product, Linear) for product in products)

    def __call__(
        self, x: torch.Tensor, more: torch.Tensor | None, number: int, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states after the layer as two terms; the second may be None.

        The next norm adds them. The hidden states before the layer are x + more.
        """
        spec = self.spec
        x, normed = norm_sum(self._before[0], x, more)
        attended = self.attention(normed, number, step)
        # with what the MLP gives
        is_summed_once = spec.is_parallel and not self._after[0]
        if not is_summed_once:
            attended = step.sum(attended)
        x = step.select_kept(x)
        normed = step.select_kept(normed)
        if self._after[0]:
            attended = self._after[0](attended)
        attended = self._scale(attended)
        if spec.is_parallel:
            if self._before[1]:
                normed = self._before[1](x)
            out = self._scale(self.mlp(normed, step))
            return x, step.sum(
                attended + out
            ) if is_summed_once else attended + step.sum(out)
        x, more = self._add(
            self._of_sum[0], normed if spec.adds_normed else x, attended
        )
        if self._cross is not None:
            x, normed = norm_sum(self._before_cross, x, more)
            out = step.sum(self._cross(normed, number, step))
            x, more = self._add(self._of_cross_sum, x, out)
        x, normed = norm_sum(self._before[1], x, more)
        out = step.sum(self.mlp(normed, step))
        if self._after[1]:
            out = self._after[1](out)
        return self._add(
            self._of_sum[1], normed if spec.adds_normed else x, self._scale(out)
        )

    def _add(
        self, norm: WeightedNorm | None, x: torch.Tensor, more: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if norm is not None:
            return norm.norm_sum(x, more)[1], None
        if self._is_wide and x.dtype == torch.float16:  # what is too large stays finite
            return (x.float() + more.float()).clamp(-WIDEST, WIDEST).half(), None
        return x, more

    def _scale(self, out: torch.Tensor) -> torch.Tensor:
        return (
            out if self.spec.residual_scale == 1.0 else out * self.spec.residual_scale
        )


def norm_sum(
    norm: WeightedNorm | None, x: torch.Tensor, more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + more, and its norm."""
    if norm is not None:
        return norm.norm_sum(x, more)
    if more is not None:
        x = x + more
    return x, x

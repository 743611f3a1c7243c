"""Lists every tensor of a spec by our name for it: what it is for, and its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

import torch

from fminfer.compute.values.spec import (
    ACTIVATION_SHAPES,
    Attention,
    Latent,
    Layer,
    Mlp,
    Model,
    Moe,
    Norm,
)
from fminfer.compute.values.weights import TensorSpec, Units, Use, Weight
from fminfer.core.partition import Part

TensorSpecs = dict[str, TensorSpec]
Weights = dict[str, Weight]  # by the same names
# The share of tokens that run the head: generated tokens do, most prompt tokens do not.
HEAD_SHARE = 0.5
# Tensors that are the embedding itself, if a config ties them and they are not stored apart.
TIED = ("head.weight", "encoder.embed.weight")


def plain_of(weights: Weights, name: str) -> torch.Tensor | None:
    """Return a small weight's tensor, if there is one of that name."""
    return weights[name].plain if name in weights else None


@cache  # most layers of a model are equal, and plans of many ways ask often
def layer_specs(layer: Layer, hidden_size: int) -> Mapping[str, TensorSpec]:
    """Return the tensors of a layer. Products are (outputs, inputs), of experts (experts, …)."""
    attention = layer.attention
    of_hidden = (hidden_size,)
    found: TensorSpecs = {}
    for side, pair in (
        ("before", layer.before),
        ("after", layer.after),
        ("sum", layer.of_sum),
    ):
        for part, norm in zip(("attention", "mlp"), pair, strict=True):
            found |= _of_norm(f"{side}_{part}", norm, of_hidden)
    if attention.latent is not None:
        found |= _of_latent(attention, attention.latent, hidden_size)
    else:
        of_query, *of_keys = _heads_of(attention)
        has_bias = attention.has_qkv_bias
        found |= (
            _of_product("qkv", (of_query, *of_keys), hidden_size, has_bias)
            | _of_qk_norm("q_norm", attention, of_query)
            | _of_qk_norm("k_norm", attention, of_keys[0])
        )
    heads = Units("heads", attention.heads)
    if attention.has_sinks:
        found["sinks.weight"] = TensorSpec((heads.count,), "other", outputs=(heads,))
    inputs = replace(heads, size=attention.out_inputs // heads.count)
    found |= _of_product("out", hidden_size, inputs, attention.has_out_bias)
    if (relative := attention.relative) is not None:
        shape = (relative.buckets, heads.count)
        found["relative.weight"] = TensorSpec(shape, "other", inputs=heads)
    if (cross := layer.cross) is not None:
        how = cross.attention
        of_query, *of_keys = _heads_of(how)
        found |= (
            _of_norm("before_cross", cross.before, of_hidden)
            | _of_norm("sum_cross", cross.of_sum, of_hidden)
            | _of_product("cross_q", (of_query,), hidden_size, how.has_qkv_bias)
            | _of_product("cross_kv", (*of_keys,), hidden_size, how.has_qkv_bias)
            | _of_product("cross_out", hidden_size, of_query, how.has_out_bias)
        )
    mlp = layer.mlp
    own = (
        _of_moe(mlp, hidden_size) if isinstance(mlp, Moe) else _of_mlp(mlp, hidden_size)
    )
    return found | own


def entry_specs(model: Model) -> TensorSpecs:
    """Return the tensors before the first layer, which the first stage holds."""
    hidden = model.hidden_size
    tokens = Units("tokens", model.vocab_size)
    shape = (tokens.count, model.embed_size)
    found = {"embed.weight": TensorSpec(shape, "embedding", outputs=(tokens,))}
    if model.embed_size != hidden:
        found["project_in.weight"] = TensorSpec((hidden, model.embed_size), "other")
    if model.num_positions and not model.has_sinusoids:
        found["positions.weight"] = TensorSpec((model.num_positions, hidden), "other")
    found |= _of_norm("embed_norm", model.embed_norm, (hidden,))
    if (encoder := model.encoder) is not None:
        for name, rows in (
            ("positions", encoder.num_positions),
            ("types", encoder.num_types),
        ):
            if rows:
                found[f"encoder.{name}.weight"] = TensorSpec((rows, hidden), "other")
        if encoder.has_embed:
            found["encoder.embed.weight"] = found["embed.weight"]
        found |= _of_norm("encoder.embed_norm", encoder.embed_norm, (hidden,))
    return found


def exit_specs(model: Model) -> TensorSpecs:
    """Return the tensors after the last layer, which the last stage holds."""
    hidden = model.hidden_size
    found: TensorSpecs = {}
    if model.encoder is not None:
        found |= _of_norm("encoder.final_norm", model.encoder.final_norm, (hidden,))
        pooling = model.encoder.pooling
        inputs = hidden
        for number, each in enumerate(pooling.readings if pooling else ()):
            found |= _of_product(
                f"reading_{number}", each.size, inputs, each.has_bias, "other"
            )
            found |= _of_norm(f"reading_{number}_norm", each.norm, (each.size,))
            inputs = each.size
    if model.is_pooled:
        return found
    found |= _of_norm("final_norm", model.final_norm, (hidden,))
    if model.embed_size != hidden:
        found["project_out.weight"] = TensorSpec((model.embed_size, hidden), "other")
    tokens = Units("tokens", model.vocab_size)
    return found | _of_product(
        "head", (tokens,), model.embed_size, model.has_head_bias, "head"
    )


def part_specs(model: Model, part: Part) -> TensorSpecs:
    """Return the tensors of one stage. Names of a layer's tensors begin with its number."""
    specs: TensorSpecs = entry_specs(model) if part.is_first else {}
    for number in part.layer_numbers:
        own = layer_specs(model.layers[number], model.hidden_size)
        specs |= {f"{number}.{name}": spec for name, spec in own.items()}
    return specs | (exit_specs(model) if part.is_last else {})


def model_specs(model: Model) -> TensorSpecs:
    """Return all tensors of a model; names of a layer's tensors begin with its number."""
    return part_specs(model, whole_model(model))


def without_tied(specs: TensorSpecs, *, is_tied: bool) -> TensorSpecs:
    """Return the specs without tensors that are the embedding, if a config ties them."""
    return {
        name: spec for name, spec in specs.items() if not (is_tied and name in TIED)
    }


def whole_model(model: Model) -> Part:
    """Return all layers of a model as one part."""
    cached = model.num_cached
    return Part(0, 1, 0, cached, encoder=range(cached, len(model.layers)))


def head_cost(model: Model) -> float:
    """Return the cost of the head on the last stage, in units of a layer."""
    layers = [
        layer_specs(layer, model.hidden_size)
        for layer in model.layers[: model.num_cached]
    ]
    sizes = [spec.size for specs in layers for spec in specs.values()]
    head = exit_specs(model).get("head.weight")
    return 0.0 if head is None else HEAD_SHARE * head.size * len(layers) / sum(sizes)


def _of_moe(moe: Moe, hidden: int) -> TensorSpecs:
    found = _of_product(
        "router", moe.num_experts, hidden, moe.has_router_bias, "router"
    )
    if moe.has_choice_bias:
        found["choice.bias"] = TensorSpec((moe.num_experts,), "choice")
    for name, one in _of_mlp(moe.expert, hidden).items():
        found[f"experts.{name}"] = replace(one, shape=(moe.num_experts, *one.shape))
    if moe.shared is not None:
        shared = _of_mlp(moe.shared, hidden, "shared")
        found |= {f"shared.{name}": one for name, one in shared.items()}
    if moe.has_shared_gate:
        found["shared_gate.weight"] = TensorSpec((1, hidden), "other")
    return found


def _of_latent(how: Attention, latent: Latent, hidden: int) -> TensorSpecs:
    heads = Units("heads", how.heads)
    has_bias = how.has_qkv_bias
    of_queries = (replace(heads, size=latent.key_dim + latent.turned_dim),)
    if latent.query_rank is None:
        found = _of_product("q", of_queries, hidden, False)
    else:
        found = (
            _of_product("q_down", latent.query_rank, hidden, has_bias)
            | _of_norm("q_norm", latent.norm, (latent.query_rank,))
            | _of_product("q_up", of_queries, latent.query_rank, False)
        )
    of_heads = (replace(heads, size=latent.key_dim + latent.value_dim),)
    return (
        found
        | _of_product("kv_down", latent.rank + latent.turned_dim, hidden, has_bias)
        | _of_norm("kv_norm", latent.norm, (latent.rank,))
        | _of_product("kv_up", of_heads, latent.rank, False, "moved")
    )


def _of_mlp(
    mlp: Mlp, hidden: int, of: Literal["inner", "shared"] = "inner"
) -> TensorSpecs:
    inner = Units(of, mlp.size)
    found = _of_product(
        "up", (inner,) * (2 if mlp.is_gated else 1), hidden, mlp.has_bias
    )
    found |= _of_product("down", hidden, inner, mlp.has_bias)
    found["down.weight"] = replace(found["down.weight"], is_wide=mlp.is_wide)
    for name, shape in ACTIVATION_SHAPES.get(mlp.activation, {}).items():
        found[f"{mlp.activation}.{name}"] = TensorSpec(shape, "other")
    return found


def _of_product(
    name: str,
    outputs: int | tuple[Units, ...],
    inputs: int | Units,
    has_bias: bool,
    use: Use = "product",
) -> TensorSpecs:
    of_outputs = () if isinstance(outputs, int) else outputs
    of_inputs = None if isinstance(inputs, int) else inputs
    size = outputs if isinstance(outputs, int) else sum(each.total for each in outputs)
    shape = (size, inputs if isinstance(inputs, int) else inputs.total)
    found = {
        f"{name}.weight": TensorSpec(shape, use, outputs=of_outputs, inputs=of_inputs)
    }
    if has_bias:
        is_of_sum = of_inputs is not None
        bias = TensorSpec((size,), "bias", outputs=of_outputs, is_of_sum=is_of_sum)
        found[f"{name}.bias"] = bias
    return found


def _of_norm(name: str, norm: Norm | None, shape: tuple[int, ...]) -> TensorSpecs:
    found: TensorSpecs = {}
    if norm is not None and norm.has_weight:
        found[f"{name}.weight"] = TensorSpec(shape, "norm")
    if norm is not None and norm.has_bias:
        found[f"{name}.bias"] = TensorSpec(shape, "norm_bias")
    return found


def _heads_of(how: Attention) -> tuple[Units, Units, Units]:
    """Return the outputs of queries, keys and values."""
    keys = Units("kv_heads", how.kv_heads, how.head_dim)
    return Units("heads", how.heads, how.head_dim), keys, keys


def _of_qk_norm(name: str, how: Attention, heads: Units) -> TensorSpecs:
    shapes: dict[str, tuple[tuple[int, ...], tuple[Units, ...]]] = {
        "head": ((heads.size,), ()),
        "heads": ((heads.count, heads.size), (replace(heads, size=1),)),
        "all": ((heads.total,), (heads,)),
    }
    shape, outputs = shapes[how.qk_norm_over]
    found = _of_norm(name, how.qk_norm, shape)
    return {leaf: replace(spec, outputs=outputs) for leaf, spec in found.items()}

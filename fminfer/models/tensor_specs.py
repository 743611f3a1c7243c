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
    Cross,
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


def find_plain_tensor(weights: Weights, name: str) -> torch.Tensor | None:
    """Return a small weight's tensor, if there is one of that name."""
    return weights[name].plain if name in weights else None


@cache  # most layers of a model are equal, and planning calls it often
def layer_specs(layer: Layer, hidden_size: int) -> Mapping[str, TensorSpec]:
    """Return the tensors of a layer. Products are (outputs, inputs), of experts (experts, …)."""
    hidden_shape = (hidden_size,)
    specs: TensorSpecs = {}
    for side, pair in (
        ("before", layer.input_norms),
        ("after", layer.output_norms),
        ("sum", layer.sum_norms),
    ):
        for part, norm in zip(("attention", "mlp"), pair, strict=True):
            specs |= _norm_specs(f"{side}_{part}", norm, hidden_shape)
    specs |= _attention_specs(layer.attention, hidden_size)
    if layer.cross is not None:
        specs |= _cross_specs(layer.cross, hidden_size)
    if isinstance(layer.mlp, Moe):
        return specs | _moe_specs(layer.mlp, hidden_size)
    return specs | _mlp_specs(layer.mlp, hidden_size)


def _attention_specs(attention: Attention, hidden_size: int) -> TensorSpecs:
    if attention.latent is not None:
        specs = _latent_specs(attention, attention.latent, hidden_size)
    else:
        query_units, *kv_units = _qkv_units(attention)
        has_bias = attention.has_qkv_bias
        specs = (
            _product_specs("qkv", (query_units, *kv_units), hidden_size, has_bias)
            | _qk_norm_specs("q_norm", attention, query_units)
            | _qk_norm_specs("k_norm", attention, kv_units[0])
        )
    heads = Units("heads", attention.heads)
    if attention.has_sinks:
        specs["sinks.weight"] = TensorSpec((heads.count,), "other", outputs=(heads,))
    inputs = replace(heads, size=attention.out_inputs // heads.count)
    specs |= _product_specs("out", hidden_size, inputs, attention.has_out_bias)
    if (relative := attention.relative) is not None:
        shape = (relative.buckets, heads.count)
        specs["relative.weight"] = TensorSpec(shape, "other", inputs=heads)
    return specs


def _cross_specs(cross: Cross, hidden_size: int) -> TensorSpecs:
    attention = cross.attention
    query_units, *kv_units = _qkv_units(attention)
    return (
        _norm_specs("before_cross", cross.input_norm, (hidden_size,))
        | _norm_specs("sum_cross", cross.sum_norm, (hidden_size,))
        | _product_specs("cross_q", (query_units,), hidden_size, attention.has_qkv_bias)
        | _product_specs("cross_kv", (*kv_units,), hidden_size, attention.has_qkv_bias)
        | _product_specs("cross_out", hidden_size, query_units, attention.has_out_bias)
    )


def entry_specs(model: Model) -> TensorSpecs:
    """Return the tensors before the first layer, which the first stage holds."""
    hidden = model.hidden_size
    tokens = Units("tokens", model.vocab_size)
    shape = (tokens.count, model.embed_size)
    specs = {"embed.weight": TensorSpec(shape, "embedding", outputs=(tokens,))}
    if model.embed_size != hidden:
        specs["project_in.weight"] = TensorSpec((hidden, model.embed_size), "other")
    if model.num_positions and not model.has_sinusoids:
        specs["positions.weight"] = TensorSpec((model.num_positions, hidden), "other")
    specs |= _norm_specs("embed_norm", model.embed_norm, (hidden,))
    if (encoder := model.encoder) is not None:
        for name, rows in (
            ("positions", encoder.num_positions),
            ("types", encoder.num_types),
        ):
            if rows:
                specs[f"encoder.{name}.weight"] = TensorSpec((rows, hidden), "other")
        if encoder.has_embed:
            specs["encoder.embed.weight"] = specs["embed.weight"]
        specs |= _norm_specs("encoder.embed_norm", encoder.embed_norm, (hidden,))
    return specs


def exit_specs(model: Model) -> TensorSpecs:
    """Return the tensors after the last layer, which the last stage holds."""
    hidden = model.hidden_size
    specs: TensorSpecs = {}
    if model.encoder is not None:
        specs |= _norm_specs("encoder.final_norm", model.encoder.final_norm, (hidden,))
        pooling = model.encoder.pooling
        inputs = hidden
        for number, reading in enumerate(pooling.readings if pooling else ()):
            specs |= _product_specs(
                f"reading_{number}", reading.size, inputs, reading.has_bias, "other"
            )
            specs |= _norm_specs(
                f"reading_{number}_norm", reading.norm, (reading.size,)
            )
            inputs = reading.size
    if model.is_pooled:
        return specs
    specs |= _norm_specs("final_norm", model.final_norm, (hidden,))
    if model.embed_size != hidden:
        specs["project_out.weight"] = TensorSpec((model.embed_size, hidden), "other")
    tokens = Units("tokens", model.vocab_size)
    return specs | _product_specs(
        "head", (tokens,), model.embed_size, model.has_head_bias, "head"
    )


def stage_specs(model: Model, part: Part) -> TensorSpecs:
    """Return the tensors of one stage. Names of a layer's tensors begin with its number."""
    specs: TensorSpecs = entry_specs(model) if part.is_first else {}
    for number in part.layer_numbers:
        specs_of_layer = layer_specs(model.layers[number], model.hidden_size)
        specs |= {f"{number}.{name}": spec for name, spec in specs_of_layer.items()}
    return specs | (exit_specs(model) if part.is_last else {})


def model_specs(model: Model) -> TensorSpecs:
    """Return all tensors of a model; names of a layer's tensors begin with its number."""
    return stage_specs(model, whole_model_part(model))


def without_tied_tensors(specs: TensorSpecs, *, is_tied: bool) -> TensorSpecs:
    """Return the specs without tensors that are the embedding, if a config ties them."""
    return {
        name: spec for name, spec in specs.items() if not (is_tied and name in TIED)
    }


def whole_model_part(model: Model) -> Part:
    """Return all layers of a model as one part."""
    cached = model.num_cached_layers
    return Part(0, 1, 0, cached, encoder=range(cached, len(model.layers)))


def head_cost(model: Model) -> float:
    """Return the cost of the head on the last stage, in units of a layer."""
    layers = [
        layer_specs(layer, model.hidden_size)
        for layer in model.layers[: model.num_cached_layers]
    ]
    sizes = [spec.size for specs in layers for spec in specs.values()]
    head = exit_specs(model).get("head.weight")
    return 0.0 if head is None else HEAD_SHARE * head.size * len(layers) / sum(sizes)


def _moe_specs(moe: Moe, hidden: int) -> TensorSpecs:
    specs = _product_specs(
        "router", moe.num_experts, hidden, moe.has_router_bias, "router"
    )
    if moe.has_choice_bias:
        specs["choice.bias"] = TensorSpec((moe.num_experts,), "choice")
    for name, spec in _mlp_specs(moe.expert, hidden).items():
        specs[f"experts.{name}"] = replace(spec, shape=(moe.num_experts, *spec.shape))
    if moe.shared is not None:
        shared = _mlp_specs(moe.shared, hidden, "shared")
        specs |= {f"shared.{name}": spec for name, spec in shared.items()}
    if moe.has_shared_gate:
        specs["shared_gate.weight"] = TensorSpec((1, hidden), "other")
    return specs


def _latent_specs(attention: Attention, latent: Latent, hidden: int) -> TensorSpecs:
    heads = Units("heads", attention.heads)
    has_bias = attention.has_qkv_bias
    query_units = (replace(heads, size=latent.key_dim + latent.turned_dim),)
    if latent.query_rank is None:
        specs = _product_specs("q", query_units, hidden, False)
    else:
        specs = (
            _product_specs("q_down", latent.query_rank, hidden, has_bias)
            | _norm_specs("q_norm", latent.norm, (latent.query_rank,))
            | _product_specs("q_up", query_units, latent.query_rank, False)
        )
    kv_units = (replace(heads, size=latent.key_dim + latent.value_dim),)
    return (
        specs
        | _product_specs("kv_down", latent.rank + latent.turned_dim, hidden, has_bias)
        | _norm_specs("kv_norm", latent.norm, (latent.rank,))
        | _product_specs("kv_up", kv_units, latent.rank, False, "moved")
    )


def _mlp_specs(
    mlp: Mlp, hidden: int, units_name: Literal["inner", "shared"] = "inner"
) -> TensorSpecs:
    inner = Units(units_name, mlp.size)
    specs = _product_specs(
        "up", (inner,) * (2 if mlp.is_gated else 1), hidden, mlp.has_bias
    )
    specs |= _product_specs("down", hidden, inner, mlp.has_bias)
    specs["down.weight"] = replace(specs["down.weight"], is_wide=mlp.is_wide)
    for name, shape in ACTIVATION_SHAPES.get(mlp.activation, {}).items():
        specs[f"{mlp.activation}.{name}"] = TensorSpec(shape, "other")
    return specs


def _product_specs(
    name: str,
    outputs: int | tuple[Units, ...],
    inputs: int | Units,
    has_bias: bool,
    use: Use = "product",
) -> TensorSpecs:
    output_units = () if isinstance(outputs, int) else outputs
    input_units = None if isinstance(inputs, int) else inputs
    size = (
        outputs if isinstance(outputs, int) else sum(units.total for units in outputs)
    )
    shape = (size, inputs if isinstance(inputs, int) else inputs.total)
    specs = {
        f"{name}.weight": TensorSpec(
            shape, use, outputs=output_units, inputs=input_units
        )
    }
    if has_bias:
        is_of_sum = input_units is not None
        bias = TensorSpec((size,), "bias", outputs=output_units, is_of_sum=is_of_sum)
        specs[f"{name}.bias"] = bias
    return specs


def _norm_specs(name: str, norm: Norm | None, shape: tuple[int, ...]) -> TensorSpecs:
    specs: TensorSpecs = {}
    if norm is not None and norm.has_weight:
        specs[f"{name}.weight"] = TensorSpec(shape, "norm")
    if norm is not None and norm.has_bias:
        specs[f"{name}.bias"] = TensorSpec(shape, "norm_bias")
    return specs


def _qkv_units(attention: Attention) -> tuple[Units, Units, Units]:
    """Return the outputs of queries, keys and values."""
    kv_units = Units("kv_heads", attention.kv_heads, attention.head_dim)
    return Units("heads", attention.heads, attention.head_dim), kv_units, kv_units


def _qk_norm_specs(name: str, attention: Attention, heads: Units) -> TensorSpecs:
    shapes: dict[str, tuple[tuple[int, ...], tuple[Units, ...]]] = {
        "head": ((heads.size,), ()),
        "heads": ((heads.count, heads.size), (replace(heads, size=1),)),
        "all": ((heads.total,), (heads,)),
    }
    shape, outputs = shapes[attention.qk_norm_over]
    specs = _norm_specs(name, attention.qk_norm, shape)
    return {leaf: replace(spec, outputs=outputs) for leaf, spec in specs.items()}

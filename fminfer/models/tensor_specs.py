"""Lists every tensor of a spec by our name for it: what it is for, and its shape.

Loading, random weights, forecasts of memory and the cost of the head use this list.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fminfer.compute.spec import (
    ACTIVATION_SHAPES,
    Attention,
    Encoder,
    Latent,
    Layer,
    Mlp,
    Model,
    Moe,
    Norm,
)
from fminfer.compute.weights import TensorSpec, Use, Weight
from fminfer.core.partition import Part

TensorSpecs = dict[str, TensorSpec]
Weights = dict[str, Weight]  # by the same names
# The share of tokens that run the head: generated tokens do, most prompt tokens do not.
HEAD_SHARE = 0.5
Specs = Iterator[tuple[str, TensorSpec]]


def plain_of(weights: Weights, name: str) -> torch.Tensor | None:
    """Return a small weight's tensor, if there is one of that name."""
    return weights[name].plain if name in weights else None


def layer_specs(layer: Layer, hidden_size: int) -> TensorSpecs:
    """Return the tensors of a layer. Products are (outputs, inputs), of experts (experts, …)."""
    return dict(_of_layer(layer, hidden_size))


def entry_specs(model: Model) -> TensorSpecs:
    """Return the tensors before the first layer, which the first stage holds."""
    return dict(_of_entry(model))


def exit_specs(model: Model) -> TensorSpecs:
    """Return the tensors after the last layer, which the last stage holds."""
    return dict(_of_exit(model))


def part_specs(model: Model, part: Part) -> TensorSpecs:
    """Return the tensors of one stage. Names of a layer's tensors begin with its number."""
    specs: TensorSpecs = entry_specs(model) if part.is_first else {}
    for number in part.numbers:
        own = layer_specs(model.layers[number], model.hidden_size)
        specs |= {f"{number}.{name}": spec for name, spec in own.items()}
    return specs | (exit_specs(model) if part.is_last else {})


def model_specs(model: Model) -> TensorSpecs:
    """Return all tensors of a model; names of a layer's tensors begin with its number."""
    return part_specs(model, whole_model(model))


def whole_model(model: Model) -> Part:
    """Return all layers of a model as one part."""
    cached, all_layers = model.num_cached, len(model.layers)
    return Part(0, 1, 0, cached, encoder=range(cached, all_layers))


def head_cost(model: Model) -> float:
    """Return the cost of the head on the last stage, in units of a layer."""
    cached = model.layers[: model.num_cached]
    sizes = [_size(layer_specs(layer, model.hidden_size)) for layer in cached]
    head = exit_specs(model).get("head.weight")
    return 0.0 if head is None else HEAD_SHARE * head.size * len(sizes) / sum(sizes)


def _size(specs: TensorSpecs) -> int:
    return sum(spec.size for spec in specs.values())


def _of_layer(layer: Layer, hidden: int) -> Specs:
    attention = layer.attention
    for side, pair in (("before", layer.before), ("after", layer.after), ("sum", layer.of_sum)):
        for part, norm in zip(("attention", "mlp"), pair, strict=True):
            yield from _of_norm(f"{side}_{part}", norm, (hidden,))
    if attention.latent is not None:
        yield from _of_latent(attention, attention.latent, hidden)
    else:
        yield from _of_product("qkv", sum(attention.qkv_sizes), hidden, attention.has_qkv_bias)
        for name, heads in (("q_norm", attention.heads), ("k_norm", attention.kv_heads)):
            yield from _of_norm(name, attention.qk_norm, _qk_norm_shape(attention, heads))
    if attention.has_sinks:
        yield "sinks.weight", TensorSpec((attention.heads,), "other")
    yield from _of_product("out", hidden, attention.out_inputs, attention.has_out_bias)
    if attention.relative is not None:
        yield "relative.weight", TensorSpec((attention.relative.buckets, attention.heads), "other")
    if (cross := layer.cross) is not None:
        of_query, *of_keys = cross.attention.qkv_sizes
        has_bias = cross.attention.has_qkv_bias
        yield from _of_norm("before_cross", cross.before, (hidden,))
        yield from _of_norm("sum_cross", cross.of_sum, (hidden,))
        yield from _of_product("cross_q", of_query, hidden, has_bias)
        yield from _of_product("cross_kv", sum(of_keys), hidden, has_bias)
        has_bias, inputs = cross.attention.has_out_bias, cross.attention.out_inputs
        yield from _of_product("cross_out", hidden, inputs, has_bias)
    if isinstance(layer.mlp, Moe):
        moe, expert = layer.mlp, layer.mlp.expert
        yield from _of_product("router", moe.num_experts, hidden, moe.has_router_bias, "router")
        if moe.has_choice_bias:
            yield "choice.bias", TensorSpec((moe.num_experts,), "choice")
        for name, one in _of_mlp(expert, hidden):
            yield f"experts.{name}", TensorSpec((moe.num_experts, *one.shape), one.use)
        for name, one in () if moe.shared is None else _of_mlp(moe.shared, hidden):
            yield f"shared.{name}", one
        if moe.has_shared_gate:
            yield "shared_gate.weight", TensorSpec((1, hidden), "other")
    else:
        yield from _of_mlp(layer.mlp, hidden)


def _of_latent(how: Attention, latent: Latent, hidden: int) -> Specs:
    of_queries, has_bias = how.heads * (latent.key_dim + latent.turned_dim), how.has_qkv_bias
    if latent.query_rank is None:
        yield from _of_product("q", of_queries, hidden, False)
    else:
        yield from _of_product("q_down", latent.query_rank, hidden, has_bias)
        yield from _of_norm("q_norm", latent.norm, (latent.query_rank,))
        yield from _of_product("q_up", of_queries, latent.query_rank, False)
    yield from _of_product("kv_down", latent.rank + latent.turned_dim, hidden, has_bias)
    yield from _of_norm("kv_norm", latent.norm, (latent.rank,))
    of_heads = how.heads * (latent.key_dim + latent.value_dim)
    yield from _of_product("kv_up", of_heads, latent.rank, False, "moved")


def _of_entry(model: Model) -> Specs:
    yield "embed.weight", TensorSpec((model.vocab_size, model.embed_size), "embedding")
    if model.embed_size != model.hidden_size:
        yield "project_in.weight", TensorSpec((model.hidden_size, model.embed_size), "other")
    if model.num_positions and not model.has_sinusoids:
        yield "positions.weight", TensorSpec((model.num_positions, model.hidden_size), "other")
    yield from _of_norm("embed_norm", model.embed_norm, (model.hidden_size,))
    if (encoder := model.encoder) is not None:
        for name, rows in ("positions", encoder.num_positions), ("types", encoder.num_types):
            if rows:
                yield f"encoder.{name}.weight", TensorSpec((rows, model.hidden_size), "other")
        yield from _of_norm("encoder.embed_norm", encoder.embed_norm, (model.hidden_size,))


def _of_exit(model: Model) -> Specs:
    if model.encoder is not None:
        yield from _of_norm("encoder.final_norm", model.encoder.final_norm, (model.hidden_size,))
        yield from _of_pooling(model.encoder, model.hidden_size)
        if model.is_pooled:
            return
    yield from _of_norm("final_norm", model.final_norm, (model.hidden_size,))
    if model.embed_size != model.hidden_size:
        yield "project_out.weight", TensorSpec((model.embed_size, model.hidden_size), "other")
    yield from _of_product("head", model.vocab_size, model.embed_size, model.has_head_bias, "head")


def _of_pooling(encoder: Encoder, inputs: int) -> Specs:
    for number, each in enumerate(encoder.pooling.readings if encoder.pooling else ()):
        yield from _of_product(f"reading_{number}", each.size, inputs, each.has_bias, "other")
        yield from _of_norm(f"reading_{number}_norm", each.norm, (each.size,))
        inputs = each.size


def _of_mlp(mlp: Mlp, hidden: int) -> Specs:
    yield from _of_product("up", mlp.up_size, hidden, mlp.has_bias)
    yield "down.weight", TensorSpec((hidden, mlp.size), "product", is_wide=mlp.is_wide)
    if mlp.has_bias:
        yield "down.bias", TensorSpec((hidden,), "bias")
    for name, shape in ACTIVATION_SHAPES.get(mlp.activation, {}).items():
        yield f"{mlp.activation}.{name}", TensorSpec(shape, "other")


def _of_product(
    name: str, outputs: int, inputs: int, has_bias: bool, use: Use = "product"
) -> Specs:
    yield f"{name}.weight", TensorSpec((outputs, inputs), use)
    if has_bias:
        yield f"{name}.bias", TensorSpec((outputs,), "bias")


def _of_norm(name: str, norm: Norm | None, shape: tuple[int, ...]) -> Specs:
    if norm is not None and norm.has_weight:
        yield f"{name}.weight", TensorSpec(shape, "norm")
    if norm is not None and norm.has_bias:
        yield f"{name}.bias", TensorSpec(shape, "norm_bias")


def _qk_norm_shape(attention: Attention, heads: int) -> tuple[int, ...]:
    shapes: dict[str, tuple[int, ...]] = {
        "head": (attention.head_dim,),
        "heads": (heads, attention.head_dim),
        "all": (heads * attention.head_dim,),
    }
    return shapes[attention.qk_norm_over]

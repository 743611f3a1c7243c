"""Lists every tensor of a spec by our name for it, with its shape.

Loading, random weights, forecasts of memory and the cost of the head use this list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fminfer.compute.spec import ACTIVATION_SHAPES, Attention, Latent, Layer, Mlp, Model, Moe, Norm
from fminfer.core.partition import Part

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]  # by the same names
# The share of tokens that run the head: generated tokens do, most prompt tokens do not.
HEAD_SHARE = 0.5
# Of a layer, or of each of its experts.
PRODUCTS = frozenset({"qkv", "out", "up", "down", "q", "q_down", "q_up", "kv_down"})


def layer_shapes(layer: Layer, hidden_size: int) -> Shapes:
    """Return the tensors of a layer. Products are (outputs, inputs), of experts (experts, …)."""
    return dict(_of_layer(layer, hidden_size))


def entry_shapes(model: Model) -> Shapes:
    """Return the tensors before the first layer, which the first stage holds."""
    return dict(_of_entry(model))


def exit_shapes(model: Model) -> Shapes:
    """Return the tensors after the last layer, which the last stage holds."""
    return dict(_of_exit(model))


def part_shapes(model: Model, part: Part) -> Shapes:
    """Return the tensors of one stage. Names of a layer's tensors begin with its number."""
    shapes: Shapes = entry_shapes(model) if part.is_first else {}
    for number in range(part.first, part.last):
        own = layer_shapes(model.layers[number], model.hidden_size)
        shapes |= {f"{number}.{name}": shape for name, shape in own.items()}
    return shapes | (exit_shapes(model) if part.is_last else {})


def is_of_product(name: str) -> bool:
    """Tell whether a tensor is the weight of one of a layer's products, by its name in a part."""
    return _weighs(name) in PRODUCTS


def may_stay_stored(name: str) -> bool:
    """Tell whether a tensor is widened where it is used: a product's, the head's, embeddings."""
    return _weighs(name) in PRODUCTS | {"head", "embed"}


def is_moved(name: str) -> bool:
    """Tell whether a tensor becomes others when its layer is made: the `kv_up` of a latent."""
    return _weighs(name) == "kv_up"


def is_precise(name: str) -> bool:
    """Tell whether a tensor is float32 in any dtype: a small one that decides between experts."""
    return name.endswith(("choice.bias", "router.weight"))


def _weighs(name: str) -> str:
    """Return what a tensor is the weight of, without its layer; "": it is none."""
    module, _, leaf = name.rpartition(".")
    return module.rpartition(".")[2] if leaf == "weight" else ""


def head_cost(model: Model) -> float:
    """Return the cost of the head on the last stage, in units of a layer."""
    sizes = [_size(layer_shapes(layer, model.hidden_size)) for layer in model.layers]
    head = math.prod(exit_shapes(model)["head.weight"])
    return HEAD_SHARE * head * len(sizes) / sum(sizes)


def _size(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _of_layer(layer: Layer, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
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
        yield "sinks.weight", (attention.heads,)
    yield from _of_product("out", hidden, attention.out_inputs, attention.has_out_bias)
    if isinstance(layer.mlp, Moe):
        moe, expert = layer.mlp, layer.mlp.expert
        yield from _of_product("router", moe.num_experts, hidden, moe.has_router_bias)
        if moe.has_choice_bias:
            yield "choice.bias", (moe.num_experts,)
        for name, shape in _of_mlp(expert, hidden):
            yield f"experts.{name}", (moe.num_experts, *shape)
        for name, shape in () if moe.shared is None else _of_mlp(moe.shared, hidden):
            yield f"shared.{name}", shape
        if moe.has_shared_gate:
            yield "shared_gate.weight", (1, hidden)
    else:
        yield from _of_mlp(layer.mlp, hidden)


def _of_latent(
    how: Attention, latent: Latent, hidden: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
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
    yield from _of_product("kv_up", of_heads, latent.rank, False)


def _of_entry(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed.weight", (model.vocab_size, model.embed_size)
    if model.embed_size != model.hidden_size:
        yield "project_in.weight", (model.hidden_size, model.embed_size)
    if model.num_positions and not model.has_sinusoids:
        yield "positions.weight", (model.num_positions, model.hidden_size)
    yield from _of_norm("embed_norm", model.embed_norm, (model.hidden_size,))


def _of_exit(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _of_norm("final_norm", model.final_norm, (model.hidden_size,))
    if model.embed_size != model.hidden_size:
        yield "project_out.weight", (model.embed_size, model.hidden_size)
    yield from _of_product("head", model.vocab_size, model.embed_size, model.has_head_bias)


def _of_mlp(mlp: Mlp, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _of_product("up", mlp.up_size, hidden, mlp.has_bias)
    yield from _of_product("down", hidden, mlp.size, mlp.has_bias)
    for name, shape in ACTIVATION_SHAPES.get(mlp.activation, {}).items():
        yield f"{mlp.activation}.{name}", shape


def _of_product(
    name: str, outputs: int, inputs: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _of_norm(
    name: str, norm: Norm | None, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if norm is not None and norm.has_weight:
        yield f"{name}.weight", shape
    if norm is not None and norm.has_bias:
        yield f"{name}.bias", shape


def _qk_norm_shape(attention: Attention, heads: int) -> tuple[int, ...]:
    shapes: dict[str, tuple[int, ...]] = {
        "head": (attention.head_dim,),
        "heads": (heads, attention.head_dim),
        "all": (heads * attention.head_dim,),
    }
    return shapes[attention.qk_norm_over]

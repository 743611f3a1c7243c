"""What a layer is made of, as a call of the library takes it: `whole_layers` computes it so.

Layers that `fused_layers` has fused are known by what it left there; those of OPT and BLOOM, with
LayerNorms and an MLP of two products, by their class. A layer with a part that is no kernel of ours
has none.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fminfer.layer_kernels import GELU_TANH, RELU
from fminfer.product_kernel import PANEL, PackedProduct

TOLD = {"scaling", "sliding_window", "softcap"}  # that the kernel can obey


class Norm(ctypes.Structure):
    """x / sqrt(mean(x²) + eps) * (weight + offset), or a LayerNorm if it has a bias.

    Without a weight none.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_float) for name in ("eps", "offset")],
    )


class Linear(ctypes.Structure):
    """A PackedProduct."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_int64) for name in ("inputs", "outputs")],
    )


class Layer(ctypes.Structure):
    """What a layer is; whole_layers.cpp says what each is."""

    _fields_ = (
        *[(name, Norm) for name in ("first", "second", "of_query", "of_key")],
        *[(name, Linear) for name in ("qkv", "out", "up", "down")],
        *[(name, ctypes.c_void_p) for name in ("keys", "values", "slopes")],
        *[(name, ctypes.c_int64) for name in ("head_step", "key_at", "value_at")],
        *[(name, ctypes.c_int64) for name in ("activation", "window")],
        *[(name, ctypes.c_float) for name in ("scaling", "softcap")],
    )


@dataclass(slots=True, frozen=True)
class LayerParts:
    """A layer of transformers, read."""

    attention: Any  # the module that has the paged cache, and slopes of ALiBi
    heads: int
    layer: Layer  # without what the cache and the slopes are
    products: tuple[PackedProduct, ...]  # which `layer` points to
    turns: bool = True  # there are rotary positions
    gives_tuple: bool = False  # its forward returns (hidden states, None)


def parts_of(layer: Any) -> LayerParts | None:
    """Return what a layer is made of; None: not only of kernels, or it is no layer."""
    kind = (type(layer).__module__, type(layer).__name__)  # none of them is imported for this
    if kind == ("transformers.models.opt.modeling_opt", "OPTDecoderLayer"):
        return _parts_of_opt(layer)
    if kind == ("transformers.models.bloom.modeling_bloom", "BloomBlock"):
        return _parts_of_bloom(layer)
    return _parts_of_fused(layer) if hasattr(layer, "kept") else None


def _parts_of_fused(layer: Any) -> LayerParts | None:
    """Read one that fused_layers has fused whole, which it marks with `kept`."""
    attention, mlp = layer.self_attn, layer.mlp
    if not (isinstance(getattr(mlp, "activation", None), int) and hasattr(mlp, "gate_up_proj")):
        return None
    told = attention.told
    others = [value for name, value in told.items() if name not in TOLD]
    if not all(value is None or (isinstance(value, int | float) and not value) for value in others):
        return None  # dropout is 0
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None for norm in norms):
        sizes = [getattr(getattr(norm, "weight", None), "shape", None) for norm in norms]
        if sizes != [(attention.head_dim,)] * 2 or not all(map(_is_kernel, norms)):
            return None
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    if not all(isinstance(linear.forward, PackedProduct) for linear in linears):
        return None
    products = tuple(linear.forward for linear in linears)
    of_query = products[1].inputs
    return LayerParts(
        attention,
        of_query // attention.head_dim,
        Layer(
            *map(_norm_of, (layer.input_layernorm, layer.post_attention_layernorm, *norms)),
            *map(_linear_of, products),
            head_step=attention.head_dim,
            key_at=of_query,
            value_at=(products[0].outputs + of_query) // 2,
            activation=mlp.activation,
            window=min(told.get("sliding_window") or 0, 2**31 - 1),
            scaling=told["scaling"],
            softcap=told.get("softcap") or 0.0,
        ),
        products,
    )


def _parts_of_opt(layer: Any) -> LayerParts | None:
    """Read one with norms before attention and MLP: those of the 350m come behind them."""
    attention = layer.self_attn
    separate = [attention.q_proj, attention.k_proj, attention.v_proj]
    linears = (*separate, attention.out_proj, layer.fc1, layer.fc2)
    norms = (layer.self_attn_layer_norm, layer.final_layer_norm)
    is_known = layer.do_layer_norm_before and type(layer.activation_fn) is nn.ReLU
    if not (is_known and _are_kernels(linears, norms)):
        return None
    qkv = _joined(separate)
    if qkv is None:
        return None
    return _plain_parts(
        attention,
        norms,
        (qkv, *(linear.forward for linear in linears[3:])),
        head_step=attention.head_dim,
        key_at=attention.embed_dim,
        activation=RELU,
        scaling=attention.scaling,
    )


def _parts_of_bloom(layer: Any) -> LayerParts | None:
    attention, mlp = layer.self_attention, layer.mlp
    linears = (attention.query_key_value, attention.dense, mlp.dense_h_to_4h, mlp.dense_4h_to_h)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    is_cut = any(part.pretraining_tp > 1 and part.slow_but_exact for part in (attention, mlp))
    is_known = not layer.apply_residual_connection_post_layernorm and not is_cut
    if not (is_known and _are_kernels(linears, norms)):
        return None
    parts = _plain_parts(
        attention,
        norms,
        tuple(linear.forward for linear in linears),
        head_step=3 * attention.head_dim,  # each head's query, key and value follow each other
        key_at=attention.head_dim,
        activation=GELU_TANH,
        scaling=attention.inv_norm_factor,
    )
    return replace(parts, gives_tuple=True)


def _plain_parts(
    attention: Any,
    norms: tuple[Any, ...],
    products: tuple[PackedProduct, ...],
    *,
    head_step: int,
    key_at: int,
    activation: int,
    scaling: float,
) -> LayerParts:
    """Put a layer without rotary positions together; values begin twice as far as keys."""
    layer = Layer(
        *map(_layer_norm_of, norms),
        *(Norm(), Norm()),
        *map(_linear_of, products),
        head_step=head_step,
        key_at=key_at,
        value_at=2 * key_at,
        activation=activation,
        scaling=scaling,
    )
    return LayerParts(attention, attention.num_heads, layer, products, turns=False)


def _are_kernels(linears: tuple[Any, ...], norms: tuple[Any, ...]) -> bool:
    """Tell whether linear layers are products of ours, and LayerNorms such as the kernel does."""
    return all(isinstance(linear.forward, PackedProduct) for linear in linears) and all(
        isinstance(norm, nn.LayerNorm)
        and norm.weight is not None
        and norm.bias is not None
        and norm.weight.dtype == norm.bias.dtype == torch.bfloat16
        and norm.weight.dim() == 1
        for norm in norms
    )


def _joined(linears: list[Any]) -> PackedProduct | None:
    """Return the product of several layers side by side, of which theirs become parts."""
    products: list[PackedProduct] = [linear.forward for linear in linears]
    biases = [product.bias for product in products if product.bias is not None]
    if any(product.outputs % PANEL for product in products):
        return None
    if len(biases) not in (0, len(products)):
        return None
    packed = torch.cat([product.packed for product in products])
    bias = torch.cat(biases) if biases else None
    first = 0
    for linear, product in zip(linears, products, strict=True):
        part = slice(first, first + product.outputs)
        own = None if bias is None else bias[part]
        linear.forward = replace(product, packed=packed[part], bias=own)
        first = part.stop
    return replace(products[0], packed=packed, bias=bias, outputs=first)


def _is_kernel(norm: Any) -> bool:
    return isinstance(norm.forward, partial)


def _norm_of(module: Any) -> Norm:
    if module is None:
        return Norm()
    how = module.forward.keywords
    assert how["weight"].is_contiguous() and how["weight"].dtype == torch.bfloat16
    return Norm(how["weight"].data_ptr(), None, how["eps"], how["offset"])


def _layer_norm_of(module: Any) -> Norm:
    assert module.weight.is_contiguous() and module.bias.is_contiguous()
    return Norm(module.weight.data_ptr(), module.bias.data_ptr(), module.eps, 0.0)


def _linear_of(product: PackedProduct) -> Linear:
    bias = None if product.bias is None else product.bias.data_ptr()
    return Linear(product.packed.data_ptr(), bias, product.inputs, product.outputs)

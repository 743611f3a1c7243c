"""Describes a layer as the C struct that `whole_layers.cpp` expects."""

from __future__ import annotations

import ctypes

import torch

from fminfer.compute import spec
from fminfer.compute.layers.bodies import GATES, PLAIN
from fminfer.compute.linear.product_kernel import TYPES, PackedProduct
from fminfer.models.layer import LayerOf
from fminfer.models.tensor_specs import Weights

NO_WINDOW = 2**31 - 1
Tensors = dict[str, torch.Tensor]


class NormStruct(ctypes.Structure):
    """x / sqrt(mean(x²) + eps) * (weight + offset), or a LayerNorm if it has a bias.

    Without a weight none.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_float) for name in ("eps", "offset")],
    )


class LinearStruct(ctypes.Structure):
    """A PackedProduct."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_int64) for name in ("inputs", "outputs", "weight_type")],
    )


class LayerStruct(ctypes.Structure):
    """A layer; whole_layers.cpp says what each field is."""

    _fields_ = (
        *[(name, NormStruct) for name in ("first", "second", "of_query", "of_key")],
        *[(name, LinearStruct) for name in ("qkv", "out", "up", "down")],
        *[(name, ctypes.c_void_p) for name in ("keys", "values", "slopes")],
        *[(name, ctypes.c_int64) for name in ("head_step", "key_at", "value_at")],
        *[(name, ctypes.c_int64) for name in ("activation", "window")],
        *[(name, ctypes.c_float) for name in ("scaling", "softcap")],
    )


class Spent(ctypes.Structure):
    """Seconds that layers took, for those who profile them."""

    _fields_ = (("products", ctypes.c_double), ("attention", ctypes.c_double))


def tensors_of_norms(weights: Weights) -> Tensors:
    """Return those that a struct points to; who calls the library keeps them."""
    norms = {n: each for n, each in weights.items() if each.spec.use in ("norm", "norm_bias")}
    return {name: each.plain.contiguous() for name, each in norms.items()}


def describe_layer(parts: LayerOf, tensors: Tensors, dtype: torch.dtype) -> LayerStruct:
    """Describe a layer that is served, all but its cache.

    Args:
        tensors: those of its norms.
        dtype: of hidden states and norms.
    """
    how, attention, mlp = parts.how, parts.how.attention, parts.how.mlp
    products = {name: _linear(product) for name, product in parts.products.items()}
    of_query, of_key, _ = attention.qkv_sizes
    assert products["qkv"].outputs == sum(attention.qkv_sizes), "queries, keys and values"
    activation = 0
    if isinstance(mlp, spec.Mlp):
        assert products["up"].outputs == mlp.up_size and products["down"].inputs == mlp.size
        activation = (GATES if mlp.is_gated else PLAIN)[mlp.activation]
    slopes = parts.attention.scoring.slopes
    if slopes is not None:
        assert slopes.shape == (attention.heads,) and slopes.dtype == torch.float32, "slopes"
        assert slopes.is_contiguous(), "slopes"
    return LayerStruct(
        _norm(how.before[0], tensors, "before_attention", dtype),
        _norm(how.before[1], tensors, "before_mlp", dtype),
        _norm(attention.qk_norm, tensors, "q_norm", dtype),
        _norm(attention.qk_norm, tensors, "k_norm", dtype),
        **products,
        slopes=None if slopes is None else slopes.data_ptr(),
        head_step=attention.head_dim,
        key_at=of_query,
        value_at=of_query + of_key,
        activation=activation,
        window=min(attention.window or 0, NO_WINDOW),
        scaling=attention.scaling,
        softcap=attention.softcap or 0.0,
    )


def _norm(how: spec.Norm | None, tensors: Tensors, name: str, dtype: torch.dtype) -> NormStruct:
    if how is None:
        return NormStruct()
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    assert weight.dtype == dtype, "a norm of the hidden states' type"
    return NormStruct(
        weight.data_ptr(), None if bias is None else bias.data_ptr(), how.eps, how.offset
    )


def _linear(product: object) -> LinearStruct:
    assert isinstance(product, PackedProduct), "a product of ours"
    bias = None if product.bias is None else product.bias.data_ptr()
    packed = product.packed
    return LinearStruct(
        packed.data_ptr(), bias, product.inputs, product.outputs, TYPES[packed.dtype]
    )

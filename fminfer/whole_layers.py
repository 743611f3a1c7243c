"""Computes whole layers of transformers in one call each, in bfloat16 on the CPU.

What `fused_layers` and `packed_linear` made of a layer is called from Python part by part, which
for few tokens takes as long as some of the parts. Where each part is a kernel of ours, one call
does the same, to the last bit. It knows no family by name.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fminfer.attention import PagedAttention
from fminfer.kernel_attention import Arguments, KernelRows, step_arguments
from fminfer.product_kernel import PackedProduct

TOLD = {"scaling", "sliding_window", "softcap"}  # that the kernel can obey


class Norm(ctypes.Structure):
    """x / sqrt(mean(x²) + eps) * (weight + offset); without a weight none."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("offset", ctypes.c_float))


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
        *[(name, Linear) for name in ("qkv", "out", "gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in ("keys", "values")],
        *[(name, ctypes.c_int64) for name in ("activation", "window")],
        *[(name, ctypes.c_float) for name in ("scaling", "softcap")],
    )


class Spent(ctypes.Structure):
    """Seconds that layers took, for those who profile them."""

    _fields_ = (("products", ctypes.c_double), ("attention", ctypes.c_double))


def _nothing() -> torch.Tensor:
    return torch.empty(0, device="cpu")


@dataclass(slots=True)
class StepCall:
    """What the layers of a model have in common: the step that is computed."""

    rows: KernelRows | None = None
    turn: tuple[torch.Tensor, torch.Tensor] | None = None
    arguments: Arguments = field(default_factory=Arguments)
    cos: torch.Tensor = field(default_factory=_nothing)  # (1, tokens, turned) float32
    sin: torch.Tensor = field(default_factory=_nothing)
    spent: Spent | None = None
    # What a layer works in. Memory that one has used is near, and a free one is given back.
    space: torch.Tensor = field(default_factory=_nothing)  # bfloat16

    def take_space(self, size: int) -> torch.Tensor:
        """Return memory for so many numbers; the next call may return the same."""
        if len(self.space) < size:
            self.space = _nothing()  # not both at once
            self.space = torch.empty(size, dtype=torch.bfloat16, device="cpu")
        return self.space

    def see(
        self,
        rows: KernelRows,
        turn: tuple[torch.Tensor, torch.Tensor],
        heads: int,
        keys: torch.Tensor,
    ) -> None:
        """Make ready for a layer of a step, mostly the one that was seen last."""
        if rows is not self.rows or heads != self.arguments.heads:
            self.arguments, self.rows = step_arguments(rows, heads, keys), rows
        if turn is not self.turn:
            self.cos, self.sin = (part.float().contiguous() for part in turn)
            turned = self.cos.shape[-1]
            assert self.sin.shape == self.cos.shape, "cos and sin"
            assert turned % 2 == 0 and turned <= keys.shape[-1], "cos and sin"
            self.turn = turn


class WholeLayer:
    """A layer's forward, as one call of the library.

    Args:
        layer: one that `is_whole`.
        step: what it shares with the model's other layers.
    """

    def __init__(self, layer: Any, library: ctypes.CDLL, step: StepCall) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.step, self.attention, self.plain = step, attention, layer.forward
        self._run = library.fminfer_layer
        self._cache: PagedAttention | None = None
        self._heads = attention.o_proj.in_features // attention.head_dim
        told = attention.told
        self.layer = Layer(
            _norm_of(layer.input_layernorm),
            _norm_of(layer.post_attention_layernorm),
            _norm_of(getattr(attention, "q_norm", None)),
            _norm_of(getattr(attention, "k_norm", None)),
            *map(_linear_of, (attention.qkv_proj, attention.o_proj)),
            *map(_linear_of, (mlp.gate_up_proj, mlp.down_proj)),
            None,
            None,
            mlp.activation,
            min(told.get("sliding_window") or 0, 2**31 - 1),
            told["scaling"],
            told.get("softcap") or 0.0,
        )
        self._space = library.fminfer_layer_space(ctypes.byref(self.layer))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return (1, tokens that are kept, hidden) of (1, tokens, hidden).

        Raises:
            MemoryError, RuntimeError: there was none (`memory.is_out_of_memory`).
        """
        cache: PagedAttention = self.attention.paged_attention
        rows, x, step = cache.plan, hidden_states, self.step
        if not isinstance(rows, KernelRows) or x.dtype != torch.bfloat16:
            plain: torch.Tensor = self.plain(x, position_embeddings=position_embeddings, **kwargs)
            return plain
        if cache is not self._cache:
            self._use(cache)
        step.see(rows, position_embeddings, self._heads, cache.keys)
        tokens, width = x.shape[1:]
        kept = rows.kept
        x = x.contiguous()
        # The kernel trusts what it is given.
        assert len(rows.slots) == tokens == step.cos.shape[1] and width == self.layer.qkv.inputs
        num_kept = tokens if kept is None else len(kept)
        out = x.new_empty((1, num_kept, width))
        failed = self._run(
            self.layer,
            step.arguments,
            step.cos.data_ptr(),
            step.sin.data_ptr(),
            step.cos.shape[-1],
            None if kept is None else kept.data_ptr(),
            num_kept,
            x.data_ptr(),
            out.data_ptr(),
            step.take_space(self._space * tokens).data_ptr(),
            step.spent,
        )
        if failed:
            step.space = _nothing()  # for the halves of the step
            raise MemoryError("no memory for the attention kernel's working space")
        return out

    def _use(self, cache: PagedAttention) -> None:
        """Take a cache, if it is of the layer's shape: the kernel trusts what it is given."""
        layer, (_, kv_heads, _, head_dim) = self.layer, cache.keys.shape
        assert cache.keys.dtype == torch.bfloat16 and self._heads % kv_heads == 0, "a cache"
        assert layer.out.inputs == self._heads * head_dim, "outputs of attention"
        assert layer.qkv.outputs == (self._heads + 2 * kv_heads) * head_dim, "keys of a step"
        assert layer.gate_up.outputs == 2 * layer.down.inputs, "halves"
        widths = (layer.qkv.inputs, layer.gate_up.inputs, layer.out.outputs, layer.down.outputs)
        assert len(set(widths)) == 1, "hidden states"
        self.layer.keys, self.layer.values = cache.keys.data_ptr(), cache.values.data_ptr()
        self._cache = cache


def join_layers(model: nn.Module, library: ctypes.CDLL) -> int:
    """Replace the forward of each layer that can be, in place; return how many."""
    if not library.fminfer_has_layers():
        return 0
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.fminfer_layer.argtypes = [
        *(ctypes.POINTER(Layer), ctypes.POINTER(Arguments)),
        *(pointer, pointer, number, pointer, number, pointer, pointer, pointer),
        ctypes.POINTER(Spent),
    ]
    library.fminfer_layer_space.argtypes = [ctypes.POINTER(Layer)]
    library.fminfer_layer_space.restype = ctypes.c_int64
    step = StepCall()
    layers: list[Any] = [module for module in model.modules() if is_whole(module)]
    for layer in layers:
        layer.forward = WholeLayer(layer, library, step)
    return len(layers)


def is_whole(layer: Any) -> bool:
    """Tell whether each part of a layer is a kernel that can be called without Python."""
    if not hasattr(layer, "kept"):  # by which fused_layers marks what it has fused whole
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if not (isinstance(getattr(mlp, "activation", None), int) and hasattr(mlp, "gate_up_proj")):
        return False
    others = [value for name, value in attention.told.items() if name not in TOLD]
    if not all(value is None or (isinstance(value, int | float) and not value) for value in others):
        return False  # dropout is 0
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None for norm in norms):
        sizes = [getattr(getattr(norm, "weight", None), "shape", None) for norm in norms]
        if sizes != [(attention.head_dim,)] * 2 or not all(map(_is_kernel, norms)):
            return False
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return all(isinstance(linear.forward, PackedProduct) for linear in linears)


def _is_kernel(norm: Any) -> bool:
    return isinstance(norm.forward, partial)


def _norm_of(module: Any) -> Norm:
    if module is None:
        return Norm(None, 0.0, 0.0)
    how = module.forward.keywords
    assert how["weight"].is_contiguous() and how["weight"].dtype == torch.bfloat16
    return Norm(how["weight"].data_ptr(), how["eps"], how["offset"])


def _linear_of(module: Any) -> Linear:
    product: PackedProduct = module.forward
    bias = None if product.bias is None else product.bias.data_ptr()
    return Linear(product.packed.data_ptr(), bias, product.inputs, product.outputs)

"""Computes whole layers of transformers in one call each, in bfloat16 on the CPU.

What `fused_layers` and `packed_linear` made of a layer is called from Python part by part, which
for few tokens takes as long as some of the parts. Where each part is a kernel of ours, one call
does the same, to the last bit where LayerNorms and the scale of queries are rounded alike. What a
layer is made of it learns from `layer_parts`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fminfer.attention import PagedAttention
from fminfer.kernel_attention import Arguments, KernelRows, step_arguments
from fminfer.layer_parts import Layer, LayerParts, parts_of


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
    # (1, tokens, turned) float32; turned is 0 where there are no rotary positions.
    cos: torch.Tensor = field(default_factory=lambda: _nothing().view(1, 0, 0))
    sin: torch.Tensor = field(default_factory=lambda: _nothing().view(1, 0, 0))
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
        turn: tuple[torch.Tensor, torch.Tensor] | None,
        heads: int,
        keys: torch.Tensor,
    ) -> None:
        """Make ready for a layer of a step, mostly the one that was seen last."""
        if rows is not self.rows or heads != self.arguments.heads:
            self.arguments, self.rows = step_arguments(rows, heads, keys), rows
        if turn is not None and turn is not self.turn:
            self.cos, self.sin = (part.float().contiguous() for part in turn)
            turned = self.cos.shape[-1]
            assert self.sin.shape == self.cos.shape, "cos and sin"
            assert turned % 2 == 0 and turned <= keys.shape[-1], "cos and sin"
            self.turn = turn


class WholeLayer:
    """A layer's forward, as one call of the library.

    Args:
        plain: its own.
        step: what it shares with the model's other layers.
    """

    def __init__(self, parts: LayerParts, plain: Any, library: ctypes.CDLL, step: StepCall) -> None:
        self.parts, self.plain, self.step = parts, plain, step
        self._run = library.fminfer_layer
        self._cache: PagedAttention | None = None
        self._slopes: torch.Tensor | None = None  # (heads,) float32
        self._space = library.fminfer_layer_space(ctypes.byref(parts.layer))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return (1, tokens that are kept, hidden) of (1, tokens, hidden), as the layer does.

        Raises:
            MemoryError, RuntimeError: there was none (`memory.is_out_of_memory`).
        """
        parts, step = self.parts, self.step
        cache: PagedAttention = parts.attention.paged_attention
        rows, x = cache.plan, hidden_states
        if not isinstance(rows, KernelRows) or x.dtype != torch.bfloat16:
            if position_embeddings is not None:
                kwargs["position_embeddings"] = position_embeddings
            return self.plain(x, **kwargs)
        if cache is not self._cache:
            self._use(cache)
        turn = position_embeddings if parts.turns else None
        step.see(rows, turn, parts.heads, cache.keys)
        tokens, width = x.shape[1:]
        kept = rows.kept
        x = x.contiguous()
        # The kernel trusts what it is given.
        assert len(rows.slots) == tokens and width == parts.layer.qkv.inputs
        assert (turn is not None) == parts.turns
        assert step.cos.shape[1] == (tokens if parts.turns else 0), "cos and sin"
        num_kept = tokens if kept is None else len(kept)
        out = x.new_empty((1, num_kept, width))
        failed = self._run(
            parts.layer,
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
        return (out, None) if parts.gives_tuple else out

    def _use(self, cache: PagedAttention) -> None:
        """Take a cache, if it is of the layer's shape: the kernel trusts what it is given."""
        layer, heads = self.parts.layer, self.parts.heads
        _, kv_heads, _, head_dim = cache.keys.shape
        assert cache.keys.dtype == torch.bfloat16 and heads % kv_heads == 0, "a cache"
        assert layer.out.inputs == heads * head_dim, "outputs of attention"
        assert layer.qkv.outputs == (heads + 2 * kv_heads) * head_dim, "keys of a step"
        assert layer.up.outputs in (layer.down.inputs, 2 * layer.down.inputs), "halves"
        widths = (layer.qkv.inputs, layer.up.inputs, layer.out.outputs, layer.down.outputs)
        assert len(set(widths)) == 1, "hidden states"
        last = layer.value_at + (kv_heads - 1) * layer.head_step + head_dim
        assert last == layer.qkv.outputs, "values of a step"
        assert layer.head_step == head_dim or not self.parts.turns, "heads"
        slopes = getattr(self.parts.attention, "alibi_slopes", None)
        if slopes is not None:
            assert slopes.shape == (heads,), "slopes"
            self._slopes = slopes.float().contiguous()
            layer.slopes = self._slopes.data_ptr()
        layer.keys, layer.values = cache.keys.data_ptr(), cache.values.data_ptr()
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
    step, num_joined = StepCall(), 0
    layers: list[Any] = list(model.modules())
    for layer in layers:
        parts = parts_of(layer)
        if parts is not None:
            layer.forward = WholeLayer(parts, layer.forward, library, step)
            layer.kept = None  # the tokens whose output is wanted; None: all (pipeline.stage)
            num_joined += 1
    return num_joined

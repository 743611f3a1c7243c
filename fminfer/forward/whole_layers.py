"""Computes whole layers in one call of the library each, in float32 or bfloat16 on the CPU.

Calls from Python take as long as some parts of a layer of few tokens. Where each part
is a kernel of ours, one call does the same, to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from fminfer.compute.attention.kernel_attention import (
    CpuAttention,
    KernelRows,
    make_step_arguments,
)
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.kernels.library_calls import Arguments
from fminfer.compute.layers.bodies import activations_of
from fminfer.compute.layers.experts import Workspace
from fminfer.compute.layers.products import PackedProduct
from fminfer.compute.shards import SharedMemoryGroup, raise_group_failure
from fminfer.compute.trial import Candidate, Limits, Pair, Trial
from fminfer.compute.values.spec import Layer, Mlp, Moe, Norm
from fminfer.compute.values.step import Rows
from fminfer.forward.layer import TransformerLayer
from fminfer.forward.layer_step import LayerStep
from fminfer.forward.registry import Registry

NO_WINDOW = 2**31 - 1
Tensors = dict[str, torch.Tensor]


class NormStruct(ctypes.Structure):
    """An RMSNorm, or a LayerNorm if it has a bias; without a weight none."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_float) for name in ("eps", "offset")],
    )


class LinearStruct(ctypes.Structure):
    """A PackedProduct."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("parts", "bias")],
        *[(name, ctypes.c_int64) for name in ("num_parts", "inputs", "outputs")],
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


def describe_layer(parts: TransformerLayer, dtype: torch.dtype) -> LayerStruct:
    """Describe a layer that is served, all but its cache."""
    spec = parts.spec
    attention = parts.spec.attention
    mlp = parts.spec.mlp
    products = {
        name: _describe_linear(product) for name, product in parts.products.items()
    }
    of_query, of_key, _ = attention.qkv_sizes
    assert products["qkv"].outputs == sum(attention.qkv_sizes), (
        "queries, keys and values"
    )
    activation = 0
    if isinstance(mlp, Mlp):
        assert (
            products["up"].outputs == mlp.up_size
            and products["down"].inputs == mlp.size
        )
        activation = activations_of(mlp)[mlp.activation]
    slopes = parts.attention.scoring.slopes
    if slopes is not None:
        assert slopes.shape == (attention.heads,) and slopes.dtype == torch.float32, (
            "slopes"
        )
        assert slopes.is_contiguous(), "slopes"
    norms = {
        "before_attention": spec.input_norms[0],
        "before_mlp": spec.input_norms[1],
        "q_norm": attention.qk_norm,
        "k_norm": attention.qk_norm,
    }
    return LayerStruct(
        *[
            _describe_norm(each, parts.norm_weights, name, dtype)
            for name, each in norms.items()
        ],
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


def _describe_norm(
    spec: Norm | None, weights: Tensors, name: str, dtype: torch.dtype
) -> NormStruct:
    if spec is None:
        return NormStruct()
    weight = weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias")
    assert weight.dtype == dtype, "a norm of the hidden states' type"
    address = None if bias is None else bias.data_ptr()
    return NormStruct(weight.data_ptr(), address, spec.eps, spec.offset)


def _describe_linear(product: object) -> LinearStruct:
    assert isinstance(product, PackedProduct), "a product of ours"
    bias = None if product.bias is None else product.bias.data_ptr()
    parts = ctypes.addressof(product.calls)  # the layer keeps its products
    return LinearStruct(
        parts, bias, len(product.calls), product.inputs, product.outputs
    )


# Of the largest number that the parts give.
MAX_ERROR: Limits = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def can_join(spec: Layer) -> bool:
    """Return whether the library computes such a layer, or all of it but experts."""
    attention = spec.attention
    mlp = spec.mlp
    rope = attention.rope
    of_head = attention.qk_norm
    if isinstance(mlp, Mlp) and (
        mlp.limit is not None or mlp.activation not in activations_of(mlp)
    ):
        return False
    is_other_order = (
        any(spec.output_norms)
        or any(spec.sum_norms)
        or spec.is_parallel
        or spec.adds_normed
    )
    has_more = (
        attention.clip
        or attention.has_cached_bias
        or attention.has_sinks
        or attention.latent
    )
    if is_other_order or has_more or attention.relative or spec.cross:
        return False
    # Only what has rotary positions is copied, and normed on the way.
    is_head_normed = of_head is None or (
        (rope is not None and attention.qk_norm_over == "head")
        and (
            _can_join_norm(of_head) and of_head.is_rms and not attention.qk_norm_is_last
        )
    )
    return (
        (is_head_normed and all(map(_can_join_norm, spec.input_norms)))
        and (attention.is_causal and spec.residual_scale == 1.0)
        and not (rope and rope.is_interleaved)
    )


def _can_join_norm(spec: Norm | None) -> bool:
    """Return it for a norm: the library knows a LayerNorm by its bias; it has no offset."""
    if spec is None or not spec.has_weight or spec.has_bias == spec.is_rms:
        return False
    return spec.is_rms or not spec.offset


@dataclass(slots=True)
class StepCall:
    """What the layers of a model have in common: the step that is computed."""

    rows: KernelRows | None = None
    arguments: Arguments = field(default_factory=Arguments)
    spent: Spent | None = None
    workspace: Workspace = field(default_factory=Workspace)

    def prepare(
        self, rows: KernelRows, heads: int, keys: torch.Tensor, kind: torch.dtype
    ) -> None:
        """Prepare the arguments for a layer of a step, mostly those of the last layer."""
        if rows is not self.rows or heads != self.arguments.heads:
            self.arguments = make_step_arguments(rows, heads, keys, kind)
            self.rows = rows


class WholeLayer(TransformerLayer):
    """A layer that is one call of the library where that can be, and otherwise its parts.

    With experts the call ends before them: which ones a token has is chosen between.
    """

    def __init__(
        self,
        parts: TransformerLayer,
        library: ctypes.CDLL,
        step: StepCall,
        dtype: torch.dtype,
    ) -> None:
        self._parts = parts
        self.step = step
        self._dtype = dtype
        self.spec = parts.spec
        self.attention = parts.attention
        self.mlp = parts.mlp
        self.products = parts.products
        self.layer = describe_layer(parts, dtype)
        self._run = library.fminfer_layer
        self._space = library.fminfer_layer_space(ctypes.byref(self.layer))
        self._cache: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, more: torch.Tensor | None, number: int, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute what the parts do; MemoryError, RuntimeError: there was no memory."""
        (keys, values) = step.attend.layers[number]
        rows = step.attend.layout_of(number)
        shards = step.shards
        is_served = shards is None or isinstance(shards, SharedMemoryGroup)
        if not (isinstance(rows, KernelRows) and is_served):
            return self._parts(x, more, number, step)
        assert x.dtype == self._dtype, "hidden states"
        x = (x if more is None else x + more).contiguous()
        attention = self.spec.attention
        spec = self.layer
        if keys is not self._cache:  # the kernel trusts what it is given
            assert (keys.shape[1], keys.shape[3]) == attention.cache_shape[1:], (
                "keys of a step"
            )
            spec.keys = keys.data_ptr()
            spec.values = values.data_ptr()
            self._cache = keys
        self.step.prepare(rows, attention.heads, keys, self._dtype)
        tokens, width = x.shape
        kept = step.kept
        rotations = self._find_rotations(step, tokens)
        cos, sin = (
            (None, None)
            if rotations is None
            else (rotations[0].data_ptr(), rotations[1].data_ptr())
        )
        # The kernel trusts what it is given.
        assert len(rows.slots) == tokens and width == spec.qkv.inputs
        num_kept = tokens if kept is None else len(kept)
        # an empty tensor lies nowhere, which means all
        assert num_kept > 0, "tokens to keep"
        out = x.new_empty((num_kept, width))
        normed = torch.empty_like(out) if isinstance(self.spec.mlp, Moe) else None
        failed = self._run(
            spec,
            self.step.arguments,
            cos,
            sin,
            0 if rotations is None else 2 * rotations.shape[-1],
            None if kept is None else kept.data_ptr(),
            num_kept,
            x.data_ptr(),
            out.data_ptr(),
            None if normed is None else normed.data_ptr(),
            self.step.workspace.allocate(self._space * tokens * x.itemsize).data_ptr(),
            shards.address if isinstance(shards, SharedMemoryGroup) else None,
            self.step.spent,
        )
        if failed == 1:
            self.step.workspace.free()  # for the halves of the step
            raise MemoryError("no memory for a layer's working space")
        raise_group_failure(failed)
        return out, None if normed is None else step.sum(self.mlp(normed, step))

    def _find_rotations(self, step: LayerStep, tokens: int) -> torch.Tensor | None:
        """Return cosines and sines, (2, tokens, half) float32; None: no rotary positions."""
        rotations = self.attention.find_rotations(step)
        if rotations is None:
            return None
        half = rotations.shape[-1]
        assert rotations.shape == (2, tokens, half) and rotations.dtype == torch.float32
        assert 2 * half <= self.spec.attention.head_dim, "cos and sin"
        return rotations.contiguous()


class WholeLayers:
    """Makes layers of one call, where spec and products allow it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._dtype = registry.dtype
        self._step = StepCall()
        self._candidates: list[Candidate[TransformerLayer, TransformerLayer]] = []
        if registry.library is None:
            return
        self._library = library = registry.library
        self._candidates.append(
            Candidate(self._build_whole_layer, self._make_trial, self._can_join)
        )
        pointer = ctypes.c_void_p
        number = ctypes.c_int64
        library.fminfer_layer.argtypes = [
            ctypes.POINTER(LayerStruct),
            ctypes.POINTER(Arguments),
            pointer,
            pointer,
            number,
            pointer,
            number,
            *[pointer] * 5,
            ctypes.POINTER(Spent),
        ]
        library.fminfer_layer_space.argtypes = [ctypes.POINTER(LayerStruct)]
        library.fminfer_layer_space.restype = ctypes.c_int64

    def join_layer(self, parts: TransformerLayer) -> TransformerLayer:
        """Return the layer as one call, or as it is."""
        return self._registry.find(self._candidates, parts) or parts

    def _can_join(self, parts: TransformerLayer) -> bool:
        is_packed = all(
            isinstance(each, PackedProduct) for each in parts.products.values()
        )
        return (
            is_packed
            and self._registry.parts.kernels is not None
            and can_join(parts.spec)
        )

    def _build_whole_layer(self, parts: TransformerLayer) -> TransformerLayer:
        return WholeLayer(parts, self._library, self._step, self._dtype)

    def _make_trial(self, parts: TransformerLayer) -> Trial[TransformerLayer]:
        pairs = partial(self._compute_pairs, parts=parts)
        return Trial("whole layers", pairs, MAX_ERROR[self._dtype], parts.spec)

    def _compute_pairs(
        self, whole: TransformerLayer, parts: TransformerLayer
    ) -> Iterator[Pair]:
        """Compute a few tokens of two rows with a layer in one call, and part by part."""
        qkv = parts.products["qkv"]
        assert isinstance(qkv, PackedProduct), "a layer that is served"
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, qkv.inputs, generator=generator).to(self._dtype)
        steps = (
            ([0, 1, 2, 0, 1], Rows.from_tables((0, 3, [0]), (0, 2, [1]))),
            ([3, 2], Rows.from_tables((3, 1, [0]), (2, 1, [1]))),
        )
        outs = []
        for layer in (whole, parts):
            cache = KvCache(
                [parts.spec.attention],
                num_blocks=2,
                block_size=16,
                dtype=self._dtype,
                device=torch.device("cpu"),
                kernel=CpuAttention(self._library),
            )
            for positions, rows in steps:
                step = LayerStep(torch.tensor(positions), cache.make_attention(rows))
                out, more = layer(x[: len(positions)], None, 0, step)
                outs.append(out if more is None else out + more)
        yield from zip(outs[:2], outs[2:], strict=True)

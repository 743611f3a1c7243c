"""Calls the compiled norms, rotary positions and gated activations of the CPU.

Each is a function of tensors, computed in float32 and rounded once.
"""

from __future__ import annotations

import ctypes

import torch

from fminfer.compute.spec import Mlp, Norm

TYPES = {torch.float32: 0, torch.bfloat16: 1}
SILU, GELU_TANH, RELU, GELU = 0, 1, 2, 3
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
GATES = {"silu": SILU, "swish": SILU} | dict.fromkeys(TANH_GELUS, GELU_TANH)  # of all kernels


class RowSizes(ctypes.Structure):
    """What a kernel is called with; layers.cpp says what each is."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("outer", "inner", "width")],
        *[(name, ctypes.c_int64) for name in ("outer_step", "inner_step")],
        *[(name, ctypes.c_int64) for name in ("type", "num_threads")],
    )


class LayerKernels:
    """The kernels of one built library."""

    device = torch.device("cpu")
    types = frozenset(TYPES)
    activations = GATES | {"gelu": GELU}

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_float
        rows = ctypes.POINTER(RowSizes)
        self._rms_norm, self._layer_norm = library.fminfer_rms_norm, library.fminfer_layer_norm
        self._rotate, self._gate = library.fminfer_rotate, library.fminfer_gate
        self._rms_norm.argtypes = [rows, address, number, number, address, address]
        self._layer_norm.argtypes = [rows, address, address, number, address, address]
        self._rotate.argtypes = [rows, address, address, ctypes.c_int64]
        self._gate.argtypes = [rows, address, ctypes.c_int64]

    def can_norm(self, how: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
        """Tell whether it computes such a norm: RMSNorms, and LayerNorms with weight and bias."""
        has_both = how.has_bias != how.is_rms and not (how.offset and not how.is_rms)
        return how.has_weight and has_both and weight is not None and weight.dim() == 1

    def norm(
        self, x: torch.Tensor, how: Norm, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x normed, as `compute.layers.plain.norm` gives it.

        Args:
            x: (rows, width) or (rows, more rows, width).
            weight, bias: (width,), of a norm that it can.
        """
        rows, out = _plan(x[None])
        self._run_norm(rows, how, weight, bias, None, None)
        return out[0]

    def add_and_norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        how: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + other and that normed; all are (rows, width)."""
        other = other.contiguous()
        assert x.shape == other.shape and x.dtype == other.dtype, "terms of a sum"
        rows, out = _plan(x[None])
        both = torch.empty_like(out)
        self._run_norm(rows, how, weight, bias, other.data_ptr(), both.data_ptr())
        return both[0], out[0]

    def _run_norm(
        self,
        rows: RowSizes,
        how: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        other: int | None,
        both: int | None,
    ) -> None:
        assert weight.is_contiguous() and weight.shape == (rows.width,), "weight of a norm"
        assert TYPES[weight.dtype] == rows.type, "weight of a norm"
        if how.is_rms:
            self._rms_norm(rows, weight.data_ptr(), how.eps, how.offset, other, both)
            return
        assert bias is not None and bias.is_contiguous() and bias.shape == weight.shape
        assert bias.dtype == weight.dtype, "bias of a norm"
        self._layer_norm(rows, weight.data_ptr(), bias.data_ptr(), how.eps, other, both)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return x with rotary positions (Su et al. 2021), its first half paired with its second.

        Args:
            x: (tokens, heads, head_dim).
            cos, sin: (tokens, turned) float32, for the first `turned` elements of each head.
        """
        cos, sin = cos.contiguous(), sin.contiguous()
        assert cos.shape == sin.shape == (len(x), cos.shape[-1]), "cos and sin"
        assert cos.dtype == sin.dtype == torch.float32, "cos and sin"
        assert cos.shape[-1] % 2 == 0 and cos.shape[-1] <= x.shape[-1], "cos and sin"
        rows, out = _plan(x[None])
        self._rotate(rows, cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
        return out[0]

    def gate(self, both: torch.Tensor, activation: int) -> torch.Tensor:
        """Return activation(first half) * second half, of (…, 2 * width)."""
        assert both.shape[-1] % 2 == 0, "halves"
        first, second = both.view(1, -1, both.shape[-1]).chunk(2, -1)
        rows, out = _plan(first)
        self._gate(rows, second.data_ptr(), activation)
        return out.view(*both.shape[:-1], -1)

    def gelu(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return gelu (Hendrycks and Gimpel 2016) in one of its forms, of (rows, width)."""
        rows, out = _plan(x[None])
        self._gate(rows, None, activation)
        return out[0]


def activations_of(mlp: Mlp) -> dict[str, int]:
    """Return the numbers of those that the library computes in an MLP."""
    return LayerKernels.activations | ({} if mlp.is_gated else {"relu": RELU})


def _plan(x: torch.Tensor) -> tuple[RowSizes, torch.Tensor]:
    """Return how to walk through a tensor, and an empty one of its shape, in one piece."""
    shape, steps = x.shape, x.stride()
    assert x.is_cpu and shape[0] == 1 and len(shape) in (3, 4), "rows of a step"
    assert steps[-1] == 1, "the elements of a row lie side by side"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    inner, inner_step = (shape[2], steps[2]) if len(shape) == 4 else (1, 0)
    sizes = (shape[1], inner, shape[-1], steps[1], inner_step)
    kind, num_threads = TYPES[x.dtype], torch.get_num_threads()
    return RowSizes(x.data_ptr(), out.data_ptr(), *sizes, kind, num_threads), out

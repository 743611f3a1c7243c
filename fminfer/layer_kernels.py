"""Calls the compiled norms, rotary positions and gated activations of the CPU.

Each is a function of tensors, computed in float32 and rounded once. It knows nothing of models.
"""

from __future__ import annotations

import ctypes

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1}
SILU, GELU_TANH, RELU = 0, 1, 2  # activations; the first two gate


class Rows(ctypes.Structure):
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

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_float
        rows = ctypes.POINTER(Rows)
        self._norm, self._rotate = library.fminfer_rms_norm, library.fminfer_rotate
        self._gate = library.fminfer_gate
        self._norm.argtypes = [rows, address, number, number, address, address]
        self._rotate.argtypes = [rows, address, address, ctypes.c_int64]
        self._gate.argtypes = [rows, address, ctypes.c_int64]

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) * (weight + offset) (Zhang and Sennrich 2019).

        Args:
            x: (1, rows, width) or (1, rows, more rows, width).
            weight: (width,).
        """
        weight = weight.contiguous()
        assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, "weight of a norm"
        rows, out = _plan(x)
        self._norm(rows, weight.data_ptr(), eps, offset, None, None)
        return out

    def add_and_norm(
        self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + other and its `rms_norm`; all are (1, rows, width)."""
        weight, other = weight.contiguous(), other.contiguous()
        assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, "weight of a norm"
        assert x.shape == other.shape and x.dtype == other.dtype, "terms of a sum"
        rows, out = _plan(x)
        both = torch.empty_like(out)
        self._norm(rows, weight.data_ptr(), eps, offset, other.data_ptr(), both.data_ptr())
        return both, out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return x with rotary positions (Su et al. 2021), its first half paired with its second.

        Args:
            x: (1, tokens, heads, head_dim).
            cos, sin: (1, tokens, turned), for the first `turned` elements of each head.
        """
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        assert cos.shape == sin.shape == (1, x.shape[1], cos.shape[-1]), "cos and sin"
        assert cos.shape[-1] % 2 == 0 and cos.shape[-1] <= x.shape[-1], "cos and sin"
        rows, out = _plan(x)
        self._rotate(rows, cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
        return out

    def gate(self, both: torch.Tensor, activation: int) -> torch.Tensor:
        """Return activation(first half) * second half, of (…, 2 * width)."""
        assert both.shape[-1] % 2 == 0, "halves"
        first, second = both.view(1, -1, both.shape[-1]).chunk(2, -1)
        rows, out = _plan(first)
        self._gate(rows, second.data_ptr(), activation)
        return out.view(*both.shape[:-1], -1)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu (Hendrycks and Gimpel 2016) in its form with tanh, of (1, …, width)."""
        rows, out = _plan(x)
        self._gate(rows, None, GELU_TANH)
        return out


def _plan(x: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Return how to walk through a tensor, and an empty one of its shape, in one piece."""
    shape, steps = x.shape, x.stride()
    assert x.is_cpu and shape[0] == 1 and len(shape) in (3, 4), "rows of a step"
    assert steps[-1] == 1, "the elements of a row lie side by side"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    inner, inner_step = (shape[2], steps[2]) if len(shape) == 4 else (1, 0)
    sizes = (shape[1], inner, shape[-1], steps[1], inner_step)
    kind, num_threads = TYPES[x.dtype], torch.get_num_threads()
    return Rows(x.data_ptr(), out.data_ptr(), *sizes, kind, num_threads), out

"""Calls the GPU's norms, rotary positions and gated activations, which are in Triton.

What `layer_kernels` does on the CPU: functions of tensors, each one pass over memory, computed in
float32 and rounded once. It knows nothing of models. Importing it needs triton.
"""

from __future__ import annotations

import torch
import triton
from torch.nn.functional import gelu, silu

from fminfer.layer_kernels import GELU_TANH, SILU
from fminfer.triton_kernels import gate_kernel, norm_kernel, rotate_kernel

# Of the largest number; the second is what rounding once gives, and a half more.
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
COLUMNS = 1024  # of a gate's rows that one program computes


class TritonLayers:
    """The kernels as functions of tensors; `layer_kernels.LayerKernels` says what each gives."""

    types = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) * (weight + offset).

        Args:
            x: (1, rows, width) or (1, rows, more rows, width).
            weight: (width,).
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._norm(x, out, out, out, weight, eps, offset, adds=False)
        return out

    def add_and_norm(
        self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + other and its `rms_norm`; all are (1, rows, width)."""
        assert x.shape == other.shape and x.dtype == other.dtype, "terms of a sum"
        both, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        self._norm(x, other.contiguous(), both, out, weight, eps, offset, adds=True)
        return both, out

    def _norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        both: torch.Tensor,
        out: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        *,
        adds: bool,
    ) -> None:
        weight = weight.contiguous()
        assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, "weight of a norm"
        outer, inner, outer_step, inner_step = self._rows(x)
        size = triton.next_power_of_2(x.shape[-1])
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            norm_kernel[(outer * inner,)](
                *(x, other, both, out, weight, inner, outer_step, inner_step, eps, offset),
                WIDTH=x.shape[-1],
                SIZE=size,
                ADDS=adds,
                num_warps=max(1, min(16, size // 512)),
            )

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return x with rotary positions, its first half paired with its second.

        Args:
            x: (1, tokens, heads, head_dim).
            cos, sin: (1, tokens, turned), for the first `turned` elements of each head.
        """
        cos, sin = cos.contiguous(), sin.contiguous()
        turned, width = cos.shape[-1], x.shape[-1]
        assert cos.shape == sin.shape == (1, x.shape[1], turned), "cos and sin"
        assert turned % 2 == 0 and turned <= width, "cos and sin"
        tokens, heads, token_step, head_step = self._rows(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            rotate_kernel[(tokens, heads)](
                *(x, out, cos, sin, token_step, head_step),
                WIDTH=width,
                TURNED=turned,
                SIZE=triton.next_power_of_2(turned // 2),
                REST=triton.next_power_of_2(width - turned) if width > turned else 0,
                num_warps=1,
            )
        return out

    def gate(self, both: torch.Tensor, activation: int) -> torch.Tensor:
        """Return activation(first half) * second half, of (…, 2 * width)."""
        assert both.shape[-1] % 2 == 0, "halves"
        first, second = both.view(1, -1, both.shape[-1]).chunk(2, -1)
        return self._gate(first, second, activation).view(*both.shape[:-1], -1)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu in its form with tanh, of (1, …, width)."""
        return self._gate(x.reshape(1, -1, x.shape[-1]), None, GELU_TANH).view(x.shape)

    def _gate(
        self, first: torch.Tensor, second: torch.Tensor | None, activation: int
    ) -> torch.Tensor:
        rows, _, step, _ = self._rows(first)
        width = first.shape[-1]
        out = torch.empty_like(first, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            gate_kernel[(rows, -(-width // COLUMNS))](
                *(first, first if second is None else second, out, width, step),
                IS_SILU=activation == SILU,
                GATES=second is not None,
                SIZE=COLUMNS,
                num_warps=4,
            )
        return out

    def _rows(self, x: torch.Tensor) -> tuple[int, int, int, int]:
        """Return how to walk through a tensor: rows, rows in each, and the steps between them."""
        shape, steps = x.shape, x.stride()
        assert x.device.type == self.device.type, "device"
        assert shape[0] == 1 and len(shape) in (3, 4), "rows of a step"
        assert steps[-1] == 1, "the elements of a row lie side by side"
        inner, inner_step = (shape[2], steps[2]) if len(shape) == 4 else (1, 0)
        return shape[1], inner, steps[1], inner_step


def try_kernels(dtype: torch.dtype, device: torch.device) -> TritonLayers:
    """Compile the kernels and compare what they give on the device with plain torch.

    Raises:
        ValueError: they give something else.
        Exception: whatever triton and the driver raise where they do not work.
    """
    kernels = TritonLayers(device)
    for kind in {dtype, torch.float32}:  # in which norms are compared
        generator = torch.Generator().manual_seed(0)
        x, other = (torch.randn(1, 5, 3, 80, generator=generator).to(device, kind) for _ in "xy")
        weight, turn = x[0, 0, 0].contiguous(), other[:, :, 0, :48].sin()
        for found, expected in (
            (kernels.rms_norm(x, weight, 1e-5, 1.0), _norm(x, weight.double() + 1)),
            *zip(
                kernels.add_and_norm(x[:, :, 0], other[:, :, 0], weight, 1e-5, 0.0),
                (both := x[:, :, 0] + other[:, :, 0], _norm(both, weight.double())),
                strict=True,
            ),
            (kernels.rotate(x, turn, -turn), _rotated(x.double(), turn.double()[:, :, None])),
            (kernels.gate(x, SILU), silu(x.double()[..., :40]) * x.double()[..., 40:]),
            (kernels.gelu(x), gelu(x.double(), approximate="tanh")),
        ):
            error = (found.double() - expected).abs().max().item() / expected.abs().max().item()
            if not error < MAX_ERROR[kind]:
                raise ValueError(f"what it gives is off by {error:.2g}")
    return kernels


def _norm(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * factor


def _rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn by cosines `turn` and sines `-turn`."""
    head, rest = x[..., : turn.shape[-1]], x[..., turn.shape[-1] :]
    first, second = head.chunk(2, -1)
    return torch.cat([(head - torch.cat([-second, first], -1)) * turn, rest], -1)

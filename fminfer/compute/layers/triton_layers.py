"""Calls the GPU's norms, rotary positions and gated activations, which are in Triton.

What `layer_kernels` does on the CPU: functions of tensors, each one pass over memory, computed in
float32 and rounded once. It knows nothing of models. Importing it needs triton.
"""

from __future__ import annotations

import torch
import triton

from fminfer.compute.kernels.triton_kernels import gate_kernel, norm_kernel, rotate_kernel
from fminfer.compute.layers.layer_kernels import GATES, SILU
from fminfer.compute.spec import Norm

COLUMNS = 1024  # of a gate's rows that one program computes


class TritonLayers:
    """The kernels as functions of tensors; `layer_kernels.LayerKernels` says what each gives."""

    activations = GATES

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def can_norm(self, how: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
        """Tell whether it computes such a norm: an RMSNorm with a weight."""
        return how.is_rms and weight is not None and weight.dim() == 1 and bias is None

    def norm(
        self, x: torch.Tensor, how: Norm, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._norm(x, out, out, out, how, weight, adds=False)
        return out

    def add_and_norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        how: Norm,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.shape == other.shape and x.dtype == other.dtype, "terms of a sum"
        both, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        self._norm(x, other.contiguous(), both, out, how, weight, adds=True)
        return both, out

    def _norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        both: torch.Tensor,
        out: torch.Tensor,
        how: Norm,
        weight: torch.Tensor,
        *,
        adds: bool,
    ) -> None:
        assert weight.is_contiguous() and weight.shape == x.shape[-1:], "weight of a norm"
        assert weight.dtype == x.dtype, "weight of a norm"
        outer, inner, outer_step, inner_step = self._rows(x)
        size = triton.next_power_of_2(x.shape[-1])
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            norm_kernel[(outer * inner,)](
                *(x, other, both, out, weight, inner, outer_step, inner_step, how.eps, how.offset),
                WIDTH=x.shape[-1],
                SIZE=size,
                ADDS=adds,
                num_warps=max(1, min(16, size // 512)),
            )

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        turned, width = cos.shape[-1], x.shape[-1]
        assert cos.shape == sin.shape == (len(x), turned), "cos and sin"
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
        first, second = both.view(-1, both.shape[-1]).chunk(2, -1)
        return self._gate(first, second, activation).view(*both.shape[:-1], -1)

    def gelu(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        return self._gate(x, None, activation)

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
        assert len(shape) in (2, 3), "rows of a step"
        assert steps[-1] == 1, "the elements of a row lie side by side"
        inner, inner_step = (shape[1], steps[1]) if len(shape) == 3 else (1, 0)
        return shape[0], inner, steps[0], inner_step

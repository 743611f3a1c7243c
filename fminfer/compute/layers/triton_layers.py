"""Calls the GPU's norms, rotary positions and gated activations. Importing it needs triton."""

from __future__ import annotations

import torch
import triton

from fminfer.compute.kernels.triton_kernels import gate_kernel, norm_kernel, rotate_kernel
from fminfer.compute.layers.bodies import GATES, SILU, NormWeights, PartKernels
from fminfer.compute.spec import Norm

COLUMNS = 1024  # of a gate's rows that one program computes


class TritonLayers(PartKernels):
    """The kernels, of tensors on a device."""

    activations = GATES

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def can_norm(self, how: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
        """Tell whether it computes such a norm: an RMSNorm with a weight."""
        return how.is_rms and weight is not None and weight.dim() == 1 and bias is None

    def run_norm(
        self,
        x: torch.Tensor,
        norm: NormWeights,
        out: torch.Tensor,
        added: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        outer, inner, *steps = self.walk(x)
        other, both = (out, out) if added is None else added
        size = triton.next_power_of_2(x.shape[-1])
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            norm_kernel[(outer * inner,)](
                *(x, other, both, out, norm.weight, inner, *steps, norm.how.eps, norm.how.offset),
                WIDTH=x.shape[-1],
                SIZE=size,
                ADDS=added is not None,
                num_warps=max(1, min(16, size // 512)),
            )

    def run_rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> None:
        tokens, heads, *steps = self.walk(x)
        turned, width = cos.shape[-1], x.shape[-1]
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            rotate_kernel[(tokens, heads)](
                *(x, out, cos, sin, *steps),
                WIDTH=width,
                TURNED=turned,
                SIZE=triton.next_power_of_2(turned // 2),
                REST=triton.next_power_of_2(width - turned) if width > turned else 0,
                num_warps=1,
            )

    def run_gate(
        self, x: torch.Tensor, second: torch.Tensor | None, activation: int, out: torch.Tensor
    ) -> None:
        rows, _, step, _ = self.walk(x)
        width = x.shape[-1]
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            gate_kernel[(rows, -(-width // COLUMNS))](
                *(x, x if second is None else second, out, width, step),
                IS_SILU=activation == SILU,
                GATES=second is not None,
                SIZE=COLUMNS,
                num_warps=4,
            )

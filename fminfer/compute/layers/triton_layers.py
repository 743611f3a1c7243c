"""Calls the GPU's norms, rotary positions, activations and draws. Importing it needs triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fminfer.compute.kernels.triton_kernels import (
    gate_kernel,
    norm_kernel,
    race_kernel,
    rotate_kernel,
)
from fminfer.compute.layers.bodies import GATES, SILU, NormWeights, PartKernels, Sum
from fminfer.compute.values.spec import Norm

COLUMNS = 1024  # of a gate's rows that one program computes
TOKENS = 2048  # of a race that one program looks at


class TritonPartKernels(PartKernels):
    """The kernels, of tensors on a device."""

    activations = GATES

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def can_norm(self, spec: Norm, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Tell whether it computes such a norm: an RMSNorm with a weight."""
        return spec.is_rms and weight is not None and weight.dim() == 1 and bias is None

    def run_norm(
        self, x: Tensor, norm: NormWeights, out: Tensor, added: Sum | None
    ) -> None:
        outer, inner, *steps = self.row_strides(x)
        other, both = (out, out) if added is None else added
        size = triton.next_power_of_2(x.shape[-1])
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            norm_kernel[(outer * inner,)](
                x,
                other,
                both,
                out,
                norm.weight,
                inner,
                *steps,
                norm.spec.eps,
                norm.spec.offset,
                WIDTH=x.shape[-1],
                SIZE=size,
                ADDS=added is not None,
                num_warps=max(1, min(16, size // 512)),
            )

    def run_rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        tokens, heads, *steps = self.row_strides(x)
        turned = 2 * cos.shape[-1]
        width = x.shape[-1]
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            rotate_kernel[(tokens, heads)](
                x,
                out,
                cos,
                sin,
                *steps,
                WIDTH=width,
                TURNED=turned,
                SIZE=triton.next_power_of_2(turned // 2),
                REST=triton.next_power_of_2(width - turned) if width > turned else 0,
                num_warps=1,
            )

    def run_gate(
        self, x: Tensor, second: Tensor | None, activation: int, out: Tensor
    ) -> None:
        rows, _, step, _ = self.row_strides(x)
        width = x.shape[-1]
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            gate_kernel[(rows, -(-width // COLUMNS))](
                x,
                x if second is None else second,
                out,
                width,
                step,
                IS_SILU=activation == SILU,
                GATES=second is not None,
                SIZE=COLUMNS,
                num_warps=4,
            )


def race_in_triton(scaled: Tensor, noise: Tensor, first_id: int = 0) -> Tensor:
    """Return the places of the highest sums of scaled logit and noise, as `sampler.race` does.

    Each logit is read once. In plain torch the noise of all tokens goes over the GPU's
    memory some thirty times: about 500 bytes a logit.
    """
    rows, vocab = scaled.shape
    assert scaled.dtype == torch.float32 and scaled.is_contiguous(), "scaled logits"
    assert (
        noise.dtype == torch.int64 and noise.is_contiguous() and len(noise) == rows
    ), "noise"
    parts = triton.cdiv(vocab, TOKENS)
    scores = torch.empty((rows, parts), dtype=torch.float64, device=scaled.device)
    winners = torch.empty((rows, parts), dtype=torch.int64, device=scaled.device)
    with torch.cuda.device_of(scaled):  # type: ignore[no-untyped-call]
        race_kernel[(rows, parts)](
            scaled, noise, scores, winners, vocab, first_id, SIZE=TOKENS, num_warps=8
        )
    return winners.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]

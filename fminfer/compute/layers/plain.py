"""The parts of layers in plain torch, on any device and in any dtype: the reference."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from fminfer.compute.values.spec import Norm, Rope
from fminfer.compute.values.weights import Function


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + e^-x), the same for a number wherever it stands in x.

    On a CPU torch.sigmoid rounds the last numbers, which fill no register, by another formula.
    """
    if not x.is_cpu:
        return torch.sigmoid(x)
    return torch.exp(-x.float()).add_(1).reciprocal_().to(x.dtype)


_GELU_TANH: Function = partial(nn.functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Function] = {
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu2": lambda x: nn.functional.relu(x).square(),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
}


def xielu(
    x: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    """Return xIELU (Huang and Schlag 2024), whose slopes each layer has learned."""
    up = nn.functional.softplus(positive) * x * x
    down = (torch.expm1(x.minimum(eps)) - x) * (beta + nn.functional.softplus(negative))
    return torch.where(x > 0, up, down) + beta * x


def norm(
    x: torch.Tensor, spec: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Normalize the last dimension in float32, and round once; weights are of last
    dimensions."""
    if not (spec.is_rms or spec.offset) and (weight is None or weight.dim() == 1):
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
    y = x.float()
    if not spec.is_rms:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + spec.eps)
    if weight is not None:
        y = y * (weight.float() + spec.offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def compute_sinusoids(num_positions: int, size: int) -> torch.Tensor:
    """Return (positions, size) float32: sines and cosines of each position, as fairseq
    has them."""
    half = size // 2
    powers = torch.arange(half).float() * -(math.log(10000) / (half - 1))
    angles = torch.arange(num_positions).float()[:, None] * powers.exp()
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, size % 2))


def compute_rotary_table(
    spec: Rope, num_positions: int, device: torch.device
) -> torch.Tensor:
    """Return (2, positions, turned / 2) float32: cosines and sines of every position."""
    inv_freq = torch.tensor(spec.inv_freq, device=device)
    angles = torch.arange(num_positions, device=device)[:, None].float() * inv_freq
    table = torch.empty((2, *angles.shape), device=device)
    torch.cos(angles, out=table[0])
    torch.sin(angles, out=table[1])
    return table.mul_(spec.scale)


def rotate(x: torch.Tensor, turn: torch.Tensor, spec: Rope) -> torch.Tensor:
    """Turn (tokens, heads, head_dim) in float32, by (2, tokens, turned / 2) of a
    `compute_rotary_table`."""
    cos, sin = turn[:, :, None]
    size = 2 * turn.shape[-1]
    part = x[..., :size].float()
    if spec.is_interleaved:
        a = part[..., ::2]
        b = part[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned.to(x.dtype), x[..., size:]], -1)


def gate(
    both: torch.Tensor, activation: str, limit: float | None = None
) -> torch.Tensor:
    """Return activation(first half) * second half of the last dimension; see `Mlp.limit`."""
    first, second = both.chunk(2, -1)
    if limit is not None:
        first = first.clamp(max=limit)
        second = second.clamp(-limit, limit) + 1
    return ACTIVATIONS[activation](first) * second

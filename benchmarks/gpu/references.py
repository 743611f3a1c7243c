"""What kernels are compared with: plain formulas in float64, and torch's own attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(slots=True, frozen=True)
class Heads:
    """The shape of a model's attention, and what bends its scores."""

    heads: int
    kv_heads: int
    dim: int
    softcap: float | None = None
    window: int | None = None
    has_slopes: bool = False

    def __str__(self) -> str:
        how = [f"cap {self.softcap:g}"] if self.softcap else []
        how += [f"window {self.window}"] if self.window else []
        how += ["slopes"] if self.has_slopes else []
        return " ".join([f"{self.heads}/{self.kv_heads}x{self.dim}", *how])

    def slopes(self, device: torch.device) -> torch.Tensor | None:
        if not self.has_slopes:
            return None
        return torch.linspace(0.002, 0.1, self.heads, device=device)


def attend_in_float64(
    shape: Heads,
    query: torch.Tensor,  # (heads, queries, dim)
    keys: torch.Tensor,  # (kv_heads, keys, dim)
    values: torch.Tensor,
    positions: torch.Tensor,  # (queries,): how many keys are before each
) -> torch.Tensor:  # (heads, queries, dim), float64
    """Attend by the plain formula."""
    group = shape.heads // shape.kv_heads
    asked = query.double().view(shape.kv_heads, group, *query.shape[1:])
    scores = asked @ keys.double()[:, None].transpose(-1, -2) * shape.dim**-0.5
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    distance = positions[:, None] - torch.arange(keys.shape[1], device=keys.device)
    slopes = shape.slopes(keys.device)
    if slopes is not None:
        scores = scores - slopes.double().view(shape.kv_heads, group, 1, 1) * distance
    scores = scores.masked_fill(~_is_seen(shape, distance), float("-inf"))
    return (torch.softmax(scores, -1) @ values.double()[:, None]).flatten(0, 1)


def attend_as_torch(
    shape: Heads,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor | None:  # (heads, queries, dim)
    """Attend with torch's sdpa in the tensors' own type; None: it knows no soft cap."""
    if shape.softcap is not None:
        return None
    distance = positions[:, None] - torch.arange(keys.shape[1], device=keys.device)
    is_seen = _is_seen(shape, distance)
    mask = torch.zeros(is_seen.shape, device=keys.device).masked_fill(
        ~is_seen, float("-inf")
    )
    slopes = shape.slopes(keys.device)
    if slopes is not None:
        mask = mask - slopes[:, None, None] * distance
    group = shape.heads // shape.kv_heads
    all_keys, all_values = (
        each.repeat_interleave(group, 0)[None] for each in (keys, values)
    )
    bias = mask.to(query.dtype)
    return scaled_dot_product_attention(
        query[None], all_keys, all_values, attn_mask=bias
    )[0]


def _is_seen(shape: Heads, distance: torch.Tensor) -> torch.Tensor:
    is_seen = distance >= 0
    return is_seen if shape.window is None else is_seen & (distance < shape.window)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:  # float64
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return wide * scale * (weight.double() + offset)


def rotate(
    x: torch.Tensor,  # (tokens, heads, dim)
    cos: torch.Tensor,  # (tokens, turned)
    sin: torch.Tensor,
) -> torch.Tensor:  # float64
    turned = cos.shape[-1]
    wide = x.double()
    head = wide[..., :turned]
    rest = wide[..., turned:]
    first, second = head.chunk(2, -1)
    crossed = torch.cat([-second, first], -1)
    head = head * cos.double()[:, None] + crossed * sin.double()[:, None]
    return torch.cat([head, rest], -1)

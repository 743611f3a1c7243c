"""The product of attention's weights and values, to which hidden values bring nothing.

A hidden value has the weight 0. But 0 times a nan or an infinity is nan, and so a later token, or
one that a window has left behind, would reach those that must not see it.
"""

from __future__ import annotations

import torch


def weigh_values(
    weights: torch.Tensor,  # (kv_heads, queries, keys), 0 where hidden
    values: torch.Tensor,  # (kv_heads, keys, head_dim)
    is_hidden: torch.Tensor,  # (queries, keys) bool
) -> torch.Tensor:  # (kv_heads, queries, head_dim)
    """Return weights @ values, with nan where a query sees a value that is nan or infinite."""
    is_odd = ~values.isfinite()
    if not is_odd.any():
        return weights @ values
    reaches = (~is_hidden).to(weights.dtype) @ is_odd.to(weights.dtype) > 0
    out = weights @ values.masked_fill(is_odd, 0.0)
    return out.masked_fill(reaches, float("nan"))

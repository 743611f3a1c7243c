"""BLOOM's attention with ALiBi, over the paged cache.

The bias of head h for a key at position j is slope_h · j (Press et al. 2021, "Train Short, Test
Long", in BLOOM's translation-invariant form); the paged attention adds it from key positions, so
the alibi tensor that transformers builds over the packed tokens is not used.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomAttention


def alibi_slopes(num_heads: int) -> torch.Tensor:  # (heads,) float32
    """Return the ALiBi slopes; heads beyond a power of two interleave the next power's."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes + extra, dtype=torch.float32)


class PagedBloomAttention(BloomAttention):
    """transformers' BLOOM projections with fminfer's product and cache."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # (1, tokens, hidden)
        residual: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out = self.paged_attention(
            query, key, value, scaling=self.inv_norm_factor, alibi_slopes=self.alibi_slopes
        )
        return residual + self.dense(out.flatten(2)), None


def adapt(attention: nn.Module) -> None:
    """Turn one loaded BLOOM attention module into the paged one, in place."""
    attention.__class__ = PagedBloomAttention
    assert isinstance(attention, PagedBloomAttention)
    attention.alibi_slopes = alibi_slopes(attention.num_heads).to(attention.dense.weight.device)

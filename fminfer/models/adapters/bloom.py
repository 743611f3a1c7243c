"""BLOOM's attention with ALiBi, over the paged cache.

The paged attention adds the bias from key positions, so the alibi tensor that transformers builds
over the packed tokens is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomAttention

from fminfer.models.alibi import interleaved_slopes


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


def adapt(attention: nn.Module, config: Any) -> None:
    """Turn one loaded BLOOM attention module into the paged one, in place."""
    attention.__class__ = PagedBloomAttention
    assert isinstance(attention, PagedBloomAttention)
    slopes = interleaved_slopes(attention.num_heads)
    attention.alibi_slopes = slopes.to(attention.dense.weight.device)

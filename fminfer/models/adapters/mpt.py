"""MPT's attention with ALiBi, over the paged cache.

Its slopes differ from BLOOM's where heads are no power of two, and `attn_config.alibi_bias_max`
sets them. The authors' code obeys that setting (mpt-7b-storywriter says 16); transformers' MPT
always computes with 8. We obey it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.mpt.modeling_mpt import MptAttention

from fminfer.models.alibi import mpt_slopes


class PagedMptAttention(MptAttention):
    """transformers' MPT projections with fminfer's product and cache."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # (1, tokens, hidden)
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
            for part in fused.chunk(3, dim=2)
        )
        out = self.paged_attention(
            query, key, value, scaling=self.softmax_scale, alibi_slopes=self.alibi_slopes
        )
        return self.out_proj(out.flatten(2)), None


def adapt(attention: nn.Module, config: Any) -> None:
    """Turn one loaded MPT attention module into the paged one, in place."""
    attention.__class__ = PagedMptAttention
    assert isinstance(attention, PagedMptAttention)
    slopes = mpt_slopes(attention.n_heads, config.attn_config.alibi_bias_max)
    attention.alibi_slopes = slopes.to(attention.out_proj.weight.device)

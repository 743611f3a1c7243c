"""Falcon's attention over the paged cache: rotary or ALiBi, with one, few or all heads of keys.

With ALiBi (the "rw" models) Falcon adds slope_h · j to query · key of the key at position j before
both are scaled, rounded to bfloat16: by up to 4 where j passes 1000, so the rounding is part of the
model. It depends on nothing but head and j, so it is kept as one more dimension of the key, which
the query meets with a 1. Keys of shared heads are repeated for that, as each head has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from fminfer.models.alibi import interleaved_slopes


class PagedFalconAttention(FalconAttention):
    """transformers' Falcon projections with fminfer's product and cache."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # (1, tokens, hidden)
        *args: object,
        position_ids: torch.Tensor,  # (1, tokens)
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._split_qkv(self.query_key_value(hidden_states))
        if self.alibi_slopes is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        else:
            bias = (self.alibi_slopes[:, None] * position_ids[0]).to(key.dtype)
            group = self.num_heads // key.shape[1]
            key = torch.cat([key.repeat_interleave(group, 1), bias[None, :, :, None]], -1)
            value = nn.functional.pad(value.repeat_interleave(group, 1), (0, 1))
            query = nn.functional.pad(query, (0, 1), value=1.0)
        out = self.paged_attention(query, key, value, scaling=self.inv_norm_factor)
        return self.dense(out[..., : self.head_dim].flatten(2)), None

    def _split_qkv(
        self, fused: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # each (1, its heads, tokens, head_dim)
        """Split as `_split_heads` does, but leave keys and values at their own number of heads."""
        if not self.new_decoder_architecture:
            return tuple(part.transpose(1, 2) for part in self._split_heads(fused))
        grouped = fused.view(*fused.shape[:2], self.num_kv_heads, -1, self.head_dim)
        query = grouped[..., :-2, :].flatten(2, 3)
        parts = (query, grouped[..., -2, :], grouped[..., -1, :])
        return tuple(part.transpose(1, 2) for part in parts)


def adapt(attention: nn.Module, config: Any) -> None:
    """Turn one loaded Falcon attention module into the paged one, in place."""
    attention.__class__ = PagedFalconAttention
    assert isinstance(attention, PagedFalconAttention)
    attention.alibi_slopes = None
    if config.alibi:
        slopes = interleaved_slopes(attention.num_heads).bfloat16()
        attention.alibi_slopes = slopes.to(attention.dense.weight.device)

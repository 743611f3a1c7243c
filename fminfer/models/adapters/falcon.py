"""Falcon's attention over the paged cache: rotary or ALiBi, with one, few or all heads of keys.

ALiBi of Falcon (its "rw" models) is slope_h · j / sqrt(head_dim) with slopes rounded to bfloat16.
transformers also rounds each product slope_h · j to bfloat16, which makes neighbouring keys equal
where j is large; we keep the products exact, as the formula has them (Press et al. 2021).
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
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._split_qkv(self.query_key_value(hidden_states))
        if self.alibi_slopes is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out = self.paged_attention(
            query, key, value, scaling=self.inv_norm_factor, alibi_slopes=self.alibi_slopes
        )
        return self.dense(out.flatten(2)), None

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
        slopes = interleaved_slopes(attention.num_heads).bfloat16().float()
        slopes *= attention.inv_norm_factor
        attention.alibi_slopes = slopes.to(attention.dense.weight.device)

"""GPT-J keeps attention in a method of its own: send it to the paged attention instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gptj.modeling_gptj import GPTJAttention


class PagedGPTJAttention(GPTJAttention):
    """transformers' GPT-J attention (projections, rotary) with fminfer's product and cache."""

    def _attn(
        self,
        query: torch.Tensor,  # (1, heads, tokens, head_dim), rotated
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        out = self.paged_attention(query, key, value, scaling=1.0 / self.scale_attn)
        return out.transpose(1, 2), None


def adapt(attention: nn.Module, config: Any) -> None:
    """Turn one loaded GPT-J attention module into the paged one, in place."""
    attention.__class__ = PagedGPTJAttention

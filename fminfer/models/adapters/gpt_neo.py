"""GPT-Neo's attention: no scaling, and every other layer sees a window of `window_size` tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention


class PagedGPTNeoAttention(GPTNeoSelfAttention):
    """transformers' GPT-Neo projections with fminfer's product and cache."""

    def _attn(
        self,
        query: torch.Tensor,  # (1, heads, tokens, head_dim)
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        window = self.config.window_size if self.attention_type == "local" else None
        out = self.paged_attention(query, key, value, scaling=1.0, sliding_window=window)
        return out.transpose(1, 2), None


def adapt(attention: nn.Module, config: Any) -> None:
    """Turn one loaded GPT-Neo attention module into the paged one, in place."""
    attention.__class__ = PagedGPTNeoAttention
    del attention.bias  # its causal mask, context × context: nothing here reads it

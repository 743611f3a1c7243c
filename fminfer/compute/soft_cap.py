"""The soft cap of Gemma 2, on attention scores and on logits. It knows neither."""

from __future__ import annotations

import torch


def soft_cap(values: torch.Tensor, cap: float) -> torch.Tensor:
    """Bend values smoothly into (-cap, cap): cap * tanh(values / cap).

    Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
    """
    return cap * torch.tanh(values / cap)

"""Slopes of ALiBi (Press et al. 2021, "Train Short, Test Long"), as the models' authors have them.

The bias of head h for a key at position j is slope_h · j, in the translation-invariant form.
"""

from __future__ import annotations

import math

import torch


def interleaved_slopes(num_heads: int) -> torch.Tensor:  # (heads,) float32
    """Return BLOOM's and Falcon's slopes: beyond a power of two come those between, odd ones."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes + extra, dtype=torch.float32)


def mpt_slopes(num_heads: int, bias_max: float) -> torch.Tensor:  # (heads,) float32
    """Return MPT's slopes: those of the next power of two, every second one first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = torch.exp2(-torch.arange(1, power + 1, dtype=torch.float32) * (bias_max / power))
    if power == num_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:num_heads]

"""Rows of Cohere's models: LayerNorms without bias, attention and MLP side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.compute.spec import Norm
from fminfer.models.families.config_parts import Changes, rope_of
from fminfer.models.families.llama_like import biases, llama_like
from fminfer.models.families.tensor_names import Architecture


def _cohere(c: Any, attention: Callable[[int], Changes]) -> Architecture:
    norm = Norm(c.layer_norm_eps, is_rms=False)
    return llama_like(
        c,
        norm=norm,
        attention=lambda number: biases(c) | attention(number),
        layer={"before": (norm, None), "is_parallel": True},
        logit_scale=c.logit_scale,
    )


def cohere(c: Any) -> Architecture:
    of_head = Norm(c.layer_norm_eps, is_rms=False) if c.use_qk_norm else None
    rope = rope_of(c, is_interleaved=True)
    return _cohere(c, lambda number: {"rope": rope, "qk_norm": of_head, "qk_norm_over": "heads"})


def cohere2(c: Any) -> Architecture:
    """Only layers with a window have rotary positions."""
    rope = rope_of(c, is_interleaved=True)
    return _cohere(
        c,
        lambda number: {"rope": rope if c.layer_types[number] == "sliding_attention" else None},
    )


ROWS = (cohere, cohere2)

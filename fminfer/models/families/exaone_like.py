"""Rows of the EXAONE models: only layers with a window have rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.compute.spec import Mlp, Moe, Norm
from fminfer.models.families.config_parts import Changes, rope_of
from fminfer.models.families.expert_parts import SIGMOID, sigmoid_moe
from fminfer.models.families.llama_like import SANDWICH, gated_mlp, llama_like
from fminfer.models.families.tensor_names import Architecture, parameter


def _attention(c: Any) -> Callable[[int], Changes]:
    """Return attention by a layer's number. Without windows all layers have positions."""
    norm, rope, window = Norm(c.rms_norm_eps), rope_of(c), c.sliding_window

    def attention(number: int) -> Changes:
        is_near = c.layer_types[number] == "sliding_attention"
        return {"rope": rope if window is None or is_near else None, "qk_norm": norm}

    return attention


def exaone4(c: Any) -> Architecture:
    norm = Norm(c.rms_norm_eps)
    return llama_like(
        c,
        inner=SANDWICH,
        attention=_attention(c),
        layer={"before": (None, None), "after": (norm, norm)},
    )


def exaone_moe(c: Any) -> Architecture:
    moe, plain = sigmoid_moe(c, c.num_experts, c.num_shared_experts), gated_mlp(c)
    kinds, bias = c.mlp_layer_types, "e_score_correction_bias"

    def mlp(number: int) -> Mlp | Moe:
        return moe if kinds[number] == "sparse" else plain

    return llama_like(
        c,
        inner=SIGMOID | {"choice": parameter(f"mlp.{bias}|mlp.gate.{bias}")},
        attention=_attention(c),
        mlp=mlp,
        left_out=r"mtp\.",  # of several tokens at once
    )


ROWS = (exaone4, exaone_moe)

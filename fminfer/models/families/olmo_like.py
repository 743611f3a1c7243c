"""Rows of the OLMo models."""

from __future__ import annotations

from typing import Any

from fminfer.compute.spec import Mlp, Moe, Norm
from fminfer.models.families.config_parts import Changes, same
from fminfer.models.families.llama_like import SANDWICH, biases, llama_like
from fminfer.models.families.tensor_names import Architecture


def olmo(c: Any) -> Architecture:
    return llama_like(
        c,
        norm=Norm(1e-5, is_rms=False, has_weight=False),
        attention=biases(c) | {"clip": c.clip_qkv},
    )


def _wide_norms(c: Any) -> Changes:
    """Return attention with one norm over all queries, and one over all keys."""
    return biases(c) | {"qk_norm": Norm(c.rms_norm_eps), "qk_norm_over": "all"}


def olmo2(c: Any, **more: Any) -> Architecture:
    norm = Norm(c.rms_norm_eps)
    return llama_like(
        c,
        inner=SANDWICH,
        attention=_wide_norms(c),
        layer={"before": (None, None), "after": (norm, norm)},
        **more,
    )


def olmo3(c: Any) -> Architecture:
    return olmo2(c)


def _experts(c: Any) -> Moe:
    expert = Mlp(c.hidden_act, c.intermediate_size)
    return Moe(c.num_experts, c.num_experts_per_tok, expert, is_normalized=c.norm_topk_prob)


def olmoe(c: Any) -> Architecture:
    return llama_like(c, attention=_wide_norms(c), mlp=same(_experts(c)))


def flex_olmo(c: Any) -> Architecture:
    return olmo2(c, mlp=same(_experts(c)))


ROWS = (olmo, olmo2, olmo3, olmoe, flex_olmo)

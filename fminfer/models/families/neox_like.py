"""Rows of GPT-NeoX and its Japanese sibling."""

from __future__ import annotations

from typing import Any

from fminfer.compute.spec import Norm
from fminfer.models.families.gpt_like import BLOOM_INNER, gpt_like
from fminfer.models.families.tensor_names import BY_HEAD, Architecture, Sources, parameter, sources

INNER = (
    BLOOM_INNER | sources(out="attention.dense") | sources(BY_HEAD, qkv="attention.query_key_value")
)


def _outer(top: str, head: str) -> Sources:
    return sources(embed=f"{top}embed_in", final_norm=f"{top}final_layer_norm", head=head)


def gpt_neox(c: Any) -> Architecture:
    top, bias = "gpt_neox.", c.attention_bias
    return gpt_like(
        c,
        norm=Norm(c.layer_norm_eps, is_rms=False, has_bias=True),
        activation=c.hidden_act,
        size=c.intermediate_size,
        inner=INNER,
        outer=_outer(top, "embed_out|lm_head"),
        prefix=f"{top}layers.{{}}.",
        attention={"has_qkv_bias": bias, "has_out_bias": bias},
        layer={"is_parallel": c.use_parallel_residual},
    )


def gpt_neox_japanese(c: Any) -> Architecture:
    """Only the last layer has a bias, at the output of attention."""
    top, last = "gpt_neox_japanese.", c.num_hidden_layers - 1
    return gpt_like(
        c,
        norm=Norm(c.layer_norm_eps, is_rms=False, has_bias=True),
        activation=c.hidden_act,
        size=c.hidden_size * c.intermediate_multiple_size,
        inner=INNER | {"out.bias": parameter("attention.dense_bias")},
        outer=_outer(top, "embed_out"),
        prefix=f"{top}layers.{{}}.",
        attention=lambda number: {"has_out_bias": number == last},
        has_bias=False,
    )


ROWS = (gpt_neox, gpt_neox_japanese)

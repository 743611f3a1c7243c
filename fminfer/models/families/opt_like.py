"""Rows of GPTs from other houses: with names and positions of fairseq, and GPT-NeoX."""

from __future__ import annotations

from typing import Any

from fminfer.compute.spec import Norm
from fminfer.models.families.gpt_like import BLOOM_INNER, gpt_like
from fminfer.models.families.tensor_names import BY_HEAD, Architecture, Sources, parameter, sources

INNER = sources(
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    out="self_attn.out_proj",
    up="fc1",
    down="fc2",
)


def _fairseq(
    c: Any, top: str, *, head: str, size: int, activation: str, **more: Any
) -> Architecture:
    outer = sources(
        embed=f"{top}embed_tokens",
        positions=f"{top}embed_positions",
        final_norm=f"{top}layer_norm",
        head=head,
    )
    return gpt_like(
        c,
        norm=Norm(1e-5, is_rms=False, has_bias=True),  # whatever the config says
        activation=activation,
        size=size,
        inner=INNER,
        outer=outer,
        prefix=f"{top}layers.{{}}.",
        embed_scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
        num_positions=c.max_position_embeddings + 2,
        position_offset=2,
        **more,
    )


def biogpt(c: Any) -> Architecture:
    size, activation = c.intermediate_size, c.hidden_act
    return _fairseq(c, "biogpt.", head="output_projection", size=size, activation=activation)


def xglm(c: Any) -> Architecture:
    return _fairseq(
        c,
        "model.",
        head="lm_head",
        size=c.ffn_dim,
        activation=c.activation_function,
        has_sinusoids=True,
        left_out=r"model\.embed_positions\.weights$",  # stored by old releases
    )


NEOX_INNER = (
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
        inner=NEOX_INNER,
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
        inner=NEOX_INNER | {"out.bias": parameter("attention.dense_bias")},
        outer=_outer(top, "embed_out"),
        prefix=f"{top}layers.{{}}.",
        attention=lambda number: {"has_out_bias": number == last},
        has_bias=False,
    )


ROWS = (biogpt, xglm, gpt_neox, gpt_neox_japanese)

"""Rows that resemble OPT: GPT with names and positions of fairseq."""

from __future__ import annotations

from typing import Any

from fminfer.compute.spec import Norm
from fminfer.models.families.gpt_like import gpt_like
from fminfer.models.families.tensor_names import Architecture, sources

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


ROWS = (biogpt, xglm)

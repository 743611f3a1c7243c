"""Rows that are LLaMA but for a detail: biases, norms, or which layers have rotary positions."""

from __future__ import annotations

from typing import Any

from fminfer.models.families.config_parts import Changes, rope_of, same, text_part
from fminfer.models.families.llama_like import (
    biases,
    gated_mlp,
    gemma_like,
    llama,
    llama_like,
    mistral,
)
from fminfer.models.families.tensor_names import Architecture, sources


def cwm(c: Any) -> Architecture:
    return llama_like(c, mlp=same(gated_mlp(c, has_bias=c.mlp_bias)))


def ministral(c: Any) -> Architecture:
    return llama_like(c)


def ministral3(c: Any) -> Architecture:
    """Queries grow beyond the original length, which is the limit here: `context_length`."""
    return llama_like(c)


def mistral3(c: Any) -> Architecture:
    return text_part(c, mistral, ministral3)


def internlm3(c: Any) -> Architecture:
    return llama(c)


def seed_oss(c: Any) -> Architecture:
    attention = {"has_qkv_bias": c.attention_bias, "has_out_bias": c.attention_out_bias}
    return llama_like(c, attention=attention, mlp=same(gated_mlp(c, has_bias=c.mlp_bias)))


def ernie4_5(c: Any) -> Architecture:
    bias, rope = c.use_bias, rope_of(c, is_interleaved=True)
    attention = {"rope": rope, "has_qkv_bias": bias, "has_out_bias": bias}
    return llama_like(c, attention=attention, mlp=same(gated_mlp(c, has_bias=bias)))


def helium(c: Any) -> Architecture:
    attention = {"rope": rope_of(c, is_interleaved=True), "has_qkv_bias": c.attention_bias}
    return llama_like(c, attention=attention, mlp=same(gated_mlp(c, has_bias=c.mlp_bias)))


def glm(c: Any) -> Architecture:
    attention = {"rope": rope_of(c, is_interleaved=True), "has_qkv_bias": c.attention_bias}
    return llama_like(c, inner=sources(up="mlp.gate_up_proj"), attention=attention)


def smollm3(c: Any) -> Architecture:
    rope, has_rope = rope_of(c), c.no_rope_layers

    def attention(number: int) -> Changes:
        return biases(c) | {"rope": rope if has_rope[number] else None}

    return llama_like(c, attention=attention, mlp=same(gated_mlp(c, has_bias=c.mlp_bias)))


def vaultgemma(c: Any) -> Architecture:
    return gemma_like(
        c,
        c.hidden_activation,
        inner=sources(before_mlp="pre_feedforward_layernorm"),
        attention=biases(c)
        | {"scaling": c.query_pre_attn_scalar**-0.5, "softcap": c.attn_logit_softcapping},
        logit_cap=c.final_logit_softcapping,
    )


ROWS = (
    *(cwm, ministral, ministral3, mistral3, internlm3, seed_oss, ernie4_5, helium, glm, smollm3),
    vaultgemma,
)

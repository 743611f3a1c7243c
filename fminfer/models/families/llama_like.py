"""Rows that resemble LLaMA: norms before, rotary positions, a gated MLP or one of two products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fminfer.compute.spec import Mlp, Moe, Norm
from fminfer.models.families.config_parts import (
    Changes,
    assemble,
    mixtral_names,
    rope_of,
    same,
    text_part,
)
from fminfer.models.families.tensor_names import (
    BY_HEAD,
    Architecture,
    Sources,
    experts,
    parameter,
    sources,
)

OUTER = sources(embed="model.embed_tokens", final_norm="model.norm", head="lm_head")
INNER = sources(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    out="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    up="mlp.gate_proj mlp.up_proj",
    down="mlp.down_proj",
    router="mlp.gate",
) | experts(
    "mlp.experts.*.gate_proj mlp.experts.*.up_proj", "mlp.experts.*.down_proj", "mlp.experts"
)
SANDWICH = sources(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def llama_like(
    c: Any,
    *,
    norm: Norm | None = None,
    mlp: Callable[[int], Mlp | Moe] | None = None,
    inner: Sources | None = None,
    outer: Sources | None = None,
    **more: Any,
) -> Architecture:
    """Return a LLaMA with what differs.

    Args:
        norm: at all places; None: an RMSNorm.
        mlp: by a layer's number; None: a gated one.
        inner, outer: names that differ from LLaMA's.
        more: as for `assemble`.
    """
    return assemble(
        c,
        norm=norm or Norm(c.rms_norm_eps),
        mlp=mlp or same(gated_mlp(c)),
        prefix="model.layers.{}.",
        outer=OUTER | (outer or {}),
        inner=INNER | (inner or {}),
        **more,
    )


def gated_mlp(c: Any, *, has_bias: bool = False) -> Mlp:
    return Mlp(c.hidden_act, c.intermediate_size, has_bias=has_bias)


def plain_mlp(c: Any, *, has_bias: bool) -> Mlp:
    """Return an MLP of two products, in some with a squared ReLU between them."""
    return Mlp(c.hidden_act, c.intermediate_size, is_gated=False, has_bias=has_bias)


def biases(c: Any) -> Changes:
    """Return the biases of attention's products, where one field sets all."""
    return {"has_qkv_bias": c.attention_bias, "has_out_bias": c.attention_bias}


def llama(c: Any) -> Architecture:
    mlp = same(gated_mlp(c, has_bias=c.mlp_bias))
    return llama_like(c, attention=biases(c), mlp=mlp)


def mistral(c: Any) -> Architecture:
    return llama_like(c)


def qwen2(c: Any) -> Architecture:
    return llama_like(c, attention={"has_qkv_bias": True})


def qwen3(c: Any) -> Architecture:
    return llama_like(c, attention=biases(c) | {"qk_norm": Norm(c.rms_norm_eps)})


def gemma_like(c: Any, activation: str, **more: Any) -> Architecture:
    mlp = Mlp(activation, c.intermediate_size)
    return llama_like(
        c,
        norm=Norm(c.rms_norm_eps, offset=1.0),
        mlp=same(mlp),
        embed_scale=c.hidden_size**0.5,
        **more,
    )


def gemma(c: Any) -> Architecture:
    return gemma_like(c, c.hidden_act, attention=biases(c))


def _gemma2_like(c: Any, **attention: Any) -> Architecture:
    norm = Norm(c.rms_norm_eps, offset=1.0)
    attention["scaling"] = c.query_pre_attn_scalar**-0.5
    return gemma_like(
        c,
        c.hidden_activation,
        inner=SANDWICH,
        attention=biases(c) | attention,
        layer={"after": (norm, norm)},
        logit_cap=c.final_logit_softcapping,
    )


def gemma2(c: Any) -> Architecture:
    return _gemma2_like(c, softcap=c.attn_logit_softcapping)


def gemma3_text(c: Any) -> Architecture:
    """It reads no attn_logit_softcapping: transformers' Gemma 3 never applies one."""
    return _gemma2_like(c, qk_norm=Norm(c.rms_norm_eps, offset=1.0))


def gemma3(c: Any) -> Architecture:
    return text_part(c, gemma3_text=gemma3_text)


def _phi_like(c: Any, inner: Sources, **more: Any) -> Architecture:
    """Return a LLaMA with LayerNorms and biases, and maybe norms of queries and keys."""
    norm = Norm(c.layer_norm_eps, is_rms=False, has_bias=True)
    of_head = norm if c.qk_layernorm else None
    own = sources(
        out="self_attn.dense", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"
    )
    return llama_like(
        c,
        norm=norm,
        inner=own | inner,
        outer=sources(final_norm="model.final_layernorm"),
        attention={"has_qkv_bias": True, "has_out_bias": True, "qk_norm": of_head},
        mlp=same(plain_mlp(c, has_bias=True)),
        **more,
    )


def phi(c: Any) -> Architecture:
    before = Norm(c.layer_norm_eps, is_rms=False, has_bias=True), None
    return _phi_like(
        c,
        sources(up="mlp.fc1", down="mlp.fc2"),
        layer={"before": before, "is_parallel": True},
        has_head_bias=True,
    )


def persimmon(c: Any) -> Architecture:
    own = sources(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
    return _phi_like(c, own | sources(BY_HEAD, qkv="self_attn.query_key_value"))


def phi3(c: Any) -> Architecture:
    return llama_like(c, inner=sources(qkv="self_attn.qkv_proj", up="mlp.gate_up_proj"))


def stablelm(c: Any) -> Architecture:
    norm = Norm(c.layer_norm_eps, is_rms=False, has_bias=True)
    of_head = Norm(c.layer_norm_eps, is_rms=False)
    attention = {
        "has_qkv_bias": c.use_qkv_bias,
        "qk_norm": of_head if c.qk_layernorm else None,
        "qk_norm_over": "heads",
    }
    return llama_like(
        c,
        norm=norm,
        inner=sources(
            q_norm="self_attn.q_layernorm.norms.*", k_norm="self_attn.k_layernorm.norms.*"
        ),
        attention=attention,
        layer={"before": (norm, None), "is_parallel": True} if c.use_parallel_residual else {},
    )


def starcoder2(c: Any) -> Architecture:
    return llama_like(
        c,
        norm=Norm(c.norm_epsilon, is_rms=False, has_bias=True),
        inner=sources(up="mlp.c_fc", down="mlp.c_proj"),
        attention={"has_qkv_bias": c.use_bias, "has_out_bias": c.use_bias},
        mlp=same(plain_mlp(c, has_bias=c.use_bias)),
    )


def glm4(c: Any) -> Architecture:
    norm = Norm(c.rms_norm_eps)
    own = sources(
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
        up="mlp.gate_up_proj",
    )
    return llama_like(
        c,
        inner=own,
        attention={"rope": rope_of(c, is_interleaved=True), "has_qkv_bias": c.attention_bias},
        layer={"after": (norm, norm)},
    )


def mixtral(c: Any) -> Architecture:
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, gated_mlp(c))
    return llama_like(c, inner=mixtral_names(), mlp=same(moe))


def mixed_layers(c: Any, moe: Moe) -> Callable[[int], Mlp | Moe]:
    """Return the MLP by a layer's number where, as in Qwen's models, only some have experts."""
    plain, without, every = gated_mlp(c), c.mlp_only_layers, c.decoder_sparse_step

    def mlp(number: int) -> Mlp | Moe:
        is_plain = number in without or (number + 1) % every
        return plain if is_plain or not c.num_experts else moe

    return mlp


def qwen3_moe(c: Any) -> Architecture:
    expert = Mlp(c.hidden_act, c.moe_intermediate_size)
    moe = Moe(c.num_experts, c.num_experts_per_tok, expert, is_normalized=c.norm_topk_prob)
    attention = biases(c) | {"qk_norm": Norm(c.rms_norm_eps)}
    return llama_like(c, attention=attention, mlp=mixed_layers(c, moe))


def _with_plain_mlp(c: Any, norm: Norm) -> Architecture:
    return llama_like(
        c,
        norm=norm,
        inner=sources(up="mlp.up_proj"),
        attention=biases(c),
        mlp=same(plain_mlp(c, has_bias=c.mlp_bias)),
    )


def arcee(c: Any) -> Architecture:
    return _with_plain_mlp(c, Norm(c.rms_norm_eps))


def jais2(c: Any) -> Architecture:
    return _with_plain_mlp(c, Norm(c.layer_norm_eps, is_rms=False, has_bias=True))


def nemotron(c: Any) -> Architecture:
    return _with_plain_mlp(c, Norm(c.norm_eps, is_rms=False, has_bias=True, offset=1.0))


def apertus(c: Any) -> Architecture:
    own = sources(
        before_attention="attention_layernorm",
        before_mlp="feedforward_layernorm",
        up="mlp.up_proj",
    )
    names = {"positive": "alpha_p", "negative": "alpha_n", "beta": "beta", "eps": "eps"}
    return llama_like(
        c,
        inner=own | {f"xielu.{n}": parameter(f"mlp.act_fn.{each}") for n, each in names.items()},
        attention=biases(c) | {"qk_norm": Norm(c.rms_norm_eps)},
        mlp=same(plain_mlp(c, has_bias=False)),
    )


def nanochat(c: Any) -> Architecture:
    """Its norms have no weights, and its rotary positions turn the other way."""
    norm, rope = Norm(c.rms_norm_eps, has_weight=False), rope_of(c)
    rope = replace(rope, inv_freq=tuple(-each for each in rope.inv_freq))
    return llama_like(
        c,
        norm=norm,
        inner=sources(up="mlp.fc1", down="mlp.fc2"),
        attention=biases(c) | {"rope": rope, "qk_norm": norm, "qk_norm_is_last": True},
        mlp=same(plain_mlp(c, has_bias=False)),
        embed_norm=norm,
        logit_cap=c.final_logit_softcapping,
    )


ROWS = (
    *(llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, gemma3_text, phi, persimmon, phi3),
    *(stablelm, starcoder2, glm4, mixtral, qwen3_moe, apertus, arcee, jais2, nemotron, nanochat),
)

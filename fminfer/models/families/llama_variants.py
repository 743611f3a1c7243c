"""Rows that are LLaMA but for a detail: biases, norms, multipliers, or where positions rotate.

They stand by maker: Granite, Cohere, EXAONE, Hunyuan and OLMo have several each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.compute.spec import Mlp, Moe, Norm
from fminfer.models.families.config_parts import (
    SIGMOID,
    Changes,
    head_dim_of,
    plain_rope,
    rope_of,
    same,
    shared_names,
    sigmoid_moe,
    text_part,
)
from fminfer.models.families.llama_like import (
    SANDWICH,
    biases,
    gated_mlp,
    gemma_like,
    llama_like,
    mistral,
)
from fminfer.models.families.tensor_names import Architecture, parameter, sources


def cwm(c: Any) -> Architecture:
    return llama_like(c, mlp=same(gated_mlp(c, has_bias=c.mlp_bias)))


def mistral3(c: Any) -> Architecture:
    return text_part(c, mistral=mistral, ministral3=mistral)


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


def _cohere_attention(c: Any) -> Callable[[int], Changes]:
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
        attention=_cohere_attention(c),
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
        attention=_cohere_attention(c),
        mlp=mlp,
        left_out=r"mtp\.",  # of several tokens at once
    )


EXPERTS = sources(
    router="block_sparse_moe.router.layer",
    shared__up="shared_mlp.input_linear",
    shared__down="shared_mlp.output_linear",
) | {
    "experts.up": parameter("block_sparse_moe.input_linear.weight"),
    "experts.down": parameter("block_sparse_moe.output_linear.weight"),
}


def granite_like(
    c: Any, *, logit_scale: float, layer: Changes | None = None, **more: Any
) -> Architecture:
    """Return a LLaMA with Granite's multipliers, and what differs besides."""
    return llama_like(
        c,
        attention=biases(c) | {"scaling": c.attention_multiplier},
        layer={"residual_scale": c.residual_multiplier} | (layer or {}),
        embed_scale=c.embedding_multiplier,
        logit_scale=logit_scale,
        **more,
    )


def granite(c: Any) -> Architecture:
    mlp = same(gated_mlp(c, has_bias=c.mlp_bias))
    return granite_like(c, logit_scale=1 / c.logits_scaling, mlp=mlp)


def hyperclovax(c: Any) -> Architecture:
    after = Norm(c.rms_norm_eps) if c.use_post_norm else None
    return granite_like(
        c,
        logit_scale=c.logits_scaling,
        mlp=same(gated_mlp(c, has_bias=c.mlp_bias)),
        inner=sources(after_attention="post_norm1", after_mlp="post_norm2"),
        layer={"after": (after, after)},
    )


def granitemoe(c: Any, shared_size: int = 0) -> Architecture:
    shared = Mlp(c.hidden_act, shared_size) if shared_size else None
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, gated_mlp(c), shared=shared)
    return granite_like(c, logit_scale=1 / c.logits_scaling, mlp=same(moe), inner=EXPERTS)


def granitemoeshared(c: Any) -> Architecture:
    return granitemoe(c, c.shared_intermediate_size)


NAMES = sources(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _exaone_attention(c: Any) -> Changes:
    """Return attention whose norms come after rotary positions."""
    how, rope = c.rope_parameters, rope_of(c)
    if how["rope_type"] == "dynamic" and how.get("alpha"):
        size = head_dim_of(c)
        rope = plain_rope(how["rope_theta"] * how["alpha"] ** (size / (size - 2)), size)
    return biases(c) | {"rope": rope, "qk_norm": Norm(c.rms_norm_eps), "qk_norm_is_last": True}


def hunyuan_v1_dense(c: Any) -> Architecture:
    return llama_like(c, inner=NAMES, attention=_exaone_attention(c))


def hunyuan_v1_moe(c: Any) -> Architecture:
    expert = gated_mlp(c)

    def mlp(number: int) -> Moe:
        num, top_k = (
            each if isinstance(each, int) else each[number] for each in (c.num_experts, c.moe_topk)
        )
        return Moe(num, top_k, expert, is_precise=True, shared=expert)

    own = NAMES | shared_names("mlp.shared_mlp") | sources(router="mlp.gate.wg")
    return llama_like(c, inner=own, attention=_exaone_attention(c), mlp=mlp)


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


def _experts(c: Any) -> Moe:
    expert = Mlp(c.hidden_act, c.intermediate_size)
    return Moe(c.num_experts, c.num_experts_per_tok, expert, is_normalized=c.norm_topk_prob)


def olmoe(c: Any) -> Architecture:
    return llama_like(c, attention=_wide_norms(c), mlp=same(_experts(c)))


def flex_olmo(c: Any) -> Architecture:
    return olmo2(c, mlp=same(_experts(c)))


ROWS = (
    *(cwm, mistral3, seed_oss, ernie4_5, helium, glm, smollm3),
    *(vaultgemma, granite, granitemoe, granitemoeshared, hyperclovax, cohere, cohere2),
    *(olmo, olmo2, olmoe, flex_olmo, exaone4, exaone_moe),
    *(hunyuan_v1_dense, hunyuan_v1_moe),
)

"""Rows with mixtures of experts that route otherwise than Mixtral, or share an expert.

DeepSeek's rows and their like also have latent attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fminfer.compute.spec import Latent, Mlp, Moe, Norm
from fminfer.models.families.config_parts import (
    SIGMOID,
    Changes,
    layers_beyond,
    mixtral_names,
    rope_of,
    same,
    shared_names,
    sigmoid_moe,
)
from fminfer.models.families.llama_like import biases, gated_mlp, llama_like, mixed_layers
from fminfer.models.families.tensor_names import (
    AS_ROW,
    BY_TURNS,
    BY_TURNS_TRANSPOSED,
    TRANSPOSED,
    Architecture,
    Sources,
    parameter,
    sources,
)


def qwen2_moe(c: Any) -> Architecture:
    moe = Moe(
        c.num_experts,
        c.num_experts_per_tok,
        Mlp(c.hidden_act, c.moe_intermediate_size),
        is_normalized=c.norm_topk_prob,
        shared=Mlp(c.hidden_act, c.shared_expert_intermediate_size),
        has_shared_gate=True,
    )
    own = shared_names("mlp.shared_expert") | sources(shared_gate="mlp.shared_expert_gate")
    return llama_like(
        c, inner=own, attention={"has_qkv_bias": c.qkv_bias}, mlp=mixed_layers(c, moe)
    )


def phimoe(c: Any) -> Architecture:
    own = mixtral_names() | sources(router="block_sparse_moe.gate|mlp.router")
    rope = rope_of(c)
    if c.rope_parameters["rope_type"] != "default":  # up to its original length, as for Phi-3
        rope = replace(rope, scale=c.rope_parameters["short_mscale"])
    moe = Moe(
        *(c.num_local_experts, c.num_experts_per_tok, gated_mlp(c)),
        scores="sparsemixer",
        mixer_eps=c.router_jitter_noise,
    )
    return llama_like(
        c,
        norm=Norm(c.rms_norm_eps, is_rms=False, has_bias=True),
        inner=own,
        attention=biases(c) | {"rope": rope},
        mlp=same(moe),
        has_head_bias=c.lm_head_bias,
    )


def ernie4_5_moe(c: Any) -> Architecture:
    bias, expert = c.use_bias, Mlp(c.hidden_act, c.moe_intermediate_size)
    size = expert.size * c.moe_num_shared_experts
    shared = replace(expert, size=size, has_bias=bias) if size else None
    moe = Moe(
        *(c.num_experts, c.num_experts_per_tok, expert),
        is_precise=True,
        has_choice_bias=True,
        shared=shared,
    )
    plain = gated_mlp(c, has_bias=bias)
    first, last, every = c.moe_layer_start_index, c.moe_layer_end_index, c.moe_layer_interval

    def mlp(number: int) -> Mlp | Moe:
        return moe if first <= number <= last and (number + 1) % every == 0 else plain

    bias_name = "moe_statics.e_score_correction_bias"
    names = (bias_name, f"gate.{bias_name}")  # published, and of transformers 5
    choice = parameter("|".join(f"mlp.{each}" for each in names), AS_ROW)
    attention = {"has_qkv_bias": bias, "has_out_bias": bias}
    return llama_like(
        c,
        inner=SIGMOID | {"choice": choice},
        attention=attention | {"rope": rope_of(c, is_interleaved=True)},
        mlp=mlp,
        has_head_bias=bias,
        left_out=r"model\.mtp_",  # of several tokens at once
    )


def _after_plain_ones(c: Any, moe: Moe | None = None) -> Callable[[int], Mlp | Moe]:
    """Return the MLP by a layer's number where the first layers have no experts.

    Args:
        moe: of the others; None: one that is chosen as in DeepSeek V3.
    """
    plain, num_plain = gated_mlp(c), c.first_k_dense_replace
    others = moe or sigmoid_moe(c, c.n_routed_experts, c.n_shared_experts)
    return lambda number: plain if number < num_plain else others


def glm4_moe(c: Any) -> Architecture:
    attention: Changes = {
        "has_qkv_bias": c.attention_bias,
        "qk_norm": Norm(c.rms_norm_eps) if c.use_qk_norm else None,
    }
    return llama_like(
        c,
        inner=SIGMOID,
        attention=attention,
        mlp=_after_plain_ones(c),
        left_out=layers_beyond(c, c.num_mtp_layers),
    )


def solar_open(c: Any) -> Architecture:
    moe = sigmoid_moe(c, c.n_routed_experts, c.n_shared_experts)
    attention = {"has_qkv_bias": c.attention_bias}
    return llama_like(c, inner=SIGMOID, attention=attention, mlp=same(moe))


def dots1(c: Any) -> Architecture:
    attention = biases(c) | {"qk_norm": Norm(c.rms_norm_eps)}
    return llama_like(c, inner=SIGMOID, attention=attention, mlp=_after_plain_ones(c))


def minimax_m2(c: Any) -> Architecture:
    norm, own = Norm(c.rms_norm_eps), mixtral_names()
    bias = "e_score_correction_bias"
    moe = Moe(
        *(c.num_local_experts, c.num_experts_per_tok, gated_mlp(c)),
        scores="sigmoid",
        has_choice_bias=True,
    )
    return llama_like(
        c,
        inner=own | {"choice": parameter(f"block_sparse_moe.{bias}|mlp.{bias}")},
        attention={"qk_norm": norm, "qk_norm_over": "all"},
        mlp=same(moe),
    )


def gpt_oss(c: Any) -> Architecture:
    limit = getattr(c, "swiglu_limit", 7.0)  # transformers 5.17 has no field for it
    expert = Mlp("quick_gelu", c.intermediate_size, has_bias=True, limit=limit)
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, expert, has_router_bias=True)
    own = sources(router="mlp.router") | {
        "sinks": parameter("self_attn.sinks"),
        "experts.up.weight": parameter("mlp.experts.gate_up_proj", BY_TURNS_TRANSPOSED),
        "experts.up.bias": parameter("mlp.experts.gate_up_proj_bias", BY_TURNS),
        "experts.down.weight": parameter("mlp.experts.down_proj", TRANSPOSED),
        "experts.down.bias": parameter("mlp.experts.down_proj_bias"),
    }
    attention = biases(c) | {"has_sinks": True}
    return llama_like(c, inner=own, attention=attention, mlp=same(moe))


LATENT = sources(
    q="self_attn.q_proj",
    q_down="self_attn.q_a_proj",
    q_norm="self_attn.q_a_layernorm",
    q_up="self_attn.q_b_proj",
    kv_down="self_attn.kv_a_proj_with_mqa",
    kv_norm="self_attn.kv_a_layernorm",
    kv_up="self_attn.kv_b_proj",
)


def _latent_like(
    c: Any,
    *,
    mlp: Callable[[int], Mlp | Moe],
    is_interleaved: bool,
    inner: Sources | None = None,
    left_out: str = "",
) -> Architecture:
    key_dim, turned = c.qk_nope_head_dim, c.qk_rope_head_dim
    _ = c.num_key_value_heads  # whatever it says, every head has keys of its own
    # transformers norms latents with its own default, whatever rms_norm_eps says.
    norm = Norm(1e-6)
    latent = Latent(c.kv_lora_rank, c.q_lora_rank, key_dim, turned, c.v_head_dim, norm)
    attention: Changes = {
        "kv_heads": 1,
        "head_dim": c.kv_lora_rank + turned,
        "scaling": (key_dim + turned) ** -0.5 * _yarn_scale(c.rope_parameters) ** 2,
        "rope": rope_of(c, is_interleaved=is_interleaved),
        "latent": latent,
        "has_qkv_bias": c.attention_bias,
        "has_out_bias": c.attention_bias,
    }
    return llama_like(
        c, inner=LATENT | (inner or {}), attention=attention, mlp=mlp, left_out=left_out
    )


def _yarn_scale(rope: dict[str, Any]) -> float:
    """Return what queries and keys are each multiplied by (Peng et al. 2023, "YaRN")."""
    by, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1.0)
    if rope["rope_type"] == "default" or not by or factor <= 1:
        return 1.0
    return float(0.1 * by * math.log(factor) + 1.0)


def deepseek_v2(c: Any) -> Architecture:
    has_groups = c.topk_method == "group_limited_greedy"
    num_groups, top_groups = (c.n_group, c.topk_group) if c.topk_group else (1, 1)
    expert = Mlp(c.hidden_act, c.moe_intermediate_size)
    moe = Moe(
        *(c.n_routed_experts, c.num_experts_per_tok, expert),
        is_normalized=False,
        is_precise=True,
        groups=num_groups if has_groups else 1,
        top_groups=top_groups if has_groups else 1,
        rated_by=1,
        scale=c.routed_scaling_factor,
        shared=Mlp(c.hidden_act, expert.size * c.n_shared_experts),
    )
    own, mlp = shared_names("mlp.shared_experts"), _after_plain_ones(c, moe)
    return _latent_like(c, inner=own, mlp=mlp, is_interleaved=True)


def deepseek_v3(c: Any) -> Architecture:
    return _latent_like(
        c,
        inner=SIGMOID,
        mlp=_after_plain_ones(c),
        is_interleaved=c.rope_interleave,
        left_out=layers_beyond(c, c.num_mtp_layers),
    )


def glm4_moe_lite(c: Any) -> Architecture:
    plain, moe = gated_mlp(c), sigmoid_moe(c, c.n_routed_experts, c.n_shared_experts)
    kinds = c.mlp_layer_types
    return _latent_like(
        c,
        inner=SIGMOID,
        mlp=lambda number: moe if kinds[number] == "sparse" else plain,
        is_interleaved=c.rope_interleave,
        left_out=layers_beyond(c, 1),
    )


def youtu(c: Any) -> Architecture:
    return _latent_like(c, mlp=same(gated_mlp(c)), is_interleaved=c.rope_interleave)


ROWS = (
    *(gpt_oss, qwen2_moe, phimoe, ernie4_5_moe, glm4_moe, solar_open, dots1, minimax_m2),
    *(deepseek_v2, deepseek_v3, glm4_moe_lite, youtu),
)

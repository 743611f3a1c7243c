"""Rows with latent attention: DeepSeek's, and those that took it over."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fminfer.compute.spec import Latent, Mlp, Moe, Norm
from fminfer.models.families.config_parts import Changes, rope_of
from fminfer.models.families.expert_parts import SIGMOID, layers_beyond, shared_names, sigmoid_moe
from fminfer.models.families.llama_like import gated_mlp, llama_like
from fminfer.models.families.tensor_names import Architecture, Sources, sources

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
    rope = rope_of(c, is_interleaved=is_interleaved)
    latent = Latent(c.kv_lora_rank, c.q_lora_rank, key_dim, turned, c.v_head_dim, norm)
    attention: Changes = {
        "kv_heads": 1,
        "head_dim": c.kv_lora_rank + turned,
        "scaling": (key_dim + turned) ** -0.5 * _yarn_scale(c.rope_parameters) ** 2,
        "rope": rope,
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


def _from(first: int, plain: Mlp, moe: Moe) -> Callable[[int], Mlp | Moe]:
    return lambda number: plain if number < first else moe


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
    mlp = _from(c.first_k_dense_replace, gated_mlp(c), moe)
    return _latent_like(c, inner=shared_names("mlp.shared_experts"), mlp=mlp, is_interleaved=True)


def deepseek_v3(c: Any) -> Architecture:
    moe = sigmoid_moe(c, c.n_routed_experts, c.n_shared_experts)
    return _latent_like(
        c,
        inner=SIGMOID,
        mlp=_from(c.first_k_dense_replace, gated_mlp(c), moe),
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
    plain = gated_mlp(c)
    return _latent_like(c, mlp=lambda number: plain, is_interleaved=c.rope_interleave)


ROWS = (deepseek_v2, deepseek_v3, glm4_moe_lite, youtu)

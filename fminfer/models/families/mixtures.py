"""Rows with mixtures of experts. DeepSeek's and families like it have latent attention."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from fminfer.compute.values.spec import Latent, Mlp, Moe, Norm
from fminfer.models.families.config_parts import (
    Changes,
    Mlps,
    Row,
    derive_row,
    mlp_of,
    mlps_with_experts,
    moe_of,
    norm_of,
    rope_of,
    sigmoid_moe,
)
from fminfer.models.families.llama_like import (
    SANDWICH,
    WITHOUT_OUT_BIAS,
    exaone_attention,
    granite_like,
    hunyuan,
    llama_like,
)
from fminfer.models.families.tensor_names import (
    AS_ROW,
    INTERLEAVED,
    INTERLEAVED_TRANSPOSED,
    TRANSPOSED,
    Architecture,
    Sources,
    expert_sources,
    make_sources,
    parameter_source,
)


def shared_expert_sources(top: str) -> Sources:
    """Return the sources of the expert that all tokens go to."""
    return make_sources(
        shared__up=f"{top}.gate_proj {top}.up_proj", shared__down=f"{top}.down_proj"
    )


def _choice_bias_source(*names: str, **layout: Any) -> Sources:
    """Return the source of the bias that only the choice of experts adds.

    It is stored under one of these names.
    """
    whole = "|".join(f"{name}.e_score_correction_bias" for name in names)
    return {"choice": parameter_source(whole, **layout)}


SIGMOID = shared_expert_sources("mlp.shared_experts") | _choice_bias_source("mlp.gate")
_WHICH = ("w1", "w2", "w3")
_FIRST, _SECOND, _THIRD = (
    f"block_sparse_moe.experts.*.{w}|mlp.experts.*.{w}" for w in _WHICH
)
# In the first form and in that of transformers 5.
MIXTRAL = make_sources(router="block_sparse_moe.gate|mlp.gate") | expert_sources(
    f"{_FIRST} {_THIRD}", _SECOND, "mlp.experts"
)


def _experts_in_some_layers(c: Any, **moe: Any) -> Mlps:
    """Return the MLP of each layer where, as in Qwen's models, only some have experts."""
    without = c.mlp_only_layers
    every = c.decoder_sparse_step
    numbers = [
        n
        for n in range(c.num_hidden_layers)
        if n not in without and (n + 1) % every == 0
    ]
    return mlps_with_experts(c, moe_of(c, **moe), numbers if c.num_experts else ())


def qwen2_moe(c: Any) -> Architecture:
    shared = mlp_of(c, c.shared_expert_intermediate_size)
    names = shared_expert_sources("mlp.shared_expert") | make_sources(
        shared_gate="mlp.shared_expert_gate"
    )
    mlp = _experts_in_some_layers(c, shared=shared, has_shared_gate=True)
    return llama_like(c, inner=names, attention={"has_qkv_bias": c.qkv_bias}, mlp=mlp)


def granitemoe(c: Any) -> Architecture:
    size = getattr(c, "shared_intermediate_size", 0)
    top = "block_sparse_moe"
    names = make_sources(
        router=f"{top}.router.layer|{top}.router",  # also as in transformers from 5.23
        shared__up="shared_mlp.input_linear",
        shared__down="shared_mlp.output_linear",
    ) | {
        "experts.up": parameter_source(
            f"{top}.input_linear.weight|{top}.experts.gate_up_proj"
        ),
        "experts.down": parameter_source(
            f"{top}.output_linear.weight|{top}.experts.down_proj"
        ),
    }
    mlp = moe_of(c, shared=mlp_of(c, size) if size else None)
    return granite_like(c, mlp=mlp, inner=names)


def hunyuan_v1_moe(c: Any) -> Architecture:
    expert = mlp_of(c)

    def value_of_layer(value: Any, number: int) -> int:
        return int(value if isinstance(value, int) else value[number])

    num = c.num_experts
    top_k = c.moe_topk
    mlp = [
        Moe(
            value_of_layer(num, n),
            value_of_layer(top_k, n),
            expert,
            is_precise=True,
            shared=expert,
        )
        for n in range(c.num_hidden_layers)
    ]
    return hunyuan(
        c,
        shared_expert_sources("mlp.shared_mlp") | make_sources(router="mlp.gate.wg"),
        mlp,
    )


def phimoe(c: Any) -> Architecture:
    rope = rope_of(c)
    # up to its original length, as for Phi-3
    if c.rope_parameters["rope_type"] != "default":
        rope = replace(rope, scale=c.rope_parameters["short_mscale"])
    return llama_like(
        c,
        norm=norm_of(c, is_rms=False, has_bias=True),
        inner=MIXTRAL | make_sources(router="block_sparse_moe.gate|mlp.router"),
        attention={"rope": rope},
        mlp=moe_of(c, scores="sparsemixer", mixer_eps=c.router_jitter_noise),
        has_head_bias=c.lm_head_bias,
    )


def ernie4_5_moe(c: Any) -> Architecture:
    expert = mlp_of(c, c.moe_intermediate_size, has_bias=False)
    size = expert.size * c.moe_num_shared_experts
    shared = mlp_of(c, size) if size else None
    moe = moe_of(c, expert=expert, is_precise=True, has_choice_bias=True, shared=shared)
    first = c.moe_layer_start_index
    last = c.moe_layer_end_index
    every = c.moe_layer_interval
    numbers = [n for n in range(first, last + 1) if (n + 1) % every == 0]
    return llama_like(
        c,
        is_interleaved=True,
        # Published, and of transformers 5.
        inner=SIGMOID
        | _choice_bias_source("mlp.moe_statics", "mlp.gate.moe_statics", layout=AS_ROW),
        mlp=mlps_with_experts(c, moe, numbers),
        has_head_bias=c.use_bias,
        left_out=r"model\.mtp_",  # of several tokens at once
    )


def _experts_behind_plain_layers(c: Any) -> Mlps:
    """Return the MLP of each layer where the first ones have no experts."""
    numbers = range(c.first_k_dense_replace, c.num_hidden_layers)
    return mlps_with_experts(c, sigmoid_moe(c), numbers)


def _experts_by_layer_kind(c: Any) -> Mlps:
    """Return the MLP of each layer where a list says which have experts."""
    numbers = [n for n, kind in enumerate(c.mlp_layer_types) if kind == "sparse"]
    return mlps_with_experts(c, sigmoid_moe(c), numbers)


def _predicting_layers_pattern(c: Any) -> str:
    """Return a pattern of the names of layers that predict several tokens at once."""
    num = getattr(c, "num_mtp_layers", 1)
    numbers = range(c.num_hidden_layers, c.num_hidden_layers + num)
    return rf"model\.layers\.({'|'.join(map(str, numbers))})\." if num else ""


def glm4_moe(c: Any) -> Architecture:
    return llama_like(
        c,
        inner=SIGMOID,
        attention=WITHOUT_OUT_BIAS,
        qk_norm="head" if c.use_qk_norm else "",
        mlp=_experts_behind_plain_layers(c),
        left_out=_predicting_layers_pattern(c),
    )


def gpt_oss(c: Any) -> Architecture:
    limit = getattr(c, "swiglu_limit", 7.0)  # transformers 5.17 has no field for it
    expert = Mlp("quick_gelu", c.intermediate_size, has_bias=True, limit=limit)
    top = "mlp.experts"
    names = make_sources(router="mlp.router") | {
        "sinks": parameter_source("self_attn.sinks"),
        "experts.up.weight": parameter_source(
            f"{top}.gate_up_proj", INTERLEAVED_TRANSPOSED
        ),
        "experts.up.bias": parameter_source(f"{top}.gate_up_proj_bias", INTERLEAVED),
        "experts.down.weight": parameter_source(f"{top}.down_proj", TRANSPOSED),
        "experts.down.bias": parameter_source(f"{top}.down_proj_bias"),
    }
    mlp = moe_of(c, expert=expert, has_router_bias=True)
    return llama_like(c, inner=names, attention={"has_sinks": True}, mlp=mlp)


LATENT = make_sources(
    q="self_attn.q_proj",
    q_down="self_attn.q_a_proj",
    q_norm="self_attn.q_a_layernorm",
    q_up="self_attn.q_b_proj",
    kv_down="self_attn.kv_a_proj_with_mqa",
    kv_norm="self_attn.kv_a_layernorm",
    kv_up="self_attn.kv_b_proj",
)


def _latent_like(
    c: Any, *, mlp: Mlps | None = None, inner: Sources | None = None, **more: Any
) -> Architecture:
    key_dim = c.qk_nope_head_dim
    turned = c.qk_rope_head_dim
    _ = c.num_key_value_heads  # whatever it says, every head has keys of its own
    # transformers norms latents with its own default, whatever rms_norm_eps says.
    norm = Norm(1e-6)
    attention: Changes = {
        "kv_heads": 1,
        "head_dim": c.kv_lora_rank + turned,
        "scaling": (key_dim + turned) ** -0.5 * _yarn_scale(c.rope_parameters) ** 2,
        "latent": Latent(
            c.kv_lora_rank, c.q_lora_rank, key_dim, turned, c.v_head_dim, norm
        ),
    }
    return llama_like(
        c,
        inner=LATENT | (inner or {}),
        is_interleaved=getattr(c, "rope_interleave", True),
        attention=attention,
        mlp=mlp,
        **more,
    )


def _yarn_scale(rope: dict[str, Any]) -> float:
    """Return what queries and keys are each multiplied by (Peng et al. 2023, "YaRN")."""
    multiplier = rope.get("mscale_all_dim", 0)
    factor = rope.get("factor", 1.0)
    if rope["rope_type"] == "default" or not multiplier or factor <= 1:
        return 1.0
    return float(0.1 * multiplier * math.log(factor) + 1.0)


def deepseek_v2(c: Any) -> Architecture:
    plain = mlp_of(c, has_bias=False)
    expert = replace(plain, size=c.moe_intermediate_size)
    limits = (c.n_group, c.topk_group)
    has_groups = c.topk_method == "group_limited_greedy" and c.topk_group
    groups, top_groups = limits if has_groups else (1, 1)
    moe = moe_of(
        c,
        expert=expert,
        is_normalized=False,
        is_precise=True,
        groups=groups,
        top_groups=top_groups,
        rated_by=1,
        scale=c.routed_scaling_factor,
        shared=replace(expert, size=expert.size * c.n_shared_experts),
    )
    numbers = range(c.first_k_dense_replace, c.num_hidden_layers)
    mlp = mlps_with_experts(c, moe, numbers, plain)
    return _latent_like(c, inner=shared_expert_sources("mlp.shared_experts"), mlp=mlp)


_olmoe = derive_row(llama_like, qk_norm="all", mlp=moe_of)
_latent_moe = derive_row(
    _latent_like, inner=SIGMOID, left_out=_predicting_layers_pattern
)

ROWS: dict[str, Row] = {
    "mixtral": derive_row(llama_like, inner=MIXTRAL, mlp=moe_of),
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": derive_row(llama_like, qk_norm="head", mlp=_experts_in_some_layers),
    "olmoe": _olmoe,
    "flex_olmo": derive_row(_olmoe, inner=SANDWICH, norms="after"),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), granitemoe),
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "phimoe": phimoe,
    "ernie4_5_moe": ernie4_5_moe,
    "glm4_moe": glm4_moe,
    "exaone_moe": derive_row(
        llama_like,
        inner=SIGMOID | _choice_bias_source("mlp", "mlp.gate"),
        attention=exaone_attention,
        qk_norm="head",
        mlp=_experts_by_layer_kind,
        left_out=r"mtp\.",  # of several tokens at once
    ),
    "solar_open": derive_row(
        llama_like, inner=SIGMOID, attention=WITHOUT_OUT_BIAS, mlp=sigmoid_moe
    ),
    "dots1": derive_row(
        llama_like, inner=SIGMOID, qk_norm="head", mlp=_experts_behind_plain_layers
    ),
    "minimax_m2": derive_row(
        llama_like,
        inner=MIXTRAL | _choice_bias_source("block_sparse_moe", "mlp"),
        qk_norm="all",
        mlp=partial(moe_of, scores="sigmoid", has_choice_bias=True),
    ),
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": derive_row(_latent_moe, mlp=_experts_behind_plain_layers),
    "glm4_moe_lite": derive_row(_latent_moe, mlp=_experts_by_layer_kind),
    "youtu": _latent_like,
}

"""Configs of small models of further families, with names as in FIELDS of conftest."""

from __future__ import annotations

from typing import Any

GROUPED: dict[str, Any] = {"intermediate_size": 128, "num_key_value_heads": 2}
BIGGER = {"intermediate_size": 128}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7} | {
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}
SIGMOID = {"num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 2} | {
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
} | {
    "v_head_dim": 12,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | {
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
FURTHER: dict[str, dict[str, Any]] = {
    "granite": GROUPED | MULTIPLIERS,
    "granitemoe": GROUPED
    | MULTIPLIERS
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": GROUPED
    | MULTIPLIERS
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "hyperclovax": GROUPED | MULTIPLIERS | {"use_post_norm": True},
    "cohere": GROUPED | {"logit_scale": 0.7},
    "cohere-qk": GROUPED | {"use_qk_norm": True},
    "cohere2": GROUPED | {"sliding_window": 13, "sliding_window_pattern": 3},
    "olmo": GROUPED | {"clip_qkv": 0.9},
    "olmo3": GROUPED
    | {
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "olmoe": GROUPED | {"num_experts_per_tok": 2, "num_experts": 6},
    "flex_olmo": GROUPED
    | {"num_experts_per_tok": 2, "num_experts": 6, "norm_topk_prob": True},
    "arcee": GROUPED,
    "jais2": GROUPED,
    "nemotron": GROUPED | {"intermediate_size": 64},
    "persimmon": BIGGER,
    "nanochat": GROUPED | {"final_logit_softcapping": 2.0},
    "cwm": GROUPED | {"sliding_window": 13, "head_dim": 16, "bos_token_id": 1},
    "ministral": GROUPED
    | {
        "sliding_window": 13,
        "head_dim": 32,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "ministral3": GROUPED | {"head_dim": 32},
    "internlm3": GROUPED | {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "seed_oss": GROUPED | {"head_dim": 32},
    "ernie4_5": GROUPED | {"head_dim": 32},
    "ernie4_5-biases": GROUPED | {"use_bias": True},
    "helium": GROUPED | {"head_dim": 16},
    "glm": GROUPED | {"head_dim": 16},
    "smollm3": GROUPED
    | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 13},
    "exaone4": GROUPED | {"sliding_window": 13, "sliding_window_pattern": 2},
    "exaone4-near": GROUPED
    | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "hunyuan_v1_dense": GROUPED | {"head_dim": 32},
    "hunyuan_v1_dense-alpha": GROUPED
    | {
        "head_dim": 32,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "vaultgemma": GROUPED
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 13,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "qwen2_moe": GROUPED
    | {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 48}
    | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "phimoe": GROUPED
    | {"num_experts_per_tok": 2, "num_local_experts": 6}
    # so great that some experts are near to each other, and others not
    | {"router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True}
    | {"sliding_window": 17},
    "phimoe-long": GROUPED
    | {"num_experts_per_tok": 2, "num_local_experts": 6}
    | {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 256,
        },
    },
    "ernie4_5_moe": GROUPED
    | {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 3},
    "glm4_moe": GROUPED | SIGMOID | {"use_qk_norm": True, "attention_bias": True},
    "solar_open": GROUPED | SIGMOID | {"head_dim": 16},
    "dots1": GROUPED
    | SIGMOID
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_moe": GROUPED
    | {"num_experts": 6, "moe_topk": [2, 3, 1], "head_dim": 32},
    "gemma3": {
        "text_config": GROUPED
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 11,
            "sliding_window_pattern": 2,
        },
        "vision_config": {},
    },
    "mistral3": {
        "text_config": GROUPED
        | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", "head_dim": 8},
    },
    "biogpt": BIGGER,
    "xglm": {"ffn_dim": 96, "scale_embedding": False},
    "gpt_neox_japanese": {"rotary_pct": 0.5, "intermediate_multiple_size": 2},
    "apertus": GROUPED | {"head_dim": 16},
    "exaone_moe": GROUPED
    | {"sliding_window": 13, "sliding_window_pattern": 2, "moe_intermediate_size": 24}
    | {"num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": GROUPED
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 13,
    }
    | {"intermediate_size": 48, "swiglu_limit": 0.02},
    "deepseek_v2": LATENT
    | {k: v for k, v in SIGMOID.items() if "group" not in k}
    | {"first_k_dense_replace": 1},
    "deepseek_v2-groups": LATENT
    | SIGMOID
    | {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "rope_scaling": YARN,
    },
    "deepseek_v3": LATENT
    | SIGMOID
    | {"first_k_dense_replace": 1, "rope_scaling": YARN},
    "deepseek_v3-biases": LATENT
    | SIGMOID
    | {"first_k_dense_replace": 3, "attention_bias": True, "rope_interleave": False},
    "glm4_moe_lite": LATENT | SIGMOID,
    "youtu": LATENT | {"tie_word_embeddings": False},
    "minimax_m2": GROUPED
    | {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 32,
        "rotary_dim": 16,
    },
}

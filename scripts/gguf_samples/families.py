"""The samples: a small config of each architecture, and what its converter needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A model to convert. `hparams` are keys that published configs have and
    transformers drops."""

    name: str
    model_type: str
    vocabulary: str
    fields: dict[str, Any]
    hparams: dict[str, Any] = field(default_factory=dict)
    num_unused: int = 0  # rows of the embedding beyond the tokenizer's tokens


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = SHAPE | {"num_key_value_heads": 2, "intermediate_size": 48}
WIDE_HEADS = GROUPED | {"head_dim": 16}  # four heads are wider than the hidden size
TIED = {"tie_word_embeddings": True}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 5.0, 9.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
GEMMA = WIDE_HEADS | TIED | {"hidden_activation": "gelu_pytorch_tanh"}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LATENT: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2 = (
    LATENT
    | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    | {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "scoring_func": "softmax"}
    | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
)
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}
OSS = WIDE_HEADS | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 8,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128}
NEOX = SHAPE | {"intermediate_size": 64}
SAMPLES = (
    Sample("llama", "llama", "llama", WIDE_HEADS),
    Sample("qwen2", "qwen2", "qwen2", GROUPED, num_unused=6),
    Sample("gemma", "gemma", "gemma", GEMMA | {"num_key_value_heads": 1}),
    Sample("gpt2", "gpt2", "gpt2", GPT2 | TIED),
    Sample(
        "llama3", "llama", "llama3", GROUPED | TIED | {"rope_parameters": LLAMA3_ROPE}
    ),
    Sample("mistral", "mistral", "small", WIDE_HEADS | {"sliding_window": None}),
    Sample(
        "mixtral",
        "mixtral",
        "small",
        GROUPED | {"num_local_experts": 4, "intermediate_size": 32},
    ),
    Sample("qwen3", "qwen3", "qwen2", WIDE_HEADS | TIED),
    Sample(
        "qwen2_moe",
        "qwen2_moe",
        "small",
        GROUPED
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
    ),
    Sample(
        "qwen3_moe",
        "qwen3_moe",
        "small",
        WIDE_HEADS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True},
    ),
    Sample(
        "gemma2",
        "gemma2",
        "gemma",
        GEMMA
        | {"sliding_window": 8, "query_pre_attn_scalar": 16}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    Sample(
        "gemma3",
        "gemma3_text",
        "gemma",
        GEMMA
        | {"sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}
        | {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"rope_parameters": GEMMA3_ROPE},
    ),
    Sample("phi3", "phi3", "phi3", GROUPED | {"original_max_position_embeddings": 128}),
    # llama.cpp takes the short factors for contexts of 256 and less.
    Sample(
        "phi3-longrope",
        "phi3",
        "phi3",
        GROUPED
        | {"original_max_position_embeddings": 256, "max_position_embeddings": 1024}
        | {"rope_parameters": LONGROPE},
    ),
    Sample(
        "falcon",
        "falcon",
        "falcon",
        SHAPE | TIED | {"multi_query": True, "parallel_attn": True, "num_kv_heads": 1},
    ),
    Sample(
        "falcon-new",
        "falcon",
        "small",
        SHAPE | TIED | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Sample(
        "bloom",
        "bloom",
        "bloom",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 128},
    ),
    Sample(
        "gpt_neox", "gpt_neox", "neox", NEOX | {"rotary_pct": 0.5}, {"rotary_pct": 0.5}
    ),
    Sample(
        "gpt_neox-serial",
        "gpt_neox",
        "small",
        NEOX | {"rotary_pct": 1.0, "use_parallel_residual": False},
        {"rotary_pct": 1.0},
    ),
    Sample(
        "starcoder2",
        "starcoder2",
        "starcoder",
        GROUPED | TIED | {"sliding_window": None},
    ),
    Sample("olmo2", "olmo2", "dbrx", GROUPED),
    Sample("granite", "granite", "refact", GROUPED | TIED | MULTIPLIERS),
    Sample("cohere", "cohere", "cohere", GROUPED | {"logit_scale": 0.7}),
    # llama.cpp itself loads it only with 64 layers or more.
    Sample(
        "cohere-qk",
        "cohere",
        "small",
        GROUPED | {"logit_scale": 0.7, "use_qk_norm": True},
    ),
    Sample("deepseek_v2", "deepseek_v2", "deepseek", DEEPSEEK_V2 | {"q_lora_rank": 24}),
    # llama.cpp itself loads it only with the 27 layers of the published one.
    Sample(
        "deepseek_v2-lite", "deepseek_v2", "small", DEEPSEEK_V2 | {"q_lora_rank": None}
    ),
    Sample(
        "deepseek_v3",
        "deepseek_v3",
        "small",
        LATENT
        | {"q_lora_rank": 24, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
        | {
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    Sample("gpt_oss", "gpt_oss", "gpt_oss", OSS),
)

# What llama-quantize gets. Rows of 256 are one block of a K form. Others take forms of 32.
KFORMS = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
} | TIED
SMALL = KFORMS | {"hidden_size": 64, "intermediate_size": 64}


@dataclass(frozen=True)
class Quantized:
    """A model to quantize into each of some forms."""

    name: str
    fields: dict[str, Any]
    forms: tuple[str, ...]
    model_type: str = "llama"


QUANTIZED = (
    Quantized("kforms", KFORMS, ("Q4_K_M", "Q5_K_M", "Q2_K", "Q3_K_M", "Q6_K")),
    Quantized("kforms", SMALL, ("Q8_0", "IQ4_NL")),
    # Only the rows of one matrix are 256 long.
    Quantized("fallback", KFORMS | {"hidden_size": 96}, ("Q4_K_M",)),
    Quantized("fallback", SMALL | {"intermediate_size": 256}, ("IQ4_XS",)),
    Quantized("legacy", SMALL, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16")),
    Quantized("gpt_oss", OSS, ("MXFP4_MOE",), "gpt_oss"),
)

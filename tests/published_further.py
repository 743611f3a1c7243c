"""Configs of published models of further families, from memory; as in published_configs."""

from __future__ import annotations

from typing import Any


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    }


FURTHER: dict[str, tuple[float, dict[str, Any]]] = {
    "ibm-granite/granite-3.1-8b-base": (
        8.171,
        {
            "model_type": "granite",
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
        }
        | {
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
            "tie_word_embeddings": True,
        }
        | {"attention_dropout": 0.1, "rope_theta": 10000000.0, "rope_scaling": None}
        | sizes(4096, 12800, 40, 32, 8, 49155),
    ),
    "ibm-granite/granite-3.1-1b-a400m-base": (
        1.335,
        {"model_type": "granitemoe", "num_local_experts": 32, "num_experts_per_tok": 8}
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
        | {
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        }
        | sizes(1024, 512, 24, 16, 8, 49155),
    ),
    "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B": (
        14.748,
        {
            "model_type": "hyperclovax",
            "attention_multiplier": 0.0078125,
            "use_post_norm": True,
        }
        | {
            "embedding_multiplier": 10.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 0.125,
        }
        | {"head_dim": 128}
        | sizes(6144, 14336, 38, 48, 8, 110592),
    ),
    "CohereForAI/c4ai-command-r-v01": (
        34.981,
        {"model_type": "cohere", "logit_scale": 0.0625, "layer_norm_eps": 1e-5}
        | {"rope_theta": 8000000.0, "use_qk_norm": False, "model_max_length": 131072}
        | sizes(8192, 22528, 40, 64, 64, 256000),
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        8.028,
        {"model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 4096}
        | {
            "sliding_window_pattern": 4,
            "cache_implementation": "hybrid",
            "rotary_pct": 1.0,
        }
        | {
            "order_of_interleaved_layers": "local_attn_first",
            "use_gated_activation": True,
        }
        | {"position_embedding_type": "rope_gptj", "use_parallel_block": True}
        | sizes(4096, 14336, 32, 32, 8, 256000),
    ),
    "allenai/OLMo-7B-hf": (
        6.888,
        {"model_type": "olmo"} | sizes(4096, 11008, 32, 32, 32, 50304),
    ),
    "allenai/Olmo-3-1025-7B": (
        7.298,
        {"model_type": "olmo3", "sliding_window": 4096, "rope_theta": 500000}
        | sizes(4096, 11008, 32, 32, 32, 100278),
    ),
    "allenai/OLMoE-1B-7B-0924": (
        6.919,
        {
            "model_type": "olmoe",
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "clip_qkv": None,
        }
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.01}
        | sizes(2048, 1024, 16, 16, 16, 50304),
    ),
    "allenai/FlexOlmo-7x7B-1T": (
        33.27,
        {"model_type": "flex_olmo", "num_experts": 7, "num_experts_per_tok": 5}
        | {"norm_topk_prob": False}
        | sizes(4096, 11008, 32, 32, 32, 100352),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        3.075,
        {
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
        }
        | {
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "max_window_layers": 28,
            "sliding_window": None,
        }
        | {"rope_theta": 5000000.0, "layer_types": ["full_attention"] * 36}
        | sizes(2048, 11008, 36, 16, 4, 128256),
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (
        1.279,
        {
            "model_type": "exaone4",
            "sliding_window": None,
            "sliding_window_pattern": None,
        }
        | {
            "head_dim": 64,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 30,
        }
        | sizes(2048, 4096, 30, 32, 8, 102400),
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        0.3607,
        {
            "model_type": "ernie4_5",
            "head_dim": 128,
            "use_bias": False,
            "rope_theta": 500000.0,
        }
        | {"tie_word_embeddings": True}
        | sizes(1024, 3072, 18, 16, 2, 103424),
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": (
        21.825,
        {
            "model_type": "ernie4_5_moe",
            "moe_num_experts": 64,
            "moe_k": 6,
            "use_bias": False,
        }
        | {
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        }
        | {
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "tie_word_embeddings": True,
        }
        | {"moe_use_aux_free": True, "num_nextn_predict_layers": 1}
        | sizes(2560, 12288, 28, 20, 4, 103424),
    ),
    "THUDM/glm-4-9b-hf": (
        9.400,
        {"model_type": "glm", "head_dim": 128, "partial_rotary_factor": 0.5}
        | {"attention_bias": True, "rms_norm_eps": 1.5625e-07}
        | sizes(4096, 13696, 40, 32, 2, 151552),
    ),
    "zai-org/GLM-4.5-Air": (
        106.852,
        {"model_type": "glm4_moe", "head_dim": 128, "partial_rotary_factor": 0.5}
        | {"attention_bias": True, "n_routed_experts": 128, "num_experts_per_tok": 8}
        | {
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        }
        | {
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "routed_scaling_factor": 1.0,
        }
        | {"norm_topk_prob": True, "num_nextn_predict_layers": 1}
        | sizes(4096, 10944, 46, 96, 8, 151552),
    ),
    "upstage/Solar-Open-100B": (
        102.65,
        {"model_type": "solar_open", "n_routed_experts": 128, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1280, "num_experts_per_tok": 8, "head_dim": 128}
        | {"hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "vocab_size": 196608},
    ),
    "rednote-hilab/dots.llm1.base": (
        142.774,
        {"model_type": "dots1", "n_routed_experts": 128, "num_experts_per_tok": 6}
        | {
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        }
        | {
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "noaux_tc",
        }
        | {"sliding_window": None}
        | sizes(4096, 10944, 62, 32, 32, 152064),
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        15.706,
        {"model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
        }
        | {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        }
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
            }
            | {
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            }
        }
        | sizes(2048, 10944, 27, 16, 16, 102400),
    ),
    "deepseek-ai/DeepSeek-V3": (
        671.026,
        {"model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8}
        | {"topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
        | sizes(7168, 18432, 61, 128, 128, 129280),
    ),
    "openai/gpt-oss-20b": (
        20.915,
        {"model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 32}
        | {"num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128}
        | {"attention_bias": True, "swiglu_limit": 7.0, "rope_theta": 150000}
        | sizes(2880, 2880, 24, 64, 8, 201088),
    ),
    "MiniMaxAI/MiniMax-M2": (
        228.69,
        {"model_type": "minimax_m2", "num_local_experts": 256, "num_experts_per_tok": 8}
        | {
            "head_dim": 128,
            "rotary_dim": 64,
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
        }
        | sizes(3072, 1536, 62, 48, 8, 200064),
    ),
    "tencent/Hunyuan-A13B-Instruct": (
        80.393,
        {
            "model_type": "hunyuan_v1_moe",
            "num_experts": 64,
            "moe_topk": [8] * 32,
            "head_dim": 128,
        }
        | {
            "num_shared_expert": [1] * 32,
            "tie_word_embeddings": True,
            "use_qk_norm": True,
        }
        | {
            "rope_scaling": {
                "type": "dynamic",
                "factor": 1.0,
                "alpha": 1000.0,
                "mscale": 1.0,
            }
        }
        | sizes(4096, 3072, 32, 32, 8, 128167),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        14.316,
        {"model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "use_sliding_window": False,
        }
        | {"max_window_layers": 21, "sliding_window": 32768}
        | sizes(2048, 5632, 24, 16, 16, 151936),
    ),
    "microsoft/Phi-3.5-MoE-instruct": (
        41.873,
        {"model_type": "phimoe", "num_local_experts": 16, "num_experts_per_tok": 2}
        | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01}
        | {"input_jitter_noise": 0.01, "sliding_window": 131072, "hidden_dropout": 0.0}
        | {"original_max_position_embeddings": 4096}
        | {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 64,
                "long_factor": [1.5] * 64,
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096,
            }
        }
        | sizes(4096, 6400, 32, 32, 8, 32064),
    ),
    "google/gemma-3-4b-pt": (  # without the 0.42 for images
        3.880,
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "image_token_index": 262144,
        }
        | {
            "vision_config": {
                "hidden_size": 1152,
                "num_hidden_layers": 27,
                "image_size": 896,
            }
        }
        | {
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240}
            | {
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "model_type": "gemma3_text",
            }
            | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
        },
    ),
    "mistralai/Mistral-Small-3.1-24B-Base-2503": (  # without the 0.44 for images
        23.572,
        {"model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2}
        | {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "head_dim": 64,
            }
        }
        | {"vision_feature_layer": -1, "tie_word_embeddings": False}
        | {
            "text_config": {
                "model_type": "mistral",
                "head_dim": 128,
                "sliding_window": None,
            }
            | sizes(5120, 32768, 40, 32, 8, 131072)
        },
    ),
    "mistralai/Ministral-3-8B-Base-2512": (  # without the 0.42 for images
        8.490,
        {"model_type": "mistral3", "tie_word_embeddings": False}
        | {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "head_dim": 64,
            }
        }
        | {
            "text_config": {"model_type": "ministral3", "head_dim": 128}
            | sizes(4096, 14336, 34, 32, 8, 131072)
        },
    ),
    "nvidia/Minitron-4B-Base": (
        4.190,
        {"model_type": "nemotron", "head_dim": 128, "partial_rotary_factor": 0.5}
        | {
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
        }
        | sizes(3072, 9216, 32, 24, 8, 256000),
    ),
    "ByteDance-Seed/Seed-OSS-36B-Base": (
        36.151,
        {
            "model_type": "seed_oss",
            "head_dim": 128,
            "attention_bias": True,
            "mlp_bias": False,
        }
        | {"attention_out_bias": False, "residual_dropout": 0.1}
        | sizes(5120, 27648, 64, 80, 8, 155136),
    ),
    "arcee-ai/AFM-4.5B-Base": (
        4.619,
        {"model_type": "arcee", "head_dim": 128, "hidden_act": "relu2"}
        | {"rope_scaling": {"type": "yarn", "factor": 20.0, "mscale": 1.0}}
        | {"original_max_position_embeddings": 3277, "max_position_embeddings": 65536}
        | sizes(2560, 18432, 36, 20, 4, 128004),
    ),
    "kyutai/helium-1-preview-2b": (
        2.173,
        {"model_type": "helium", "head_dim": 128}
        | sizes(2560, 7040, 24, 20, 20, 48000),
    ),
    "adept/persimmon-8b-base": (
        9.396,
        {"model_type": "persimmon", "hidden_size": 4096, "intermediate_size": 16384}
        | {"num_hidden_layers": 36, "num_attention_heads": 64, "vocab_size": 262144},
    ),
    "inceptionai/Jais-2-8B-Chat": (
        8.090,
        {
            "model_type": "jais2",
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 128,
        }
        | sizes(3328, 26624, 32, 26, 26, 150272),
    ),
    "karpathy/nanochat-d32": (
        1.879,
        {"model_type": "nanochat", "final_logit_softcapping": 15.0}
        | sizes(2048, 8192, 32, 16, 16, 65536),
    ),
    "swiss-ai/Apertus-8B-2509": (
        8.053,
        {
            "model_type": "apertus",
            "hidden_act": "xielu",
            "qk_norm": True,
            "post_norm": False,
        }
        | sizes(4096, 21504, 32, 32, 8, 131072),
    ),
    "facebook/cwm": (
        32.566,
        {"model_type": "cwm", "sliding_window": 8192}
        | sizes(6144, 21504, 64, 48, 8, 128256),
    ),
    "internlm/internlm3-8b-instruct": (
        8.804,
        {"model_type": "internlm3", "qkv_bias": False, "bias": False, "head_dim": 128}
        | {"rope_theta": 50000000}
        | sizes(4096, 10240, 48, 32, 2, 128512),
    ),
    "google/vaultgemma-1b": (
        1.039,
        {"model_type": "vaultgemma", "head_dim": 256, "query_pre_attn_scalar": 256}
        | {"sliding_window": 512}
        | sizes(1152, 6912, 26, 4, 4, 256000),
    ),
    "microsoft/biogpt": (
        0.3468,
        {"model_type": "biogpt", "hidden_size": 1024, "intermediate_size": 4096}
        | {"num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 42384}
        | {
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.1,
            "scale_embedding": True,
        },
    ),
    "facebook/xglm-564M": (
        0.5645,
        {"model_type": "xglm", "d_model": 1024, "ffn_dim": 4096, "num_layers": 24}
        | {"attention_heads": 16, "vocab_size": 256008, "scale_embedding": True}
        | {"layerdrop": 0.0, "decoder_start_token_id": 2},
    ),
}

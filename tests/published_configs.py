"""Configs of published models, written down from memory of them; parameters in billions.

Each has the fields of its config.json that matter or that could be misread: sizes, and settings
that change nothing.
"""

from __future__ import annotations

from typing import Any

from tests.published_further import FURTHER, sizes

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "use_cache": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}
QWEN = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "use_mrope": False,
    "rms_norm_eps": 1e-6,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = FURTHER | {
    "meta-llama/Llama-2-7b-hf": (
        6.738,
        LLAMA | sizes(4096, 11008, 32, 32, 32, 32000) | {"rms_norm_eps": 1e-5},
    ),
    "meta-llama/Llama-2-70b-hf": (68.977, LLAMA | sizes(8192, 28672, 80, 64, 8, 32000)),
    "meta-llama/Meta-Llama-3-8B": (
        8.030,
        LLAMA | sizes(4096, 14336, 32, 32, 8, 128256) | {"rope_theta": 500000.0},
    ),
    "meta-llama/Llama-3.1-8B": (
        8.030,
        LLAMA
        | sizes(4096, 14336, 32, 32, 8, 128256)
        | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "mlp_bias": False}
        | {"max_position_embeddings": 131072},
    ),
    "meta-llama/Llama-3.2-1B": (
        1.236,
        LLAMA
        | sizes(2048, 8192, 16, 32, 8, 128256)
        | {
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_scaling": LLAMA3_ROPE | {"factor": 32.0},
        }
        | {"max_position_embeddings": 131072},
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        1.100,
        LLAMA | sizes(2048, 5632, 22, 32, 4, 32000),
    ),
    "HuggingFaceTB/SmolLM2-135M": (
        0.1345,
        LLAMA
        | sizes(576, 1536, 30, 9, 3, 49152)
        | {
            "tie_word_embeddings": True,
            "rope_interleaved": False,
            "is_llama_config": True,
        }
        | {"rope_scaling": None, "rope_theta": 100000},
    ),
    "01-ai/Yi-6B": (6.061, LLAMA | sizes(4096, 11008, 32, 32, 4, 64000)),
    "mistralai/Mistral-7B-v0.1": (
        7.242,
        {"model_type": "mistral", "sliding_window": 4096, "hidden_act": "silu"}
        | sizes(4096, 14336, 32, 32, 8, 32000),
    ),
    "mistralai/Mistral-7B-v0.3": (
        7.248,
        {"model_type": "mistral", "sliding_window": None}
        | sizes(4096, 14336, 32, 32, 8, 32768),
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        46.703,
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
        | {
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        }
        | sizes(4096, 14336, 32, 32, 8, 32000),
    ),
    "Qwen/Qwen2-7B": (
        7.616,
        QWEN
        | {"model_type": "qwen2", "sliding_window": 131072}
        | sizes(3584, 18944, 28, 28, 4, 152064),
    ),
    "Qwen/Qwen2.5-0.5B": (
        0.494,
        QWEN
        | {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 32768}
        | {"max_window_layers": 24}
        | sizes(896, 4864, 24, 14, 2, 151936),
    ),
    "Qwen/Qwen3-8B": (
        8.191,
        QWEN
        | {
            "model_type": "qwen3",
            "head_dim": 128,
            "attention_bias": False,
            "rope_scaling": None,
        }
        | {"max_window_layers": 36, "sliding_window": None}
        | sizes(4096, 12288, 36, 32, 8, 151936),
    ),
    "Qwen/Qwen3-30B-A3B": (
        30.532,
        QWEN
        | {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128}
        | {
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        }
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        }
        | sizes(2048, 6144, 48, 32, 4, 151936),
    ),
    "google/gemma-2b": (
        2.506,
        {
            "model_type": "gemma",
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
        }
        | sizes(2048, 16384, 18, 8, 1, 256000),
    ),
    "google/gemma-2-9b": (
        9.242,
        {"model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 256}
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        }
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
        | {"cache_implementation": "hybrid", "sliding_window_size": 4096}
        | sizes(3584, 14336, 42, 16, 8, 256000),
    ),
    "google/gemma-3-1b-it": (
        1.000,
        {"model_type": "gemma3_text", "head_dim": 256, "query_pre_attn_scalar": 256}
        | {
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000,
        }
        | {"rope_theta": 1000000, "hidden_activation": "gelu_pytorch_tanh"}
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_scaling": None,
        }
        | sizes(1152, 6912, 26, 4, 1, 262144),
    ),
    "microsoft/phi-2": (
        2.780,
        {"model_type": "phi", "partial_rotary_factor": 0.4, "qk_layernorm": False}
        | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "resid_pdrop": 0.1}
        | sizes(2560, 10240, 32, 32, 32, 51200),
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        3.821,
        {
            "model_type": "phi3",
            "sliding_window": 2047,
            "original_max_position_embeddings": 4096,
        }
        | {"rope_scaling": None, "resid_pdrop": 0.0}
        | {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000}
        | sizes(3072, 8192, 32, 32, 32, 32064),
    ),
    "microsoft/phi-4": (
        14.660,
        {"model_type": "phi3", "sliding_window": None, "rope_theta": 250000}
        | {"original_max_position_embeddings": 16384, "max_position_embeddings": 16384}
        | {"bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349}
        | sizes(5120, 17920, 40, 40, 10, 100352),
    ),
    "stabilityai/stablelm-2-1_6b": (
        1.645,
        {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.25}
        | {"hidden_dropout": 0.0, "layer_norm_eps": 1e-5, "rope_theta": 10000}
        | sizes(2048, 5632, 24, 32, 32, 100352),
    ),
    "bigcode/starcoder2-3b": (
        3.030,
        {"model_type": "starcoder2", "use_bias": True, "sliding_window": 4096}
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "mlp_type": "default",
            "norm_type": "layer_norm",
        }
        | {
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "tie_word_embeddings": True,
        }
        | {"norm_epsilon": 1e-5}
        | sizes(3072, 12288, 30, 24, 2, 49152),
    ),
    "allenai/OLMo-2-1124-7B": (
        7.299,
        {"model_type": "olmo2", "rms_norm_eps": 1e-6, "rope_theta": 500000}
        | sizes(4096, 11008, 32, 32, 32, 100352),
    ),
    "zai-org/GLM-4-9B-0414": (
        9.400,
        {"model_type": "glm4", "head_dim": 128, "partial_rotary_factor": 0.5}
        | {"attention_bias": True, "rms_norm_eps": 1e-5, "pad_token_id": 151329}
        | sizes(4096, 13696, 40, 32, 2, 151552),
    ),
    "facebook/opt-125m": (
        0.1252,
        {
            "model_type": "opt",
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
        }
        | {
            "num_attention_heads": 12,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        }
        | {"word_embed_proj_dim": 768, "do_layer_norm_before": True, "prefix": "</s>"}
        | {
            "_remove_final_layer_norm": False,
            "dropout": 0.1,
            "layerdrop": 0.0,
            "init_std": 0.02,
        },
    ),
    "facebook/opt-350m": (
        0.3312,
        {
            "model_type": "opt",
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
        }
        | {
            "num_attention_heads": 16,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        }
        | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "facebook/opt-66b": (
        65.718,
        {
            "model_type": "opt",
            "hidden_size": 9216,
            "ffn_dim": 36864,
            "num_hidden_layers": 64,
        }
        | {
            "num_attention_heads": 72,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        }
        | {"word_embed_proj_dim": 9216, "activation_dropout": 0.0},
    ),
    "openai-community/gpt2": (
        0.1244,
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        }
        | {"n_ctx": 1024, "activation_function": "gelu_new", "vocab_size": 50257}
        | {
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "summary_proj_to_labels": True,
        }
        | {
            "task_specific_params": {
                "text-generation": {"do_sample": True, "max_length": 50}
            }
        },
    ),
    "bigcode/starcoder": (
        15.518,
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48}
        | {
            "n_positions": 8192,
            "n_inner": 24576,
            "multi_query": True,
            "vocab_size": 49152,
        }
        | {"activation_function": "gelu", "attention_softmax_in_fp32": True}
        | {"scale_attention_softmax_in_fp32": True, "inference_runner": 0},
    ),
    "EleutherAI/gpt-neo-2.7B": (
        2.651,
        {
            "model_type": "gpt_neo",
            "hidden_size": 2560,
            "num_layers": 32,
            "num_heads": 20,
        }
        | {"attention_types": [[["global", "local"], 16]], "window_size": 256}
        | {"attention_layers": ["global", "local"] * 16, "intermediate_size": None}
        | {"vocab_size": 50257, "max_position_embeddings": 2048, "resid_dropout": 0},
    ),
    "EleutherAI/pythia-70m": (
        0.0704,
        {"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048}
        | {"num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 50304}
        | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True},
    ),
    "EleutherAI/gpt-neox-20b": (
        20.555,
        {"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576}
        | {"num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432}
        | {
            "rotary_pct": 0.25,
            "hidden_act": "gelu_fast",
            "attention_probs_dropout_prob": 0,
        },
    ),
    "EleutherAI/gpt-j-6b": (
        6.051,
        {
            "model_type": "gptj",
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "rotary_dim": 64,
        }
        | {
            "n_positions": 2048,
            "vocab_size": 50400,
            "rotary": True,
            "gradient_checkpointing": False,
        }
        | {"tie_word_embeddings": False, "scale_attn_weights": True},
    ),
    "Salesforce/codegen-350M-mono": (
        0.3567,
        {
            "model_type": "codegen",
            "n_embd": 1024,
            "n_layer": 20,
            "n_head": 16,
            "rotary_dim": 32,
        }
        | {
            "n_positions": 2048,
            "n_ctx": 2048,
            "vocab_size": 51200,
            "tie_word_embeddings": False,
        },
    ),
    "tiiuae/falcon-7b": (
        6.922,
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "bias": False,
        }
        | {
            "num_attention_heads": 71,
            "multi_query": True,
            "parallel_attn": True,
            "alibi": False,
        }
        | {
            "new_decoder_architecture": False,
            "vocab_size": 65024,
            "apply_residual_connection_post_layernorm": False,
        },
    ),
    "tiiuae/falcon-40b": (
        41.303,
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "bias": False,
        }
        | {
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        }
        | {
            "parallel_attn": True,
            "alibi": False,
            "vocab_size": 65024,
            "multi_query": True,
        },
    ),
    "tiiuae/falcon-rw-1b": (
        1.312,
        {
            "model_type": "falcon",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "bias": True,
        }
        | {
            "num_attention_heads": 32,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
        }
        | {"vocab_size": 50304, "new_decoder_architecture": False},
    ),
    "mosaicml/mpt-7b": (
        6.649,
        {
            "model_type": "mpt",
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "vocab_size": 50432,
        }
        | {
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
        }
        | {
            "attn_config": {
                "alibi": True,
                "attn_impl": "torch",
                "clip_qkv": None,
                "qk_ln": False,
            }
        }
        | {
            "init_config": {"name": "kaiming_normal_"},
            "learned_pos_emb": True,
            "verbose": 0,
        },
    ),
    "bigscience/bloom-560m": (
        0.5592,
        {
            "model_type": "bloom",
            "n_embed": 1024,
            "n_layer": 24,
            "num_attention_heads": 16,
        }
        | {
            "vocab_size": 250880,
            "pretraining_tp": 1,
            "hidden_dropout": 0.0,
            "unk_token_id": 0,
        }
        | {"masked_softmax_fusion": True, "offset_alibi": 100, "seq_length": 2048}
        | {
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "attention_softmax_in_fp32": True,
        },
    ),
    "bigscience/bloom": (
        176.247,
        {
            "model_type": "bloom",
            "n_embed": 14336,
            "n_layer": 70,
            "num_attention_heads": 112,
        }
        | {"vocab_size": 250880, "pretraining_tp": 4, "slow_but_exact": False}
        | {"apply_residual_connection_post_layernorm": False, "seq_length": 2048},
    ),
}

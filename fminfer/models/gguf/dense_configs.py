"""Rows of GGUF architectures without experts: what each adds to the common fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fminfer.models.gguf.gguf_model import GgufModel
from fminfer.models.gguf.shared_fields import (
    FULL,
    Fields,
    has_tensor,
    read_layer_kinds,
    read_original_context,
    read_rope_fields,
    read_window_size,
)


def _cohere2(m: GgufModel) -> Fields:
    return {
        "logit_scale": m.read_number("logit_scale"),
        "sliding_window": m.read_integer("attention.sliding_window", least=1),
        "layer_types": read_layer_kinds(m, 4),
    }


def _olmo(m: GgufModel) -> Fields:
    # which its config does not have
    m.check_value("attention.layer_norm_epsilon", 1e-5)
    return {"clip_qkv": _read_clip(m)}


def _exaone4(m: GgufModel) -> Fields:
    """Only the large models have windows."""
    window = read_window_size(m)
    kinds = read_layer_kinds(m, 4) if window else [FULL] * m.num_layers
    return {"sliding_window": window, "layer_types": kinds}


def _mistral3(m: GgufModel) -> Fields:
    """Ministral 3, and Mistral Small 3, whose queries do not grow with their positions."""
    rope_fields = read_rope_fields(m)
    if log_multiplier := m.read_number("rope.scaling.yarn_log_multiplier", 0.0):
        # No key tells mscale. llama.cpp has 1, as all published ones.
        rope_fields |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    beta = m.read_number("attention.temperature_scale", 0.0)
    if beta:
        rope_fields |= {
            "llama_4_scaling_beta": beta,
            "original_max_position_embeddings": read_original_context(m),
        }
    model_type = "ministral3" if beta else "llama"
    return {"model_type": model_type, "rope_parameters": rope_fields}


def _stablelm(m: GgufModel) -> Fields:
    # Older files have it wrong. llama.cpp goes by the norm, too.
    m.check_value("use_parallel_residual", True, False)
    return {
        "use_parallel_residual": not has_tensor(m, "blk.0.ffn_norm.weight"),
        "qk_layernorm": has_tensor(m, "blk.0.attn_q_norm.weight"),
    }


def _mpt(m: GgufModel) -> Fields:
    m.check_value("feed_forward_length", 4 * m.hidden_size)
    # 0: it has other positions
    m.check_value("attention.max_alibi_bias", 8.0, 16.0)
    alibi = {"alibi_bias_max": int(m.read_number("attention.max_alibi_bias"))}
    return {
        "max_seq_len": m.context_length,
        "attn_config": alibi | {"clip_qkv": _read_clip(m)},
    }


def _read_clip(m: GgufModel) -> float | None:
    """Return the limit of queries, keys and values; None: there is none."""
    return m.read_number("attention.clamp_kqv", 0.0) or None


DENSE_ROWS: dict[str, Callable[[GgufModel], Fields] | Fields] = {
    **{name: {} for name in ("glm4", "ernie4_5", "arcee", "jais2", "nemotron")},
    # No key tells which layers have no positions. llama.cpp's are each fourth.
    "smollm3": {"no_rope_layer_interval": 4},
    "cohere2": _cohere2,
    "olmo": _olmo,
    "exaone4": _exaone4,
    "seed_oss": {
        "attention_out_bias": partial(has_tensor, name="blk.0.attn_output.bias")
    },
    "apertus": {},
    "mistral3": _mistral3,
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense"},
    "stablelm": _stablelm,
    "phi2": {"model_type": "phi"},
    "mpt": _mpt,
    "starcoder": {"model_type": "gpt_bigcode", "multi_query": True},
}

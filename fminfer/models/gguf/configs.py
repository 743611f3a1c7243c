"""Makes transformers' configs from GGUF metadata, with a row for what each architecture adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import transformers

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import naming_broken_files
from fminfer.models.gguf.dense_configs import DENSE_ROWS
from fminfer.models.gguf.gguf_model import GgufModel
from fminfer.models.gguf.mixture_configs import MIXTURE_ROWS
from fminfer.models.gguf.shared_fields import (
    ALIASES,
    SIGMOID,
    SOFTMAX,
    Fields,
    check_no_grouped_heads,
    find_query_scalar,
    make_common_fields,
    read_expert_fields,
    read_expert_size,
    read_head_dim,
    read_layer_kinds,
    read_original_context,
    read_rope_fields,
    read_rope_fields_by_kind,
    read_routed_fields,
    read_window_size,
)


def config_of(model: GgufModel) -> Any:
    """Return the config of transformers for a model.

    Raises:
        CheckpointError: its architecture does not run, or a key changes answers and is
        not known.
    """
    if (row := ROWS.get(model.arch)) is None:
        raise CheckpointError(
            f"{model.path} has the architecture {model.arch!r}, which does not run in "
            f"GGUF; these do: {', '.join(sorted(ROWS))}. fminfer families lists what "
            "runs in safetensors"
        )
    model.check_value("attention.causal", True)
    model.check_value("pooling_type", 0)
    with naming_broken_files(f"the metadata of {model.path}"):
        fields = make_common_fields(model)
        if callable(row):
            fields |= row(model)
        else:
            fields |= {
                name: value(model) if callable(value) else value
                for name, value in row.items()
            }
        fields |= {
            name: fields[usual] for name, usual in ALIASES.items() if usual in fields
        }
        model.check_unread_keys()
        return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def _llama(m: GgufModel) -> Fields:
    """Also Mistral's models, and Mixtral's."""
    if m.find_value("expert_count"):
        return {"model_type": "mixtral"} | read_expert_fields(m)
    m.check_value("expert_used_count", 0)
    return {}


def _qwen2moe(m: GgufModel) -> Fields:
    m.check_value("expert_weights_norm", False)
    shared = m.read_integer(
        "expert_shared_feed_forward_length", m.count_rows("blk.0.ffn_gate_shexp.weight")
    )
    return {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": read_expert_size(m),
        "shared_expert_intermediate_size": shared,
        **read_expert_fields(m),
    }


def _qwen3moe(m: GgufModel) -> Fields:
    m.check_value("expert_weights_norm", True)
    return {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "moe_intermediate_size": read_expert_size(m),
        **read_expert_fields(m),
    }


def _gemma3(m: GgufModel) -> Fields:
    return {
        "model_type": "gemma3_text",
        "rope_parameters": read_rope_fields_by_kind(m, 10000.0),
        "query_pre_attn_scalar": find_query_scalar(m, 62),
        "sliding_window": read_window_size(m),
        "layer_types": read_layer_kinds(m, 6 if read_window_size(m) else 1),
        "final_logit_softcapping": m.read_number("final_logit_softcapping", 0.0)
        or None,
    }


def _bloom(m: GgufModel) -> Fields:
    m.check_value("feed_forward_length", 4 * m.hidden_size)
    m.check_value("attention.max_alibi_bias", 8.0)
    return {}


def _gptneox(m: GgufModel) -> Fields:
    check_no_grouped_heads(m)
    is_parallel = m.find_value("use_parallel_residual") in (None, True)
    return {"model_type": "gpt_neox", "use_parallel_residual": is_parallel}


def _falcon(m: GgufModel) -> Fields:
    kv_heads = m.read_integer("attention.head_count_kv", m.heads)
    has_two = "blk.0.attn_norm_2.weight" in m.tensors
    is_new = has_two or kv_heads not in (1, m.heads)
    return {
        "multi_query": is_new or kv_heads == 1,
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": 2 if has_two else 1 if is_new else None,
    }


def _command_r(m: GgufModel) -> Fields:
    return {
        "model_type": "cohere",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in m.tensors,
        "logit_scale": m.read_number("logit_scale", 1.0),
    }


def _olmo2(m: GgufModel) -> Fields:
    """Also OLMo 3, which has windows."""
    if not read_window_size(m):
        return {}
    return {
        "model_type": "olmo3",
        "sliding_window": read_window_size(m),
        "layer_types": read_layer_kinds(m, 4),
        "rope_parameters": read_rope_fields_by_kind(m),
    }


def _granite(m: GgufModel) -> Fields:
    # otherwise there are no rotary positions
    m.check_value("rope.scaling.finetuned", True)
    if m.arch == "granite":
        m.check_value("expert_count", 0)
        m.check_value("expert_used_count", 0)
    return {
        "logits_scaling": m.read_number("logit_scale"),
        "residual_multiplier": m.read_number("residual_scale", 1.0) or 1.0,
        "embedding_multiplier": m.read_number("embedding_scale", 1.0) or 1.0,
        "attention_multiplier": m.read_number("attention.scale", 0.0)
        or read_head_dim(m) ** -0.5,
    }


def _granitemoe(m: GgufModel) -> Fields:
    shared_size = m.read_integer("expert_shared_feed_forward_length", 0)
    return {
        "model_type": "granitemoeshared" if shared_size else "granitemoe",
        "shared_intermediate_size": shared_size,
        **_granite(m),
        **read_expert_fields(m),
    }


def _deepseek2(m: GgufModel) -> Fields:
    """DeepSeek V2 and V3."""
    fields = _latent_fields(m) | read_routed_fields(m)
    if m.find_value("expert_gating_func") == SIGMOID:
        return fields | {
            "model_type": "deepseek_v3",
            "rope_interleave": True,
            "num_mtp_layers": 0,
        }
    m.check_value("expert_gating_func", SOFTMAX)
    m.check_value("expert_weights_norm", False)
    method = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return fields | {"model_type": "deepseek_v2", "topk_method": method}


def _latent_fields(m: GgufModel) -> Fields:
    """Return the sizes of latent attention. Older files have them without `_mla`."""
    turned_dim = m.read_integer("rope.dimension_count")
    key_dim = m.read_integer("attention.key_length")
    value_dim = m.read_integer("attention.value_length")
    if "blk.0.attn_k_b.0.weight" in m.tensors:
        key_dim = m.read_integer("attention.key_length_mla")
        value_dim = m.read_integer("attention.value_length_mla")
    rope_fields = read_rope_fields(m, size=turned_dim)
    # files store a tenth of mscale
    if log_multiplier := m.read_number("rope.scaling.yarn_log_multiplier", 0.0):
        rope_fields |= dict.fromkeys(
            ("mscale", "mscale_all_dim"), round(10 * log_multiplier, 6)
        )
    return {
        "qk_rope_head_dim": turned_dim,
        "qk_nope_head_dim": key_dim - turned_dim,
        "v_head_dim": value_dim,
        "head_dim": turned_dim,
        "q_lora_rank": m.read_integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": m.read_integer("attention.kv_lora_rank"),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in m.tensors,
        "rope_parameters": rope_fields,
    }


def _gpt_oss(m: GgufModel) -> Fields:
    size = read_expert_size(m)
    m.check_value("feed_forward_length", size)
    return read_expert_fields(m) | {
        "model_type": "gpt_oss",
        "intermediate_size": size,
        "sliding_window": m.read_integer("attention.sliding_window"),
        "layer_types": read_layer_kinds(m, 2),
        "rope_parameters": read_rope_fields(m)
        | {"truncate": False},  # which no key tells
    }


# The fields that each architecture adds to the common ones. A function returns all of them, or
# the value of one.
ROWS: dict[str, Callable[[GgufModel], Fields] | Fields] = {
    "llama": _llama,
    **{name: {} for name in ("qwen2", "qwen3", "gemma", "gpt2")},
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma2": {
        "query_pre_attn_scalar": partial(find_query_scalar, layers_of_27b=46),
        "sliding_window": methodcaller(
            "read_integer", "attention.sliding_window", 4096
        ),
        "layer_types": partial(read_layer_kinds, period=2),
        "attn_logit_softcapping": methodcaller(
            "read_number", "attn_logit_softcapping", 50.0
        ),
        "final_logit_softcapping": methodcaller(
            "read_number", "final_logit_softcapping", 30.0
        ),
    },
    "gemma3": _gemma3,
    "phi3": {
        "sliding_window": read_window_size,
        "original_max_position_embeddings": read_original_context,
    },
    "bloom": _bloom,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "starcoder2": {"sliding_window": read_window_size},
    "command-r": _command_r,
    "olmo2": _olmo2,
    **MIXTURE_ROWS,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    **DENSE_ROWS,
}

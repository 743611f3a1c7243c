"""Makes transformers' configs from GGUF metadata, with a row for what each architecture adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import transformers

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import broken_file_error, naming_broken_files
from fminfer.models.gguf.gguf_model import GgufModel
from fminfer.models.stored.gguf_file import MOST_STACKED, read_float_vector

Fields = dict[str, Any]
SOFTMAX = 1
SIGMOID = 2  # how experts are scored
FULL = "full_attention"
NEAR = "sliding_attention"
FREQUENCIES = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
PARTLY_TURNED = ("gptneox", "phi3")  # architectures that may turn a part of each head
# Their norms are LayerNorms; those of others are RMSNorms.
LAYER_NORMED = ("gpt2", "bloom", "gptneox", "falcon", "starcoder2", "command-r")
UNTURNED = ("gpt2", "bloom")
OF_ONE_SIZE = ("gptneox", "falcon")  # the size of their heads follows from others
QKV_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
# Names that some configs have for a field → its name here.
ALIASES = {
    "n_inner": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "num_local_experts": "num_experts",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "bias": "attention_bias",
    "qkv_bias": "attention_bias",
    "use_bias": "mlp_bias",
}


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
    model.check_value("nextn_predict_layers", 0)
    with naming_broken_files(f"the metadata of {model.path}"):
        fields = _common_fields(model)
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


def _common_fields(m: GgufModel) -> Fields:
    norm = "layer_norm" if m.arch in LAYER_NORMED else "layer_norm_rms"
    name = "layer_norm_eps" if m.arch in LAYER_NORMED else "rms_norm_eps"
    fields: Fields = {
        "model_type": m.arch,
        "vocab_size": m.count_rows("token_embd.weight"),
        "hidden_size": m.hidden_size,
        "intermediate_size": m.read_integer("feed_forward_length"),
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.read_integer("attention.head_count_kv", m.heads),
        "max_position_embeddings": m.context_length,
        name: m.read_number(f"attention.{norm}_epsilon"),
        "attention_bias": not m.tensors.keys().isdisjoint(QKV_BIASES),
        "mlp_bias": "blk.0.ffn_up.bias" in m.tensors,
        "tie_word_embeddings": "output.weight" not in m.tensors,
        # generation_config.json has these.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if m.arch in UNTURNED:
        _check_no_grouped_heads(m)
    elif m.arch != "deepseek2":  # whose attention is latent
        fields["rope_parameters"] = _rope_fields(m)
        if m.arch not in OF_ONE_SIZE:
            fields["head_dim"] = _head_dim(m)
    return fields


def _llama(m: GgufModel) -> Fields:
    """Also Mistral's models, and Mixtral's."""
    if m.find_value("expert_count"):
        return {"model_type": "mixtral"} | _expert_fields(m)
    m.check_value("expert_used_count", 0)
    return {}


def _expert_fields(m: GgufModel) -> Fields:
    """Return the fields of experts that a softmax chooses, and every layer has."""
    m.check_value("expert_gating_func", SOFTMAX)
    m.check_value("expert_weights_scale", 1.0, 0.0)
    return {
        "num_experts": m.read_integer("expert_count", most=MOST_STACKED),
        "num_experts_per_tok": m.read_integer("expert_used_count"),
    }


def _expert_size(m: GgufModel) -> int:
    """Return the inputs of an expert's last product, which older files do not state."""
    key = "expert_feed_forward_length"
    return (
        m.count_rows("blk.0.ffn_gate_exps.0.weight")
        if m.find_value(key) is None
        else m.read_integer(key)
    )


def _qwen2moe(m: GgufModel) -> Fields:
    m.check_value("expert_weights_norm", False)
    shared = m.read_integer(
        "expert_shared_feed_forward_length", m.count_rows("blk.0.ffn_gate_shexp.weight")
    )
    return {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": _expert_size(m),
        "shared_expert_intermediate_size": shared,
        **_expert_fields(m),
    }


def _qwen3moe(m: GgufModel) -> Fields:
    m.check_value("expert_weights_norm", True)
    return {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "moe_intermediate_size": _expert_size(m),
        **_expert_fields(m),
    }


def _query_scalar(m: GgufModel, layers_of_27b: int) -> int:
    """Return the scale of queries, which no key states: the largest model has its own."""
    return m.hidden_size // m.heads if m.num_layers == layers_of_27b else _head_dim(m)


def _gemma3(m: GgufModel) -> Fields:
    return {
        "model_type": "gemma3_text",
        "rope_parameters": _rope_fields_by_kind(m, 10000.0),
        "query_pre_attn_scalar": _query_scalar(m, 62),
        "sliding_window": _window_size(m),
        "layer_types": _layer_kinds(m, 6 if _window_size(m) else 1),
        "final_logit_softcapping": m.read_number("final_logit_softcapping", 0.0)
        or None,
    }


def _check_no_grouped_heads(m: GgufModel) -> None:
    m.check_value("attention.head_count_kv", m.heads)
    m.check_value("attention.key_length", m.hidden_size // m.heads)


def _bloom(m: GgufModel) -> Fields:
    m.check_value("feed_forward_length", 4 * m.hidden_size)
    m.check_value("attention.max_alibi_bias", 8.0)
    return {}


def _gptneox(m: GgufModel) -> Fields:
    _check_no_grouped_heads(m)
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
    if not _window_size(m):
        return {}
    return {
        "model_type": "olmo3",
        "sliding_window": _window_size(m),
        "layer_types": _layer_kinds(m, 4),
        "rope_parameters": _rope_fields_by_kind(m),
    }


def _granite(m: GgufModel) -> Fields:
    # otherwise there are no rotary positions
    m.check_value("rope.scaling.finetuned", True)
    return {
        "logits_scaling": m.read_number("logit_scale"),
        "residual_multiplier": m.read_number("residual_scale", 1.0) or 1.0,
        "embedding_multiplier": m.read_number("embedding_scale", 1.0) or 1.0,
        "attention_multiplier": m.read_number("attention.scale", 0.0)
        or _head_dim(m) ** -0.5,
    }


def _deepseek2(m: GgufModel) -> Fields:
    """DeepSeek V2 and V3."""
    groups = m.read_integer("expert_group_count", 1)
    top_groups = m.read_integer("expert_group_used_count", 1)
    fields = _latent_fields(m) | {
        "first_k_dense_replace": m.read_integer("leading_dense_block_count", 0),
        "n_routed_experts": m.read_integer("expert_count", most=MOST_STACKED),
        "num_experts_per_tok": m.read_integer("expert_used_count"),
        "n_shared_experts": m.read_integer("expert_shared_count"),
        "moe_intermediate_size": m.read_integer("expert_feed_forward_length"),
        "routed_scaling_factor": m.read_number("expert_weights_scale", 0.0) or 1.0,
        "n_group": max(1, groups),
        "topk_group": max(1, top_groups),
    }
    if m.find_value("expert_gating_func") == SIGMOID:
        return fields | {
            "model_type": "deepseek_v3",
            "rope_interleave": True,
            "num_mtp_layers": 0,
            "norm_topk_prob": bool(m.find_value("expert_weights_norm")),
        }
    m.check_value("expert_gating_func", SOFTMAX)
    m.check_value("expert_weights_norm", False)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return fields | {"model_type": "deepseek_v2", "topk_method": method}


def _latent_fields(m: GgufModel) -> Fields:
    """Return the sizes of latent attention. Older files have them without `_mla`."""
    turned_dim = m.read_integer("rope.dimension_count")
    key_dim = m.read_integer("attention.key_length")
    value_dim = m.read_integer("attention.value_length")
    if "blk.0.attn_k_b.0.weight" in m.tensors:
        key_dim = m.read_integer("attention.key_length_mla")
        value_dim = m.read_integer("attention.value_length_mla")
    rope_fields = _rope_fields(m, size=turned_dim)
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
    size = _expert_size(m)
    m.check_value("feed_forward_length", size)
    return _expert_fields(m) | {
        "model_type": "gpt_oss",
        "intermediate_size": size,
        "sliding_window": m.read_integer("attention.sliding_window"),
        "layer_types": _layer_kinds(m, 2),
        "rope_parameters": _rope_fields(m) | {"truncate": False},  # which no key tells
    }


def _head_dim(m: GgufModel) -> int:
    """Return the elements of a head's key, and of its value."""
    size = m.read_integer("attention.key_length", m.hidden_size // m.heads, least=1)
    m.check_value("attention.value_length", size)
    return size


def _original_context(m: GgufModel) -> int:
    """Return the context that positions were trained for, before they were scaled."""
    return m.read_integer("rope.scaling.original_context_length", m.context_length)


def _rope_fields(m: GgufModel, size: int | None = None) -> Fields:
    """Return the rotary settings of all layers, or of those without a window.

    `size` is a head's; None: it is read.
    """
    size = turned_dim = size or _head_dim(m)
    fields: Fields = {
        "rope_type": "default",
        "rope_theta": m.read_number("rope.freq_base", 10000.0),
    }
    if m.arch in PARTLY_TURNED:
        turned_dim = m.read_integer("rope.dimension_count", size, most=size)
        # transformers rounds size * part down
        fields["partial_rotary_factor"] = math.nextafter(turned_dim / size, 1.0)
    else:
        m.check_value("rope.dimension_count", size)
    m.check_value("rope.scaling.type", "none", "linear", "yarn", "longrope")
    kind = m.find_value("rope.scaling.type")
    factor = (
        m.read_number("rope.scaling.factor", m.read_number("rope.scale_linear", 1.0))
        or 1.0
    )
    original_length = _original_context(m)
    # of LLaMA 3, whose factors are the same for all lengths
    if FREQUENCIES in m.tensors:
        m.check_value("rope.scaling.type", "none")
        m.check_value("rope.scaling.factor", 1.0, 0.0)
        fields |= _divided_rope_fields(
            m, turned_dim // 2, FREQUENCIES, FREQUENCIES, m.context_length
        )
        fields["factor"] = 1.0
    elif LONG in m.tensors or SHORT in m.tensors:
        fields |= _divided_rope_fields(m, turned_dim // 2, LONG, SHORT, original_length)
        fields |= _scaling_fields_if_set(m, attention_factor="attn_factor")
    elif kind == "yarn":
        m.check_value("rope.scaling.yarn_ext_factor", 1.0)
        fields |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_length,
        }
        fields |= _scaling_fields_if_set(
            m,
            beta_fast="yarn_beta_fast",
            beta_slow="yarn_beta_slow",
            attention_factor="yarn_attn_factor",
        )
    elif factor != 1 and kind != "longrope":
        fields |= {"rope_type": "linear", "factor": factor}
    return fields


def _rope_fields_by_kind(m: GgufModel, near_theta: float | None = None) -> Fields:
    """Return rotary settings by the kind of a layer; those with a window are never scaled."""
    far = _rope_fields(m)
    near_base = m.read_number("rope.freq_base_swa", near_theta or far["rope_theta"])
    return {FULL: far, NEAR: {"rope_type": "default", "rope_theta": near_base}}


def _layer_kinds(m: GgufModel, period: int) -> list[str]:
    """Return the kind of each layer: by the file, or a window in all but each `period`th."""
    pattern = m.find_value("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # transformers refuses one of another length
        return [NEAR if each else FULL for each in pattern[: m.num_layers]]
    period = m.read_integer("attention.sliding_window_pattern", period)
    numbers = range(m.num_layers)
    return [
        NEAR if period == 0 or number % period < period - 1 else FULL
        for number in numbers
    ]


def _window_size(m: GgufModel) -> int | None:
    """Return how many keys a query sees in layers with a window; None: there are none."""
    return m.read_integer("attention.sliding_window", 0) or None


def _divided_rope_fields(
    m: GgufModel, num: int, long: str, short: str, original_length: int
) -> Fields:
    """Return the rotary settings of frequencies that stored tensors of factors divide."""
    factors_by_name = {
        name: read_float_vector(m.tensors[name]) for name in (long, short)
    }
    for name, factors in factors_by_name.items():
        if len(factors) != num or min(factors) <= 0:
            raise broken_file_error(
                m.path,
                f"{name} has {len(factors)} factors, and {num} above 0 are needed",
            )
    rope_fields: Fields = {
        "long_factor": factors_by_name[long],
        "short_factor": factors_by_name[short],
    }
    return rope_fields | {
        "rope_type": "longrope",
        "original_max_position_embeddings": original_length,
    }


def _scaling_fields_if_set(m: GgufModel, **keys: str) -> Fields:
    """Return fields by the keys of `rope.scaling` that a file has."""
    stored_keys = {name: f"rope.scaling.{key}" for name, key in keys.items()}
    return {
        name: m.read_number(key)
        for name, key in stored_keys.items()
        if m.find_value(key) is not None
    }


# The fields that each architecture adds to the common ones. A function returns all of them, or
# the value of one.
ROWS: dict[str, Callable[[GgufModel], Fields] | Fields] = {
    "llama": _llama,
    **{name: {} for name in ("qwen2", "qwen3", "gemma", "gpt2")},
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma2": {
        "query_pre_attn_scalar": partial(_query_scalar, layers_of_27b=46),
        "sliding_window": methodcaller(
            "read_integer", "attention.sliding_window", 4096
        ),
        "layer_types": partial(_layer_kinds, period=2),
        "attn_logit_softcapping": methodcaller(
            "read_number", "attn_logit_softcapping", 50.0
        ),
        "final_logit_softcapping": methodcaller(
            "read_number", "final_logit_softcapping", 30.0
        ),
    },
    "gemma3": _gemma3,
    "phi3": {
        "sliding_window": _window_size,
        "original_max_position_embeddings": _original_context,
    },
    "bloom": _bloom,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "starcoder2": {"sliding_window": _window_size},
    "command-r": _command_r,
    "olmo2": _olmo2,
    "granite": _granite,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}

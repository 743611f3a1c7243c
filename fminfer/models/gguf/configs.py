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
from fminfer.models.stored.gguf_file import MOST_STACKED, read_values

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
    model.only("attention.causal", True)
    model.only("pooling_type", 0)
    model.only("nextn_predict_layers", 0)
    with naming_broken_files(f"the metadata of {model.path}"):
        fields = _of_all(model)
        if callable(row):
            fields |= row(model)
        else:
            fields |= {
                name: own(model) if callable(own) else own for name, own in row.items()
            }
        fields |= {name: fields[own] for name, own in ALIASES.items() if own in fields}
        model.refuse_unread()
        return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def _of_all(m: GgufModel) -> Fields:
    norm = "layer_norm" if m.arch in LAYER_NORMED else "layer_norm_rms"
    name = "layer_norm_eps" if m.arch in LAYER_NORMED else "rms_norm_eps"
    fields: Fields = {
        "model_type": m.arch,
        "vocab_size": m.rows("token_embd.weight"),
        "hidden_size": m.hidden_size,
        "intermediate_size": m.whole("feed_forward_length"),
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.whole("attention.head_count_kv", m.heads),
        "max_position_embeddings": m.context_length,
        name: m.real(f"attention.{norm}_epsilon"),
        "attention_bias": not m.tensors.keys().isdisjoint(QKV_BIASES),
        "mlp_bias": "blk.0.ffn_up.bias" in m.tensors,
        "tie_word_embeddings": "output.weight" not in m.tensors,
        # generation_config.json has these.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if m.arch in UNTURNED:
        _refuse_grouped(m)
    elif m.arch != "deepseek2":  # whose attention is latent
        fields["rope_parameters"] = _rope(m)
        if m.arch not in OF_ONE_SIZE:
            fields["head_dim"] = _head_dim(m)
    return fields


def _llama(m: GgufModel) -> Fields:
    """Also Mistral's models, and Mixtral's."""
    if m.find("expert_count"):
        return {"model_type": "mixtral"} | _experts(m)
    m.only("expert_used_count", 0)
    return {}


def _experts(m: GgufModel) -> Fields:
    """Return the fields of experts that a softmax chooses, and every layer has."""
    m.only("expert_gating_func", SOFTMAX)
    m.only("expert_weights_scale", 1.0, 0.0)
    return {
        "num_experts": m.whole("expert_count", most=MOST_STACKED),
        "num_experts_per_tok": m.whole("expert_used_count"),
    }


def _expert_size(m: GgufModel) -> int:
    """Return the inputs of an expert's last product, which older files do not tell."""
    key = "expert_feed_forward_length"
    return (
        m.rows("blk.0.ffn_gate_exps.0.weight") if m.find(key) is None else m.whole(key)
    )


def _qwen2moe(m: GgufModel) -> Fields:
    m.only("expert_weights_norm", False)
    shared = m.whole(
        "expert_shared_feed_forward_length", m.rows("blk.0.ffn_gate_shexp.weight")
    )
    return {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": _expert_size(m),
        "shared_expert_intermediate_size": shared,
        **_experts(m),
    }


def _qwen3moe(m: GgufModel) -> Fields:
    m.only("expert_weights_norm", True)
    return {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "moe_intermediate_size": _expert_size(m),
        **_experts(m),
    }


def _query_scalar(m: GgufModel, layers_of_27b: int) -> int:
    """Return what queries are scaled by, which no key tells: the largest model has its own."""
    return m.hidden_size // m.heads if m.num_layers == layers_of_27b else _head_dim(m)


def _gemma3(m: GgufModel) -> Fields:
    return {
        "model_type": "gemma3_text",
        "rope_parameters": _ropes_by_kind(m, 10000.0),
        "query_pre_attn_scalar": _query_scalar(m, 62),
        "sliding_window": _window(m),
        "layer_types": _kinds_of_layers(m, 6 if _window(m) else 1),
        "final_logit_softcapping": m.real("final_logit_softcapping", 0.0) or None,
    }


def _refuse_grouped(m: GgufModel) -> None:
    m.only("attention.head_count_kv", m.heads)
    m.only("attention.key_length", m.hidden_size // m.heads)


def _bloom(m: GgufModel) -> Fields:
    m.only("feed_forward_length", 4 * m.hidden_size)
    m.only("attention.max_alibi_bias", 8.0)
    return {}


def _gptneox(m: GgufModel) -> Fields:
    _refuse_grouped(m)
    is_parallel = m.find("use_parallel_residual") in (None, True)
    return {"model_type": "gpt_neox", "use_parallel_residual": is_parallel}


def _falcon(m: GgufModel) -> Fields:
    kv_heads = m.whole("attention.head_count_kv", m.heads)
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
        "logit_scale": m.real("logit_scale", 1.0),
    }


def _olmo2(m: GgufModel) -> Fields:
    """Also OLMo 3, which has windows."""
    if not _window(m):
        return {}
    return {
        "model_type": "olmo3",
        "sliding_window": _window(m),
        "layer_types": _kinds_of_layers(m, 4),
        "rope_parameters": _ropes_by_kind(m),
    }


def _granite(m: GgufModel) -> Fields:
    m.only("rope.scaling.finetuned", True)  # otherwise there are no rotary positions
    return {
        "logits_scaling": m.real("logit_scale"),
        "residual_multiplier": m.real("residual_scale", 1.0) or 1.0,
        "embedding_multiplier": m.real("embedding_scale", 1.0) or 1.0,
        "attention_multiplier": m.real("attention.scale", 0.0) or _head_dim(m) ** -0.5,
    }


def _deepseek2(m: GgufModel) -> Fields:
    """DeepSeek V2 and V3."""
    groups = m.whole("expert_group_count", 1)
    top_groups = m.whole("expert_group_used_count", 1)
    fields = _latent(m) | {
        "first_k_dense_replace": m.whole("leading_dense_block_count", 0),
        "n_routed_experts": m.whole("expert_count", most=MOST_STACKED),
        "num_experts_per_tok": m.whole("expert_used_count"),
        "n_shared_experts": m.whole("expert_shared_count"),
        "moe_intermediate_size": m.whole("expert_feed_forward_length"),
        "routed_scaling_factor": m.real("expert_weights_scale", 0.0) or 1.0,
        "n_group": max(1, groups),
        "topk_group": max(1, top_groups),
    }
    if m.find("expert_gating_func") == SIGMOID:
        return fields | {
            "model_type": "deepseek_v3",
            "rope_interleave": True,
            "num_mtp_layers": 0,
            "norm_topk_prob": bool(m.find("expert_weights_norm")),
        }
    m.only("expert_gating_func", SOFTMAX)
    m.only("expert_weights_norm", False)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return fields | {"model_type": "deepseek_v2", "topk_method": method}


def _latent(m: GgufModel) -> Fields:
    """Return the sizes of latent attention. Older files have them without `_mla`."""
    turned = m.whole("rope.dimension_count")
    key_dim = m.whole("attention.key_length")
    value_dim = m.whole("attention.value_length")
    if "blk.0.attn_k_b.0.weight" in m.tensors:
        key_dim = m.whole("attention.key_length_mla")
        value_dim = m.whole("attention.value_length_mla")
    how = _rope(m, size=turned)
    # files store a tenth of mscale
    if by := m.real("rope.scaling.yarn_log_multiplier", 0.0):
        how |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * by, 6))
    return {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key_dim - turned,
        "v_head_dim": value_dim,
        "head_dim": turned,
        "q_lora_rank": m.whole("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": m.whole("attention.kv_lora_rank"),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in m.tensors,
        "rope_parameters": how,
    }


def _gpt_oss(m: GgufModel) -> Fields:
    size = _expert_size(m)
    m.only("feed_forward_length", size)
    return _experts(m) | {
        "model_type": "gpt_oss",
        "intermediate_size": size,
        "sliding_window": m.whole("attention.sliding_window"),
        "layer_types": _kinds_of_layers(m, 2),
        "rope_parameters": _rope(m) | {"truncate": False},  # which no key tells
    }


def _head_dim(m: GgufModel) -> int:
    """Return the elements of a head's key, and of its value."""
    size = m.whole("attention.key_length", m.hidden_size // m.heads, least=1)
    m.only("attention.value_length", size)
    return size


def _original_length(m: GgufModel) -> int:
    """Return the context that positions were trained for, before they were scaled."""
    return m.whole("rope.scaling.original_context_length", m.context_length)


def _rope(m: GgufModel, size: int | None = None) -> Fields:
    """Return the rotary settings of all layers, or of those without a window (size: of
    a head)."""
    size = turned = size or _head_dim(m)
    how: Fields = {
        "rope_type": "default",
        "rope_theta": m.real("rope.freq_base", 10000.0),
    }
    if m.arch in PARTLY_TURNED:
        turned = m.whole("rope.dimension_count", size, most=size)
        # transformers rounds size * part down
        how["partial_rotary_factor"] = math.nextafter(turned / size, 1.0)
    else:
        m.only("rope.dimension_count", size)
    m.only("rope.scaling.type", "none", "linear", "yarn", "longrope")
    kind = m.find("rope.scaling.type")
    factor = m.real("rope.scaling.factor", m.real("rope.scale_linear", 1.0)) or 1.0
    original = _original_length(m)
    # of LLaMA 3, whose factors are the same for all lengths
    if FREQUENCIES in m.tensors:
        m.only("rope.scaling.type", "none")
        m.only("rope.scaling.factor", 1.0, 0.0)
        how |= _divided(m, turned // 2, FREQUENCIES, FREQUENCIES, m.context_length)
        how["factor"] = 1.0
    elif LONG in m.tensors or SHORT in m.tensors:
        how |= _divided(m, turned // 2, LONG, SHORT, original)
        how |= _if_set(m, attention_factor="attn_factor")
    elif kind == "yarn":
        m.only("rope.scaling.yarn_ext_factor", 1.0)
        how |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        how |= _if_set(
            m,
            beta_fast="yarn_beta_fast",
            beta_slow="yarn_beta_slow",
            attention_factor="yarn_attn_factor",
        )
    elif factor != 1 and kind != "longrope":
        how |= {"rope_type": "linear", "factor": factor}
    return how


def _ropes_by_kind(m: GgufModel, near_theta: float | None = None) -> Fields:
    """Return rotary settings by the kind of a layer; those with a window are never scaled."""
    far = _rope(m)
    near = m.real("rope.freq_base_swa", near_theta or far["rope_theta"])
    return {FULL: far, NEAR: {"rope_type": "default", "rope_theta": near}}


def _kinds_of_layers(m: GgufModel, every: int) -> list[str]:
    """Return which layers have windows: all but each so many'th, or what the file says."""
    found = m.find("attention.sliding_window_pattern")
    if isinstance(found, list):  # transformers refuses one of another length
        return [NEAR if each else FULL for each in found[: m.num_layers]]
    every = m.whole("attention.sliding_window_pattern", every)
    numbers = range(m.num_layers)
    return [
        NEAR if every == 0 or number % every < every - 1 else FULL for number in numbers
    ]


def _window(m: GgufModel) -> int | None:
    """Return how many keys a query sees in layers with a window; None: there are none."""
    return m.whole("attention.sliding_window", 0) or None


def _divided(m: GgufModel, num: int, long: str, short: str, original: int) -> Fields:
    """Return the settings of frequencies that are divided by factors, which are tensors."""
    found = {name: read_values(m.tensors[name]) for name in (long, short)}
    for name, factors in found.items():
        if len(factors) != num or min(factors) <= 0:
            raise broken_file_error(
                m.path,
                f"{name} has {len(factors)} factors, and {num} above 0 are needed",
            )
    how: Fields = {"long_factor": found[long], "short_factor": found[short]}
    return how | {"rope_type": "longrope", "original_max_position_embeddings": original}


def _if_set(m: GgufModel, **keys: str) -> Fields:
    found = {name: f"rope.scaling.{key}" for name, key in keys.items()}
    return {name: m.real(key) for name, key in found.items() if m.find(key) is not None}


# The fields that each adds to those of all; what is a function finds them, or one of them.
ROWS: dict[str, Callable[[GgufModel], Fields] | Fields] = {
    "llama": _llama,
    **{name: {} for name in ("qwen2", "qwen3", "gemma", "gpt2")},
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma2": {
        "query_pre_attn_scalar": partial(_query_scalar, layers_of_27b=46),
        "sliding_window": methodcaller("whole", "attention.sliding_window", 4096),
        "layer_types": partial(_kinds_of_layers, every=2),
        "attn_logit_softcapping": methodcaller("real", "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": methodcaller(
            "real", "final_logit_softcapping", 30.0
        ),
    },
    "gemma3": _gemma3,
    "phi3": {
        "sliding_window": _window,
        "original_max_position_embeddings": _original_length,
    },
    "bloom": _bloom,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "starcoder2": {"sliding_window": _window},
    "command-r": _command_r,
    "olmo2": _olmo2,
    "granite": _granite,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}

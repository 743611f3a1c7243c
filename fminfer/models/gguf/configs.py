"""Makes transformers' configs from GGUF metadata, with a row for each architecture.

Each config gets the common fields. Those that its class does not declare are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import broken
from fminfer.models.gguf.metadata import GgufModel
from fminfer.models.gguf.rotary import (
    Fields,
    head_dim,
    kinds_of_layers,
    original_length,
    rope,
    ropes_by_kind,
    window,
)
from fminfer.models.stored.gguf_file import MOST_STACKED

SOFTMAX, SIGMOID = 1, 2  # how experts are scored
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
        CheckpointError: its architecture does not run, or a key changes answers and is not known.
    """
    if (row := ROWS.get(model.arch)) is None:
        raise CheckpointError(
            f"{model.path} has the architecture {model.arch!r}, which does not run in GGUF; these "
            f"do: {', '.join(sorted(ROWS))}. fminfer families lists what runs in safetensors"
        )
    model.only("attention.causal", True)
    model.only("pooling_type", 0)
    model.only("nextn_predict_layers", 0)
    try:
        fields = _of_all(model) | row(model)
        fields |= {name: fields[own] for name, own in ALIASES.items() if own in fields}
        model.refuse_unread()
        return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise broken(model.path, f"its metadata make no config: {error}") from error


def _of_all(m: GgufModel) -> Fields:
    return {
        "vocab_size": m.rows("token_embd.weight"),
        "hidden_size": m.hidden_size,
        "intermediate_size": m.whole("feed_forward_length"),
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.whole("attention.head_count_kv", m.heads),
        "max_position_embeddings": m.context_length,
        "attention_bias": not m.tensors.keys().isdisjoint(QKV_BIASES),
        "mlp_bias": "blk.0.ffn_up.bias" in m.tensors,
        "tie_word_embeddings": "output.weight" not in m.tensors,
        # generation_config.json has these.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _llama_like(m: GgufModel, model_type: str, **more: Any) -> Fields:
    """Return the fields of most configs with RMSNorms and rotary positions."""
    return _rms_normed(m, model_type, head_dim=head_dim(m), rope_parameters=rope(m)) | more


def _rms_normed(m: GgufModel, model_type: str, **more: Any) -> Fields:
    eps = m.real("attention.layer_norm_rms_epsilon")
    return {"model_type": model_type, "rms_norm_eps": eps} | more


def _layer_normed(m: GgufModel, model_type: str, **more: Any) -> Fields:
    eps = m.real("attention.layer_norm_epsilon")
    return {"model_type": model_type, "layer_norm_eps": eps} | more


def _llama(m: GgufModel) -> Fields:
    """Also Mistral's models, and Mixtral's."""
    if m.find("expert_count"):
        return _llama_like(m, "mixtral", **_experts(m))
    m.only("expert_used_count", 0)
    return _llama_like(m, "llama")


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
    return m.rows("blk.0.ffn_gate_exps.0.weight") if m.find(key) is None else m.whole(key)


def _qwen2moe(m: GgufModel) -> Fields:
    m.only("expert_weights_norm", False)
    shared = m.whole("expert_shared_feed_forward_length", m.rows("blk.0.ffn_gate_shexp.weight"))
    more: Fields = {"shared_expert_intermediate_size": shared}
    return _llama_like(m, "qwen2_moe", moe_intermediate_size=_expert_size(m), **_experts(m), **more)


def _qwen3moe(m: GgufModel) -> Fields:
    m.only("expert_weights_norm", True)
    more: Fields = {"norm_topk_prob": True}
    return _llama_like(m, "qwen3_moe", moe_intermediate_size=_expert_size(m), **_experts(m), **more)


def _query_scalar(m: GgufModel, layers_of_27b: int) -> int:
    """Return what queries are scaled by, which no key tells: the largest model has its own."""
    return m.hidden_size // m.heads if m.num_layers == layers_of_27b else head_dim(m)


def _gemma2(m: GgufModel) -> Fields:
    return _llama_like(
        m,
        "gemma2",
        query_pre_attn_scalar=_query_scalar(m, 46),
        sliding_window=m.whole("attention.sliding_window", 4096),
        layer_types=kinds_of_layers(m, 2),
        attn_logit_softcapping=m.real("attn_logit_softcapping", 50.0),
        final_logit_softcapping=m.real("final_logit_softcapping", 30.0),
    )


def _gemma3(m: GgufModel) -> Fields:
    return _llama_like(
        m,
        "gemma3_text",
        rope_parameters=ropes_by_kind(m, 10000.0),
        query_pre_attn_scalar=_query_scalar(m, 62),
        sliding_window=window(m),
        layer_types=kinds_of_layers(m, 6 if window(m) else 1),
        final_logit_softcapping=m.real("final_logit_softcapping", 0.0) or None,
    )


def _phi3(m: GgufModel) -> Fields:
    more: Fields = {"original_max_position_embeddings": original_length(m)}
    return _llama_like(m, "phi3", sliding_window=window(m), **more)


def _refuse_grouped(m: GgufModel) -> None:
    m.only("attention.head_count_kv", m.heads)
    m.only("attention.key_length", m.hidden_size // m.heads)


def _gpt2(m: GgufModel) -> Fields:
    _refuse_grouped(m)
    return _layer_normed(m, "gpt2")


def _bloom(m: GgufModel) -> Fields:
    _refuse_grouped(m)
    m.only("feed_forward_length", 4 * m.hidden_size)
    m.only("attention.max_alibi_bias", 8.0)
    return _layer_normed(m, "bloom")


def _gptneox(m: GgufModel) -> Fields:
    _refuse_grouped(m)
    is_parallel = m.find("use_parallel_residual") in (None, True)
    return _layer_normed(m, "gpt_neox", use_parallel_residual=is_parallel, rope_parameters=rope(m))


def _falcon(m: GgufModel) -> Fields:
    kv_heads = m.whole("attention.head_count_kv", m.heads)
    has_two = "blk.0.attn_norm_2.weight" in m.tensors
    is_new = has_two or kv_heads not in (1, m.heads)
    return _layer_normed(
        m,
        "falcon",
        multi_query=is_new or kv_heads == 1,
        new_decoder_architecture=is_new,
        num_ln_in_parallel_attn=2 if has_two else 1 if is_new else None,
        rope_parameters=rope(m),
    )


def _starcoder2(m: GgufModel) -> Fields:
    turned: Fields = {"head_dim": head_dim(m), "rope_parameters": rope(m)}
    return _layer_normed(m, "starcoder2", sliding_window=window(m), **turned)


def _command_r(m: GgufModel) -> Fields:
    more: Fields = {"head_dim": head_dim(m), "rope_parameters": rope(m)}
    more["use_qk_norm"] = "blk.0.attn_q_norm.weight" in m.tensors
    return _layer_normed(m, "cohere", logit_scale=m.real("logit_scale", 1.0), **more)


def _olmo2(m: GgufModel) -> Fields:
    """Also OLMo 3, which has windows."""
    if not window(m):
        return _llama_like(m, "olmo2")
    more: Fields = {"sliding_window": window(m), "layer_types": kinds_of_layers(m, 4)}
    return _llama_like(m, "olmo3", rope_parameters=ropes_by_kind(m), **more)


def _granite(m: GgufModel) -> Fields:
    m.only("rope.scaling.finetuned", True)  # otherwise there are no rotary positions
    return _llama_like(
        m,
        "granite",
        logits_scaling=m.real("logit_scale"),
        residual_multiplier=m.real("residual_scale", 1.0) or 1.0,
        embedding_multiplier=m.real("embedding_scale", 1.0) or 1.0,
        attention_multiplier=m.real("attention.scale", 0.0) or head_dim(m) ** -0.5,
    )


def _deepseek2(m: GgufModel) -> Fields:
    """DeepSeek V2 and V3."""
    groups, top_groups = m.whole("expert_group_count", 1), m.whole("expert_group_used_count", 1)
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
        fields |= {"rope_interleave": True, "num_mtp_layers": 0}
        fields["norm_topk_prob"] = bool(m.find("expert_weights_norm"))
        return _rms_normed(m, "deepseek_v3", **fields)
    m.only("expert_gating_func", SOFTMAX)
    m.only("expert_weights_norm", False)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return _rms_normed(m, "deepseek_v2", **fields, topk_method=method)


def _latent(m: GgufModel) -> Fields:
    """Return the sizes of latent attention. Older files have them without `_mla`."""
    turned = m.whole("rope.dimension_count")
    key_dim, value_dim = m.whole("attention.key_length"), m.whole("attention.value_length")
    if "blk.0.attn_k_b.0.weight" in m.tensors:
        key_dim = m.whole("attention.key_length_mla")
        value_dim = m.whole("attention.value_length_mla")
    how = rope(m, size=turned)
    if by := m.real("rope.scaling.yarn_log_multiplier", 0.0):  # files store a tenth of mscale
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
    return _llama_like(
        m,
        "gpt_oss",
        **_experts(m),
        intermediate_size=size,
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=kinds_of_layers(m, 2),
        rope_parameters=rope(m) | {"truncate": False},  # which no key tells
    )


ROWS: dict[str, Callable[[GgufModel], Fields]] = {
    **{"llama": _llama, "qwen2moe": _qwen2moe, "qwen3moe": _qwen3moe, "gemma2": _gemma2},
    **{"gemma3": _gemma3, "phi3": _phi3, "gpt2": _gpt2, "falcon": _falcon, "bloom": _bloom},
    **{"gptneox": _gptneox, "starcoder2": _starcoder2, "olmo2": _olmo2, "granite": _granite},
    **{"command-r": _command_r, "deepseek2": _deepseek2, "gpt-oss": _gpt_oss},
    **{name: partial(_llama_like, model_type=name) for name in ("qwen2", "qwen3", "gemma")},
}

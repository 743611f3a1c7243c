"""What configs of several GGUF architectures share: sizes, rotary positions, kinds of layers."""

from __future__ import annotations

import math
from typing import Any

from fminfer.core.impostors import broken_file_error
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
# Architectures that may turn a part of each head.
PARTLY_TURNED = (
    "gptneox",
    "phi3",
    "glm4",
    "glm4moe",
    "minimax-m2",
    "stablelm",
    "phi2",
    "nemotron",
)
# Their norms are LayerNorms; those of others are RMSNorms.
LAYER_NORMED = (
    "gpt2",
    "bloom",
    "gptneox",
    "falcon",
    "starcoder2",
    "command-r",
    "cohere2",
    "olmo",
    "jais2",
    "stablelm",
    "phi2",
    "nemotron",
    "mpt",
    "starcoder",
)
UNTURNED = ("gpt2", "bloom", "mpt", "starcoder")
OF_ONE_SIZE = ("gptneox", "falcon")  # the size of their heads follows from others
QKV_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
# Names that some configs have for a field → its name here.
ALIASES = {
    "n_inner": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "norm_eps": "layer_norm_eps",
    "bias": "attention_bias",
    "qkv_bias": "attention_bias",
    "use_qkv_bias": "attention_bias",
    "use_bias": "mlp_bias",
}


def make_common_fields(m: GgufModel) -> Fields:
    norm = "layer_norm" if m.arch in LAYER_NORMED else "layer_norm_rms"
    name = "layer_norm_eps" if m.arch in LAYER_NORMED else "rms_norm_eps"
    # Nemotron's files have both.
    m.find_value("attention.layer_norm_rms_epsilon")
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
        check_no_grouped_heads(m)
    elif m.arch != "deepseek2":  # whose attention is latent
        fields["rope_parameters"] = read_rope_fields(m)
        if m.arch not in OF_ONE_SIZE:
            fields["head_dim"] = read_head_dim(m)
    return fields


def has_tensor(m: GgufModel, name: str) -> bool:
    return name in m.tensors


def read_expert_fields(m: GgufModel, scores: int = SOFTMAX) -> Fields:
    """Return the fields of experts, whose weights have no factor."""
    m.check_value("expert_gating_func", scores)
    m.check_value("expert_weights_scale", 1.0, 0.0)
    return {
        "num_experts": m.read_integer("expert_count", most=MOST_STACKED),
        "num_experts_per_tok": m.read_integer("expert_used_count"),
    }


def read_routed_fields(m: GgufModel) -> Fields:
    """Return the fields of experts as DeepSeek's: in groups, shared, behind plain layers."""
    return {
        "first_k_dense_replace": m.read_integer("leading_dense_block_count", 0),
        "num_experts": m.read_integer("expert_count", most=MOST_STACKED),
        "num_experts_per_tok": m.read_integer("expert_used_count"),
        "num_shared_experts": m.read_integer("expert_shared_count"),
        "moe_intermediate_size": m.read_integer("expert_feed_forward_length"),
        "routed_scaling_factor": m.read_number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(m.find_value("expert_weights_norm")),
        "n_group": max(1, m.read_integer("expert_group_count", 1)),
        "topk_group": max(1, m.read_integer("expert_group_used_count", 1)),
    }


def read_expert_size(m: GgufModel) -> int:
    """Return the inputs of an expert's last product, which older files do not state."""
    key = "expert_feed_forward_length"
    return (
        m.count_rows("blk.0.ffn_gate_exps.0.weight")
        if m.find_value(key) is None
        else m.read_integer(key)
    )


def find_query_scalar(m: GgufModel, layers_of_27b: int) -> int:
    """Return the scale of queries, which no key states: the largest model has its own."""
    return (
        m.hidden_size // m.heads if m.num_layers == layers_of_27b else read_head_dim(m)
    )


def check_no_grouped_heads(m: GgufModel) -> None:
    """Raise a CheckpointError for keys that several heads share; StarCoder's all share one."""
    m.check_value("attention.head_count_kv", 1 if m.arch == "starcoder" else m.heads)
    m.check_value("attention.key_length", m.hidden_size // m.heads)


def read_head_dim(m: GgufModel) -> int:
    """Return the elements of a head's key, and of its value."""
    size = m.read_integer("attention.key_length", m.hidden_size // m.heads, least=1)
    m.check_value("attention.value_length", size)
    return size


def read_original_context(m: GgufModel) -> int:
    """Return the context that positions were trained for, before they were scaled."""
    return m.read_integer("rope.scaling.original_context_length", m.context_length)


def read_rope_fields(m: GgufModel, size: int | None = None) -> Fields:
    """Return the rotary settings of all layers, or of those without a window.

    `size` is a head's; None: it is read.
    """
    size = turned_dim = size or read_head_dim(m)
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
    original_length = read_original_context(m)
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


def read_rope_fields_by_kind(m: GgufModel, near_theta: float | None = None) -> Fields:
    """Return rotary settings by the kind of a layer; those with a window are never scaled."""
    far = read_rope_fields(m)
    near_base = m.read_number("rope.freq_base_swa", near_theta or far["rope_theta"])
    return {FULL: far, NEAR: {"rope_type": "default", "rope_theta": near_base}}


def read_layer_kinds(m: GgufModel, period: int) -> list[str]:
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


def read_window_size(m: GgufModel) -> int | None:
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

"""Rows of GGUF architectures with mixtures of experts: what each adds to the common fields."""

from __future__ import annotations

from collections.abc import Callable

from fminfer.models.gguf.gguf_model import GgufModel
from fminfer.models.gguf.shared_fields import (
    LONG,
    SIGMOID,
    Fields,
    read_expert_fields,
    read_expert_size,
    read_layer_kinds,
    read_rope_fields,
    read_routed_fields,
    read_window_size,
)

# The factor of rotary positions of all published PhiMoE models with long contexts. Files have
# none: `attn_factor` is one that the converter computes as for Phi-3.
PHIMOE_SCALE = 1.243163121016122


def _glm4moe(m: GgufModel) -> Fields:
    m.check_value("expert_gating_func", SIGMOID)
    # Of models that read images: in texts all parts of a position are the same.
    m.find_value("rope.dimension_sections")
    return read_routed_fields(m) | {
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in m.tensors,
        "num_mtp_layers": 0,
    }


def _exaone_moe(m: GgufModel) -> Fields:
    m.check_value("expert_gating_func", SIGMOID)
    return read_routed_fields(m) | {
        "model_type": "exaone_moe",
        "sliding_window": read_window_size(m),
        "layer_types": read_layer_kinds(m, 4),
    }


def _dots1(m: GgufModel) -> Fields:
    m.check_value("expert_gating_func", SIGMOID)
    return read_routed_fields(m) | {"sliding_window": None}


def _olmoe(m: GgufModel) -> Fields:
    m.check_value("expert_weights_norm", False)
    return read_expert_fields(m)


def _ernie4_5_moe(m: GgufModel) -> Fields:
    """No key tells of a last layer with experts. In published models it is the last one."""
    return read_expert_fields(m) | {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": m.read_integer("expert_feed_forward_length"),
        "moe_num_shared_experts": m.read_integer("expert_shared_count", 0),
        "moe_layer_start_index": m.read_integer("leading_dense_block_count"),
        "moe_layer_interval": m.read_integer("interleave_moe_layer_step", least=1),
    }


def _hunyuan_moe(m: GgufModel) -> Fields:
    size = read_expert_size(m)
    m.check_value("feed_forward_length", size)
    m.check_value("expert_shared_count", 1)
    fields = read_expert_fields(m)
    return {
        "model_type": "hunyuan_v1_moe",
        "num_experts": fields["num_experts"],
        "moe_topk": fields["num_experts_per_tok"],
    }


def _phimoe(m: GgufModel) -> Fields:
    rope = read_rope_fields(m)
    if LONG in m.tensors:
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), PHIMOE_SCALE)
    return read_expert_fields(m) | {
        "rope_parameters": rope,
        "sliding_window": read_window_size(m),
        "lm_head_bias": "output.bias" in m.tensors,
    }


def _minimax_m2(m: GgufModel) -> Fields:
    m.check_value("feed_forward_length", read_expert_size(m))
    return {"model_type": "minimax_m2"} | read_expert_fields(m, SIGMOID)


MIXTURE_ROWS: dict[str, Callable[[GgufModel], Fields] | Fields] = {
    "glm4moe": _glm4moe,
    "exaone-moe": _exaone_moe,
    "dots1": _dots1,
    "olmoe": _olmoe,
    "ernie4_5-moe": _ernie4_5_moe,
    "hunyuan-moe": _hunyuan_moe,
    "phimoe": _phimoe,
    "minimax-m2": _minimax_m2,
}

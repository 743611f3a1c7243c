"""What llama.cpp's converter adds for mixtures of experts: keys, and layers behind the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import torch

from tests.models.gguf_writer import Change

Keys = Mapping[str, Any]
LLM = gguf.Keys.LLM
ROPE = gguf.Keys.Rope
ATTENTION = gguf.Keys.Attention
SIGMOID = {LLM.EXPERT_GATING_FUNC: gguf.ExpertGatingFuncType.SIGMOID.value}


def turned_key(config: Any, part: float | None = None) -> Keys:
    """Return the key of how much of a head turns; None: as the config says."""
    size = getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    part = config.rope_parameters["partial_rotary_factor"] if part is None else part
    return {ROPE.DIMENSION_COUNT: int(size * part)}


def routed_keys(config: Any, num_shared: int, num_plain: int) -> Keys:
    """Return the keys of experts as DeepSeek's: shared ones, scales, plain layers first."""
    return {
        LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
        LLM.EXPERT_SHARED_COUNT: num_shared,
        LLM.LEADING_DENSE_BLOCK_COUNT: num_plain,
        LLM.EXPERT_WEIGHTS_SCALE: config.routed_scaling_factor,
        LLM.EXPERT_WEIGHTS_NORM: config.norm_topk_prob,
    }


def glm4moe_keys(config: Any) -> Keys:
    routed = routed_keys(config, config.n_shared_experts, config.first_k_dense_replace)
    experts = {LLM.EXPERT_COUNT: config.n_routed_experts}
    return routed | experts | SIGMOID | turned_key(config)


def exaone_moe_keys(config: Any) -> Keys:
    num_shared = config.num_shared_experts
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    return routed_keys(config, num_shared, config.first_k_dense_replace) | {
        LLM.VOCAB_SIZE: config.vocab_size,
        LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: config.moe_intermediate_size
        * num_shared,
        ATTENTION.SLIDING_WINDOW: config.sliding_window,
        ATTENTION.SLIDING_WINDOW_PATTERN: windows,
        ROPE.SCALING_TYPE: "none",
        LLM.NEXTN_PREDICT_LAYERS: 0,
        **SIGMOID,
    }


def dots1_keys(config: Any) -> Keys:
    routed = routed_keys(config, config.n_shared_experts, config.first_k_dense_replace)
    return routed | {LLM.EXPERT_COUNT: config.n_routed_experts} | SIGMOID


def ernie_keys(config: Any) -> Keys:
    """The length of shared experts is what the converter makes of other fields."""
    return {
        LLM.EXPERT_COUNT: config.moe_num_experts,
        LLM.EXPERT_USED_COUNT: config.moe_k,
        LLM.INTERLEAVE_MOE_LAYER_STEP: config.moe_layer_interval,
        LLM.LEADING_DENSE_BLOCK_COUNT: config.moe_layer_start_index,
        LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
        LLM.EXPERT_SHARED_COUNT: config.moe_num_shared_experts,
        LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: config.intermediate_size
        // config.num_key_value_heads,
    }


def hunyuan_moe_keys(config: Any) -> Keys:
    return {
        LLM.EXPERT_COUNT: config.num_experts,
        LLM.EXPERT_USED_COUNT: config.moe_topk,
        LLM.EXPERT_SHARED_COUNT: 1,
        LLM.EXPERT_FEED_FORWARD_LENGTH: config.intermediate_size,
        LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: config.intermediate_size,
    }


def hunyuan_alpha_keys(config: Any) -> Keys:
    """The converter computes frequencies of `alpha` itself."""
    rope = config.rope_parameters
    size = config.head_dim
    return hunyuan_moe_keys(config) | {
        ROPE.FREQ_BASE: rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)),
        ROPE.SCALING_TYPE: "none",
        ROPE.SCALING_FACTOR: 1.0,
        ROPE.SCALING_ORIG_CTX_LEN: 256 * 1024,
        LLM.CONTEXT_LENGTH: 256 * 1024,
    }


def phimoe_keys(config: Any) -> Keys:
    rope = config.rope_parameters
    original = rope.get(
        "original_max_position_embeddings", config.max_position_embeddings
    )
    return turned_key(config, 1.0) | {
        ROPE.SCALING_ORIG_CTX_LEN: original,
        ROPE.SCALING_ATTN_FACTOR: 1.1902 if "long_factor" in rope else None,
        ATTENTION.SLIDING_WINDOW: config.sliding_window or 0,
    }


def phimoe_factors(config: Any) -> Mapping[str, torch.Tensor]:
    """Return the tensors of what divides frequencies."""
    return {
        f"rope_factors_{kind}.weight": torch.tensor(
            config.rope_parameters[f"{kind}_factor"]
        )
        for kind in ("long", "short")
    }


def granitemoe_keys(config: Any) -> Keys:
    return turned_key(config, 1.0) | {
        LLM.VOCAB_SIZE: config.vocab_size,
        ATTENTION.SCALE: config.attention_multiplier,
        LLM.EMBEDDING_SCALE: config.embedding_multiplier,
        LLM.RESIDUAL_SCALE: config.residual_multiplier,
        LLM.LOGIT_SCALE: config.logits_scaling,
        LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: getattr(
            config, "shared_intermediate_size", None
        ),
    }


def minimax_keys(config: Any) -> Keys:
    return (
        turned_key(config)
        | SIGMOID
        | {LLM.EXPERT_FEED_FORWARD_LENGTH: config.intermediate_size}
    )


def split_joined_experts(rows: Change) -> Change:
    """Return a change that cuts Granite's joined gates and ups apart, besides another one."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        stem, _, leaf = name.partition(".input_linear.")
        if not leaf:
            return rows(name, tensor)
        gate, up = tensor.chunk(2, -2)
        kind = "_shexp" if stem.endswith("shared_mlp") else "_exps"
        layer = stem.split(".")[2]
        return {
            f"blk.{layer}.ffn_gate{kind}.weight": gate,
            f"blk.{layer}.ffn_up{kind}.weight": up,
        }

    return change


def rename_choice(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the bias of a choice of experts by the name that the package maps."""
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


def make_predicting_layer(
    stored: Mapping[str, torch.Tensor], last: int
) -> Mapping[str, torch.Tensor]:
    """Return the layer behind the last one, which predicts one more token."""
    before = f"blk.{last}."
    behind = f"blk.{last + 1}."
    size = stored["output_norm.weight"].shape[0]
    copied = {
        name.replace(before, behind): -tensor
        for name, tensor in stored.items()
        if name.startswith(before)
    }
    return copied | {
        f"{behind}nextn.eh_proj.weight": torch.ones(size, 2 * size),
        f"{behind}nextn.enorm.weight": torch.ones(size),
        f"{behind}nextn.hnorm.weight": torch.ones(size),
        f"{behind}nextn.shared_head_norm.weight": torch.ones(size),
    }

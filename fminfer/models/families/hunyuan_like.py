"""Rows of the Hunyuan models: norms of queries and keys come after rotary positions."""

from __future__ import annotations

from typing import Any

from fminfer.compute.spec import Moe, Norm
from fminfer.models.families.config_parts import Changes, head_dim_of, plain_rope, rope_of
from fminfer.models.families.expert_parts import shared_names
from fminfer.models.families.llama_like import biases, gated_mlp, llama_like
from fminfer.models.families.tensor_names import Architecture, sources

NAMES = sources(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _attention(c: Any) -> Changes:
    """Return attention whose norms come after rotary positions."""
    how, rope = c.rope_parameters, rope_of(c)
    if how["rope_type"] == "dynamic" and how.get("alpha"):
        size = head_dim_of(c)
        rope = plain_rope(how["rope_theta"] * how["alpha"] ** (size / (size - 2)), size)
    return biases(c) | {"rope": rope, "qk_norm": Norm(c.rms_norm_eps), "qk_norm_is_last": True}


def hunyuan_v1_dense(c: Any) -> Architecture:
    return llama_like(c, inner=NAMES, attention=_attention(c))


def hunyuan_v1_moe(c: Any) -> Architecture:
    expert = gated_mlp(c)

    def mlp(number: int) -> Moe:
        num, top_k = (
            each if isinstance(each, int) else each[number] for each in (c.num_experts, c.moe_topk)
        )
        return Moe(num, top_k, expert, is_precise=True, shared=expert)

    own = NAMES | shared_names("mlp.shared_mlp") | sources(router="mlp.gate.wg")
    return llama_like(c, inner=own, attention=_attention(c), mlp=mlp)


ROWS = (hunyuan_v1_dense, hunyuan_v1_moe)

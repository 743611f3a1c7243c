"""Rows that resemble Granite: a LLaMA with multipliers, and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from fminfer.compute.spec import Mlp, Moe, Norm
from fminfer.models.families.config_parts import Changes, same
from fminfer.models.families.llama_like import biases, gated_mlp, llama_like
from fminfer.models.families.tensor_names import Architecture, parameter, sources

EXPERTS = sources(
    router="block_sparse_moe.router.layer",
    shared__up="shared_mlp.input_linear",
    shared__down="shared_mlp.output_linear",
) | {
    "experts.up": parameter("block_sparse_moe.input_linear.weight"),
    "experts.down": parameter("block_sparse_moe.output_linear.weight"),
}


def granite_like(
    c: Any, *, logit_scale: float, layer: Changes | None = None, **more: Any
) -> Architecture:
    """Return a LLaMA with Granite's multipliers, and what differs besides."""
    return llama_like(
        c,
        attention=biases(c) | {"scaling": c.attention_multiplier},
        layer={"residual_scale": c.residual_multiplier} | (layer or {}),
        embed_scale=c.embedding_multiplier,
        logit_scale=logit_scale,
        **more,
    )


def granite(c: Any) -> Architecture:
    mlp = same(gated_mlp(c, has_bias=c.mlp_bias))
    return granite_like(c, logit_scale=1 / c.logits_scaling, mlp=mlp)


def hyperclovax(c: Any) -> Architecture:
    after = Norm(c.rms_norm_eps) if c.use_post_norm else None
    return granite_like(
        c,
        logit_scale=c.logits_scaling,
        mlp=same(gated_mlp(c, has_bias=c.mlp_bias)),
        inner=sources(after_attention="post_norm1", after_mlp="post_norm2"),
        layer={"after": (after, after)},
    )


def granitemoe(c: Any, shared_size: int = 0) -> Architecture:
    shared = Mlp(c.hidden_act, shared_size) if shared_size else None
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, gated_mlp(c), shared=shared)
    return granite_like(c, logit_scale=1 / c.logits_scaling, mlp=same(moe), inner=EXPERTS)


def granitemoeshared(c: Any) -> Architecture:
    return granitemoe(c, c.shared_intermediate_size)


ROWS = (granite, granitemoe, granitemoeshared, hyperclovax)

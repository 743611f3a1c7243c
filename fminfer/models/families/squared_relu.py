"""Rows that resemble LLaMA, and have an MLP of two products: most with a squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fminfer.compute.spec import Mlp, Norm
from fminfer.models.families.config_parts import rope_of, same
from fminfer.models.families.llama_like import biases, llama_like
from fminfer.models.families.tensor_names import BY_HEAD, Architecture, parameter, sources


def _plain(c: Any, *, has_bias: bool) -> Mlp:
    return Mlp(c.hidden_act, c.intermediate_size, is_gated=False, has_bias=has_bias)


def _with_plain_mlp(c: Any, norm: Norm) -> Architecture:
    return llama_like(
        c,
        norm=norm,
        inner=sources(up="mlp.up_proj"),
        attention=biases(c),
        mlp=same(_plain(c, has_bias=c.mlp_bias)),
    )


def arcee(c: Any) -> Architecture:
    return _with_plain_mlp(c, Norm(c.rms_norm_eps))


def jais2(c: Any) -> Architecture:
    return _with_plain_mlp(c, Norm(c.layer_norm_eps, is_rms=False, has_bias=True))


def nemotron(c: Any) -> Architecture:
    return _with_plain_mlp(c, Norm(c.norm_eps, is_rms=False, has_bias=True, offset=1.0))


def apertus(c: Any) -> Architecture:
    return llama_like(
        c,
        inner=sources(
            before_attention="attention_layernorm",
            before_mlp="feedforward_layernorm",
            up="mlp.up_proj",
        )
        | {
            f"xielu.{ours}": parameter(f"mlp.act_fn.{theirs}")
            for ours, theirs in (("positive", "alpha_p"), ("negative", "alpha_n"))
        }
        | {f"xielu.{name}": parameter(f"mlp.act_fn.{name}") for name in ("beta", "eps")},
        attention=biases(c) | {"qk_norm": Norm(c.rms_norm_eps)},
        mlp=same(_plain(c, has_bias=False)),
    )


def persimmon(c: Any) -> Architecture:
    norm = Norm(c.layer_norm_eps, is_rms=False, has_bias=True)
    top = "self_attn."
    own = sources(
        out=f"{top}dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        q_norm=f"{top}q_layernorm",
        k_norm=f"{top}k_layernorm",
    ) | sources(BY_HEAD, qkv=f"{top}query_key_value")
    return llama_like(
        c,
        norm=norm,
        inner=own,
        outer=sources(final_norm="model.final_layernorm"),
        attention={
            "has_qkv_bias": True,
            "has_out_bias": True,
            "qk_norm": norm if c.qk_layernorm else None,
        },
        mlp=same(_plain(c, has_bias=True)),
    )


def nanochat(c: Any) -> Architecture:
    """Its norms have no weights, and its rotary positions turn the other way."""
    norm, rope = Norm(c.rms_norm_eps, has_weight=False), rope_of(c)
    rope = replace(rope, inv_freq=tuple(-each for each in rope.inv_freq))
    return llama_like(
        c,
        norm=norm,
        inner=sources(up="mlp.fc1", down="mlp.fc2"),
        attention=biases(c) | {"rope": rope, "qk_norm": norm, "qk_norm_is_last": True},
        mlp=same(_plain(c, has_bias=False)),
        embed_norm=norm,
        logit_cap=c.final_logit_softcapping,
    )


ROWS = (apertus, arcee, jais2, nemotron, persimmon, nanochat)

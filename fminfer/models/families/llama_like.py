"""Rows of families like LLaMA: norms before, rotary positions, mostly a gated MLP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fminfer.compute.values.spec import Norm, Rope
from fminfer.core.errors import CheckpointError
from fminfer.models.families.config_parts import (
    Changes,
    Mlps,
    Row,
    Where,
    derive_row,
    has_product_bias,
    head_dim_of,
    make_architecture,
    make_plain_rope,
    mlp_of,
    norm_of,
    rope_of,
)
from fminfer.models.families.tensor_names import (
    BY_HEAD,
    XIELU,
    Architecture,
    Sources,
    expert_sources,
    make_sources,
    parameter_source,
)

OUTER = make_sources(
    embed="model.embed_tokens", final_norm="model.norm", head="lm_head"
)
INNER = make_sources(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    out="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    up="mlp.gate_proj mlp.up_proj",
    down="mlp.down_proj",
    router="mlp.gate",
) | expert_sources(
    "mlp.experts.*.gate_proj mlp.experts.*.up_proj",
    "mlp.experts.*.down_proj",
    "mlp.experts",
)
SANDWICH = make_sources(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
WITHOUT_OUT_BIAS: Changes = {"has_out_bias": False}
OF_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\."


def llama_like(
    c: Any,
    *,
    norm: Norm | None = None,  # at all places; None: by the config's eps
    mlp: Mlps | None = None,  # None: a gated one
    inner: Sources | None = None,  # names that differ from LLaMA's
    # `qk_norm_over` of queries and keys with the same norm; "": they have none
    qk_norm: str = "",
    is_interleaved: bool = False,  # neighbours rotate together
    **more: Any,  # as for `make_architecture`
) -> Architecture:
    """Return a LLaMA with what differs."""
    norm = norm or norm_of(c)
    has_bias = has_product_bias(c, "attention_bias")
    of_out = getattr(c, "attention_out_bias", has_bias)
    usual: Changes = {"has_qkv_bias": has_bias, "has_out_bias": of_out}
    if qk_norm:
        usual |= {"qk_norm": norm, "qk_norm_over": qk_norm}
    if is_interleaved:
        usual["rope"] = rope_of(c, is_interleaved=True)
    return make_architecture(
        c,
        norm=norm,
        mlp=mlp or mlp_of(c),
        inner=INNER | (inner or {}),
        prefix="model.layers.{}.",
        usual=usual,
        **{"outer": OUTER} | more,
    )


def text_part_row(c: Any, **rows: Row) -> Architecture:
    """Return the text model of one that also reads images, by one of these rows."""
    text_type = c.text_config.model_type
    if (row := rows.get(text_type)) is not None:
        return replace(row(c.text_config), left_out=OF_IMAGES)
    raise CheckpointError(
        f"config.json has a text_config of the architecture {text_type!r}, which does not run "
        f"there; these do: {', '.join(rows)}"
    )


def rope_in_layers(rope: Rope, has_rope: Iterable[object]) -> list[Changes]:
    """Return the attention fields of each layer, of which some have rotary positions."""
    return [{"rope": rope if has_it else None} for has_it in has_rope]


def gemma_like(
    c: Any, *, attention: Changes | None = None, **more: Any
) -> Architecture:
    scaling_change: Changes = {}
    if hasattr(c, "query_pre_attn_scalar"):
        scaling_change["scaling"] = c.query_pre_attn_scalar**-0.5
    return llama_like(
        c,
        norm=norm_of(c, offset=1.0),
        attention=scaling_change | (attention or {}),
        embed_scale=c.hidden_size**0.5,
        logit_cap=getattr(c, "final_logit_softcapping", None),
        **more,
    )


def gemma2(c: Any, inner: Sources = SANDWICH, norms: Where = "around") -> Architecture:
    softcap = c.attn_logit_softcapping
    return gemma_like(c, inner=inner, norms=norms, attention={"softcap": softcap})


# It reads no attn_logit_softcapping: transformers' Gemma 3 never applies one.
gemma3_text = derive_row(gemma_like, inner=SANDWICH, norms="around", qk_norm="head")


def _phi_like(c: Any, *, inner: Sources, **more: Any) -> Architecture:
    """Return a LLaMA with LayerNorms and biases, and maybe norms of queries and keys."""
    names = make_sources(
        out="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
    )
    return llama_like(
        c,
        inner=names | inner,
        outer=OUTER | make_sources(final_norm="model.final_layernorm"),
        attention={"has_qkv_bias": True, "has_out_bias": True},
        qk_norm="head" if c.qk_layernorm else "",
        mlp=mlp_of(c, is_gated=False, has_bias=True),
        **more,
    )


def stablelm(c: Any) -> Architecture:
    head_norm = norm_of(c, has_bias=False) if c.qk_layernorm else None
    qk = {"has_qkv_bias": c.use_qkv_bias, "qk_norm": head_norm, "qk_norm_over": "heads"}
    q_norm, k_norm = (f"self_attn.{n}_layernorm.norms.*" for n in "qk")
    norms = "once" if c.use_parallel_residual else "before"
    return llama_like(
        c, inner=make_sources(q_norm=q_norm, k_norm=k_norm), attention=qk, norms=norms
    )


def smollm3(c: Any) -> Architecture:
    return llama_like(c, attention=rope_in_layers(rope_of(c), c.no_rope_layers))


def cohere(
    c: Any, attention: Changes | Sequence[Changes] | None = None
) -> Architecture:
    norm = norm_of(c, has_bias=False)
    return llama_like(
        c,
        norm=norm,
        is_interleaved=True,
        attention=attention,
        qk_norm="heads" if getattr(c, "use_qk_norm", False) else "",
        norms="once",
        logit_scale=c.logit_scale,
    )


def cohere2(c: Any) -> Architecture:
    """Only layers with a window have rotary positions."""
    rope = rope_of(c, is_interleaved=True)
    return cohere(
        c, rope_in_layers(rope, [kind == "sliding_attention" for kind in c.layer_types])
    )


def exaone_attention(c: Any) -> list[Changes]:
    """Return attention as in Cohere 2. Without windows all layers have positions."""
    is_unwindowed = c.sliding_window is None
    return rope_in_layers(
        rope_of(c),
        [is_unwindowed or kind == "sliding_attention" for kind in c.layer_types],
    )


def granite_like(c: Any, logit_scale: float | None = None, **more: Any) -> Architecture:
    """Return a LLaMA with Granite's multipliers, and what differs besides."""
    return llama_like(
        c,
        attention={"scaling": c.attention_multiplier},
        layer={"residual_scale": c.residual_multiplier},
        embed_scale=c.embedding_multiplier,
        logit_scale=1 / c.logits_scaling if logit_scale is None else logit_scale,
        **more,
    )


def hyperclovax(c: Any) -> Architecture:
    names = make_sources(after_attention="post_norm1", after_mlp="post_norm2")
    norms = "around" if c.use_post_norm else "before"
    return granite_like(c, c.logits_scaling, inner=names, norms=norms)


def hunyuan(
    c: Any, inner: Sources | None = None, mlp: Mlps | None = None
) -> Architecture:
    """Return a LLaMA whose norms of queries and keys come behind rotary positions."""
    parameters = c.rope_parameters
    rope = rope_of(c)
    if parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        size = head_dim_of(c)
        rope = make_plain_rope(
            parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2)), size
        )
    qk_names = make_sources(
        q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"
    )
    attention = {"rope": rope, "qk_norm_is_last": True}
    names = qk_names | (inner or {})
    return llama_like(c, inner=names, attention=attention, qk_norm="head", mlp=mlp)


def olmo(c: Any) -> Architecture:
    norm = Norm(1e-5, is_rms=False, has_weight=False)
    return llama_like(c, norm=norm, attention={"clip": c.clip_qkv})


_UP = make_sources(up="mlp.up_proj")
# LLaMAs whose MLP has two products, in some with a squared ReLU between them.
_plain_like = derive_row(llama_like, inner=_UP, mlp=partial(mlp_of, is_gated=False))
_APERTUS = (
    _UP
    | make_sources(
        before_attention="attention_layernorm", before_mlp="feedforward_layernorm"
    )
    | {
        f"xielu.{ours}": parameter_source(f"mlp.act_fn.{theirs}")
        for ours, theirs in XIELU.items()
    }
)


def nanochat(c: Any) -> Architecture:
    """Its norms have no weights, and its rotary positions turn the other way."""
    norm = norm_of(c, has_weight=False)
    rope = rope_of(c)
    rope = replace(rope, inv_freq=tuple(-each for each in rope.inv_freq))
    return _plain_like(
        c,
        norm=norm,
        inner=make_sources(up="mlp.fc1", down="mlp.fc2"),
        attention={"rope": rope, "qk_norm_is_last": True},
        qk_norm="head",
        embed_norm=norm,
        logit_cap=c.final_logit_softcapping,
    )


GATE_UP = make_sources(up="mlp.gate_up_proj")
_behind = derive_row(llama_like, inner=SANDWICH, norms="after")
_glm = derive_row(llama_like, is_interleaved=True, attention=WITHOUT_OUT_BIAS)
# Queries of Ministral 3 grow beyond the original length, which is the limit: `context_length`.
_OF_LLAMA = (
    "llama",
    "internlm3",
    "mistral",
    "ministral",
    "ministral3",
    "cwm",
    "seed_oss",
)

ROWS: dict[str, Row] = {
    **dict.fromkeys(_OF_LLAMA, llama_like),
    "mistral3": partial(text_part_row, mistral=llama_like, ministral3=llama_like),
    "qwen2": derive_row(llama_like, attention={"has_qkv_bias": True}),
    "qwen3": derive_row(llama_like, qk_norm="head"),
    "gemma": gemma_like,
    "gemma2": gemma2,
    "gemma3": partial(text_part_row, gemma3_text=gemma3_text),
    "gemma3_text": gemma3_text,
    "vaultgemma": derive_row(
        gemma2,
        inner=make_sources(before_mlp="pre_feedforward_layernorm"),
        norms="before",
    ),
    "phi": derive_row(
        _phi_like,
        inner=make_sources(up="mlp.fc1", down="mlp.fc2"),
        norms="once",
        has_head_bias=True,
    ),
    "persimmon": derive_row(
        _phi_like,
        inner=make_sources(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
        | make_sources(BY_HEAD, qkv="self_attn.query_key_value"),
    ),
    "phi3": derive_row(
        llama_like, inner=GATE_UP | make_sources(qkv="self_attn.qkv_proj")
    ),
    "stablelm": stablelm,
    "starcoder2": derive_row(
        _plain_like, inner=make_sources(up="mlp.c_fc", down="mlp.c_proj")
    ),
    "helium": _glm,
    "glm": derive_row(_glm, inner=GATE_UP),
    "glm4": derive_row(
        _glm,
        inner=GATE_UP
        | make_sources(
            after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
        ),
        norms="around",
    ),
    "ernie4_5": derive_row(llama_like, is_interleaved=True),
    "smollm3": smollm3,
    "granite": granite_like,
    "hyperclovax": hyperclovax,
    "cohere": cohere,
    "cohere2": cohere2,
    "olmo": olmo,
    **dict.fromkeys(("olmo2", "olmo3"), derive_row(_behind, qk_norm="all")),
    "exaone4": derive_row(_behind, qk_norm="head", attention=exaone_attention),
    "hunyuan_v1_dense": hunyuan,
    **dict.fromkeys(("arcee", "jais2"), _plain_like),
    "nemotron": derive_row(_plain_like, norm=partial(norm_of, offset=1.0)),
    "apertus": derive_row(_plain_like, inner=_APERTUS, qk_norm="head"),
    "nanochat": nanochat,
}

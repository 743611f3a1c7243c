"""Rows of families like GPT: LayerNorms with biases, two products in the MLP."""

from __future__ import annotations

from typing import Any

from fminfer.compute.values.spec import Alibi, Mlp, Norm
from fminfer.models.families.config_parts import (
    Changes,
    Row,
    derive_row,
    first_field,
    head_dim_of,
    interleaved_alibi_slopes,
    make_architecture,
    make_plain_rope,
    mpt_alibi_slopes,
    norm_of,
    rope_of,
)
from fminfer.models.families.tensor_names import (
    AS_STORED,
    BY_CORE,
    BY_HEAD,
    TRANSPOSED,
    Architecture,
    Sources,
    make_sources,
    parameter_source,
    with_layout,
)

OUTER = make_sources(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    head="lm_head",
)
INNER = make_sources(
    before_attention="ln_1",
    before_mlp="ln_2",
    qkv="attn.c_attn",
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
BLOOM_OUTER = make_sources(
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
)
BLOOM_INNER = make_sources(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
) | make_sources(BY_HEAD, qkv="self_attention.query_key_value")
NEOX_INNER = (
    BLOOM_INNER
    | make_sources(out="attention.dense")
    | make_sources(BY_HEAD, qkv="attention.query_key_value")
)
FAIRSEQ_NORM = Norm(1e-5, is_rms=False, has_bias=True)
FAIRSEQ_INNER = make_sources(
    before_attention="self_attn_layer_norm",
    sum_attention="self_attn_layer_norm",
    qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    out="self_attn.out_proj",
    before_mlp="final_layer_norm",
    sum_mlp="final_layer_norm",
    up="fc1",
    down="fc2",
)


def gpt_like(
    c: Any,
    *,
    norm: Norm | None = None,  # at all places; None: a LayerNorm with a bias
    activation: str | None = None,
    size: int | None = None,  # of the MLP
    inner: Sources | None = None,  # names that differ from GPT-2's
    outer: Sources | None = None,
    has_bias: bool = True,  # of the products
    **more: Any,  # as for `make_architecture`
) -> Architecture:
    """Return a GPT-2 with what differs."""
    activation = activation or first_field(c, "activation_function", "hidden_act")
    mlp = Mlp(activation, size or 4 * c.hidden_size, is_gated=False, has_bias=has_bias)
    return make_architecture(
        c,
        norm=norm or norm_of(c),
        mlp=mlp,
        outer=OUTER | (outer or {}),
        inner=INNER | (inner or {}),
        usual={"has_qkv_bias": has_bias, "has_out_bias": has_bias},
        **{"prefix": "transformer.h.{}."} | more,
    )


def _fairseq(
    c: Any, *, top: str, outer: Sources | None = None, **more: Any
) -> Architecture:
    """Return a GPT with the names, positions and eps of fairseq, whatever the config says."""
    usual_names = make_sources(
        embed=f"{top}embed_tokens",
        positions=f"{top}embed_positions",
        final_norm=f"{top}layer_norm",
    )
    usual: Changes = {
        "norm": FAIRSEQ_NORM,
        "size": first_field(c, "ffn_dim", "intermediate_size"),
        "num_positions": c.max_position_embeddings + 2,
        "position_offset": 2,
        "embed_scale": embed_scale_of(c),
    }
    names = usual_names | (outer or {})
    prefix = f"{top}layers.{{}}."
    return gpt_like(c, inner=FAIRSEQ_INNER, outer=names, prefix=prefix, **usual | more)


def embed_scale_of(c: Any) -> float:
    return float(c.hidden_size**0.5) if getattr(c, "scale_embedding", False) else 1.0


def opt(c: Any) -> Architecture:
    has_weights = c.layer_norm_elementwise_affine
    is_before = c.do_layer_norm_before
    norm = Norm(1e-5, is_rms=False, has_weight=has_weights, has_bias=has_weights)
    top = "model.decoder."
    outer = make_sources(
        final_norm=f"{top}final_layer_norm",
        project_in=f"{top}project_in",
        project_out=f"{top}project_out",
    )
    return _fairseq(
        c,
        top=top,
        norm=norm,
        outer=outer,
        has_bias=c.enable_bias,
        norms="before" if is_before else "of_sum",
        final_norm=norm if is_before and not c._remove_final_layer_norm else None,
        embed_size=c.word_embed_proj_dim,
    )


def gpt2(c: Any) -> Architecture:
    by_layer = c.scale_attn_by_inverse_layer_idx
    scaling = _attention_scaling(c)
    numbers = range(1, c.num_hidden_layers + 1)
    return gpt_like(
        c,
        size=c.n_inner,
        inner=with_layout(TRANSPOSED, INNER, "qkv", "out", "up", "down"),
        attention=[{"scaling": scaling / (n if by_layer else 1)} for n in numbers],
        num_positions=c.max_position_embeddings,
    )


def gpt_bigcode(c: Any) -> Architecture:
    kv_heads = 1 if c.multi_query else c.num_attention_heads
    layout = AS_STORED if c.multi_query else BY_HEAD
    return gpt_like(
        c,
        size=c.n_inner,
        inner=make_sources(layout, qkv="attn.c_attn"),
        attention={"kv_heads": kv_heads, "scaling": _attention_scaling(c)},
        num_positions=c.max_position_embeddings,
    )


def _attention_scaling(c: Any) -> float:
    return float(head_dim_of(c) ** -0.5) if c.scale_attn_weights else 1.0


def gpt_neo(c: Any) -> Architecture:
    top = "attn.attention."
    names = make_sources(
        qkv=f"{top}q_proj {top}k_proj {top}v_proj", out=f"{top}out_proj"
    )
    window = c.window_size
    kinds = c.attention_layers
    return gpt_like(
        c,
        size=c.intermediate_size,
        inner=names,
        attention=[
            {
                "scaling": 1.0,
                "window": window if kind == "local" else None,
                "has_qkv_bias": False,
            }
            for kind in kinds
        ],
        num_positions=c.max_position_embeddings,
    )


def gptj(c: Any, inner: Sources | None = None) -> Architecture:
    names = make_sources(
        qkv="attn.q_proj attn.k_proj attn.v_proj",
        out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
    )
    rope = make_plain_rope(10000, c.rotary_dim or c.hidden_size, is_interleaved=True)
    return gpt_like(
        c,
        size=c.n_inner,
        inner=names | (inner or {}),
        attention={"rope": rope, "has_qkv_bias": False, "has_out_bias": False},
        norms="once",
        has_head_bias=True,
    )


def falcon(c: Any) -> Architecture:
    heads = c.num_attention_heads
    is_new = c.new_decoder_architecture
    kv_heads_of_new = c.num_kv_heads
    num_norms = c.num_ln_in_parallel_attn  # of the new layout only
    kv_heads = kv_heads_of_new if is_new else 1 if c.multi_query else heads
    is_parallel = c.parallel_attn or is_new
    has_two = is_new and num_norms != 1
    attention: Changes = {"kv_heads": kv_heads, "rope": rope_of(c)}
    if c.alibi:
        attention |= {
            "rope": None,
            "alibi": Alibi(interleaved_alibi_slopes(heads), is_rounded=True),
        }
    two_norms = (
        make_sources(before_attention="ln_attn", before_mlp="ln_mlp") if has_two else {}
    )
    return gpt_like(
        c,
        activation=c.activation,
        size=c.ffn_hidden_size,
        inner=BLOOM_INNER | two_norms,
        outer=BLOOM_OUTER,
        attention=attention,
        has_bias=c.bias,
        norms="once" if is_parallel and not has_two else "before",
        layer={"is_parallel": is_parallel},
    )


def mpt(c: Any) -> Architecture:
    attn_config = c.attn_config
    alibi = Alibi(mpt_alibi_slopes(c.num_attention_heads, attn_config.alibi_bias_max))
    attention: Changes = {"alibi": alibi, "clip": attn_config.clip_qkv}
    if attn_config.softmax_scale:
        attention["scaling"] = attn_config.softmax_scale
    inner = make_sources(
        before_attention="norm_1",
        before_mlp="norm_2",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        up="ffn.up_proj",
        down="ffn.down_proj",
    )
    return gpt_like(
        c,
        norm=norm_of(c, has_bias=False),
        activation="gelu",
        inner=inner,
        outer=make_sources(final_norm="transformer.norm_f"),
        prefix="transformer.blocks.{}.",
        attention=attention,
        has_bias=False,
    )


def bloom(c: Any) -> Architecture:
    return gpt_like(
        c,
        activation="gelu_new",
        inner=BLOOM_INNER,
        outer=BLOOM_OUTER,
        attention={"alibi": Alibi(interleaved_alibi_slopes(c.num_attention_heads))},
        layer={"adds_normed": c.apply_residual_connection_post_layernorm},
        embed_norm=norm_of(c),
    )


def _neox_like(
    c: Any, *, head: str, inner: Sources = NEOX_INNER, **more: Any
) -> Architecture:
    top = f"{c.model_type}."
    outer = make_sources(
        embed=f"{top}embed_in", final_norm=f"{top}final_layer_norm", head=head
    )
    return gpt_like(c, inner=inner, outer=outer, prefix=f"{top}layers.{{}}.", **more)


def gpt_neox(c: Any) -> Architecture:
    bias = c.attention_bias
    return _neox_like(
        c,
        head="embed_out|lm_head",
        size=c.intermediate_size,
        attention={"has_qkv_bias": bias, "has_out_bias": bias},
        layer={"is_parallel": c.use_parallel_residual},
    )


def gpt_neox_japanese(c: Any) -> Architecture:
    """Only the last layer has a bias, at the output of attention."""
    num = c.num_hidden_layers
    return _neox_like(
        c,
        head="embed_out",
        inner=NEOX_INNER | {"out.bias": parameter_source("attention.dense_bias")},
        size=c.hidden_size * c.intermediate_multiple_size,
        attention=[{"has_out_bias": number == num} for number in range(1, num + 1)],
        has_bias=False,
    )


ROWS: dict[str, Row] = {
    "opt": opt,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gptj": gptj,
    "codegen": derive_row(gptj, inner=make_sources(BY_CORE, qkv="attn.qkv_proj")),
    "falcon": falcon,
    "mpt": mpt,
    "bloom": bloom,
    "biogpt": derive_row(
        _fairseq, top="biogpt.", outer=make_sources(head="output_projection")
    ),
    "xglm": derive_row(
        _fairseq,
        top="model.",
        has_sinusoids=True,
        left_out=r"model\.embed_positions\.weights$",  # stored by old releases
    ),
    "gpt_neox": gpt_neox,
    "gpt_neox_japanese": gpt_neox_japanese,
}

"""Rows that resemble GPT: LayerNorms with biases, two products in the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.compute.spec import Alibi, Mlp, Norm
from fminfer.models.families.config_parts import (
    Changes,
    assemble,
    head_dim_of,
    interleaved_slopes,
    mpt_slopes,
    plain_rope,
    rope_of,
    same,
)
from fminfer.models.families.tensor_names import (
    AS_STORED,
    BY_CORE,
    BY_HEAD,
    TRANSPOSED,
    Architecture,
    Sources,
    laid_out,
    parameter,
    sources,
)

OUTER = sources(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    head="lm_head",
)
INNER = sources(
    before_attention="ln_1",
    before_mlp="ln_2",
    qkv="attn.c_attn",
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
BLOOM_OUTER = sources(
    embed="transformer.word_embeddings", embed_norm="transformer.word_embeddings_layernorm"
)
BLOOM_INNER = sources(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
) | sources(BY_HEAD, qkv="self_attention.query_key_value")
NEOX_INNER = (
    BLOOM_INNER | sources(out="attention.dense") | sources(BY_HEAD, qkv="attention.query_key_value")
)
FAIRSEQ_INNER = sources(
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
    norm: Norm | None = None,
    activation: str | None = None,
    size: int | None = None,
    inner: Sources | None = None,
    outer: Sources | None = None,
    prefix: str = "transformer.h.{}.",
    attention: Callable[[int], Changes] | Changes | None = None,
    has_bias: bool = True,
    **more: Any,
) -> Architecture:
    """Return a GPT-2 with what differs.

    Args:
        norm: at all places; None: a LayerNorm with a bias.
        activation, size: of the MLP.
        inner, outer, prefix: names that differ from GPT-2's.
        has_bias: of the products.
        attention, more: as for `assemble`.
    """
    activation = activation or c.activation_function
    mlp = Mlp(activation, size or 4 * c.hidden_size, is_gated=False, has_bias=has_bias)

    def own(number: int) -> Changes:
        changes = attention(number) if callable(attention) else attention or {}
        return {"has_qkv_bias": has_bias, "has_out_bias": has_bias} | changes

    return assemble(
        c,
        norm=norm or Norm(c.layer_norm_epsilon, is_rms=False, has_bias=True),
        mlp=same(mlp),
        prefix=prefix,
        outer=OUTER | (outer or {}),
        inner=INNER | (inner or {}),
        attention=own,
        **more,
    )


def _fairseq(
    c: Any,
    top: str,
    *,
    norm: Norm | None = None,
    outer: Sources | None = None,
    **more: Any,
) -> Architecture:
    """Return a GPT with the names and positions of fairseq.

    Args:
        norm: at all places; None: fairseq's own, whatever the config says.
        outer: names that differ.
    """
    own = sources(
        embed=f"{top}embed_tokens",
        positions=f"{top}embed_positions",
        final_norm=f"{top}layer_norm",
    )
    return gpt_like(
        c,
        norm=norm or Norm(1e-5, is_rms=False, has_bias=True),
        inner=FAIRSEQ_INNER,
        outer=own | (outer or {}),
        prefix=f"{top}layers.{{}}.",
        num_positions=c.max_position_embeddings + 2,
        position_offset=2,
        **more,
    )


def opt(c: Any) -> Architecture:
    has_weights = c.layer_norm_elementwise_affine
    norm = Norm(1e-5, is_rms=False, has_weight=has_weights, has_bias=has_weights)
    top, is_before = "model.decoder.", c.do_layer_norm_before
    outer = sources(
        final_norm=f"{top}final_layer_norm",
        project_in=f"{top}project_in",
        project_out=f"{top}project_out",
    )
    return _fairseq(
        c,
        top,
        norm=norm,
        size=c.ffn_dim,
        outer=outer,
        has_bias=c.enable_bias,
        layer={} if is_before else {"before": (None, None), "of_sum": (norm, norm)},
        final_norm=norm if is_before and not c._remove_final_layer_norm else None,
        embed_size=c.word_embed_proj_dim,
    )


def biogpt(c: Any) -> Architecture:
    return _fairseq(
        c,
        "biogpt.",
        activation=c.hidden_act,
        size=c.intermediate_size,
        outer=sources(head="output_projection"),
        embed_scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
    )


def xglm(c: Any) -> Architecture:
    return _fairseq(
        c,
        "model.",
        size=c.ffn_dim,
        embed_scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
        has_sinusoids=True,
        left_out=r"model\.embed_positions\.weights$",  # stored by old releases
    )


def gpt2(c: Any) -> Architecture:
    def attention(number: int) -> Changes:
        scaling = head_dim_of(c) ** -0.5 if c.scale_attn_weights else 1.0
        return {"scaling": scaling / (number + 1 if c.scale_attn_by_inverse_layer_idx else 1)}

    products = {name: INNER[name] for name in ("qkv", "out", "up", "down")}
    return gpt_like(
        c,
        size=c.n_inner,
        inner=laid_out(TRANSPOSED, products),
        attention=attention,
        num_positions=c.max_position_embeddings,
    )


def gpt_bigcode(c: Any) -> Architecture:
    scaling = head_dim_of(c) ** -0.5 if c.scale_attn_weights else 1.0
    kv_heads = 1 if c.multi_query else c.num_attention_heads
    layout = AS_STORED if c.multi_query else BY_HEAD
    return gpt_like(
        c,
        size=c.n_inner,
        inner=sources(layout, qkv="attn.c_attn"),
        attention={"kv_heads": kv_heads, "scaling": scaling},
        num_positions=c.max_position_embeddings,
    )


def gpt_neo(c: Any) -> Architecture:
    top = "attn.attention."
    own = sources(qkv=f"{top}q_proj {top}k_proj {top}v_proj", out=f"{top}out_proj")

    window_size = c.window_size  # read it also where no layer is local

    def attention(number: int) -> Changes:
        window = window_size if c.attention_layers[number] == "local" else None
        return {"scaling": 1.0, "window": window, "has_qkv_bias": False}

    return gpt_like(
        c,
        size=c.intermediate_size,
        inner=own,
        attention=attention,
        num_positions=c.max_position_embeddings,
    )


def gptj(c: Any, inner: Sources | None = None) -> Architecture:
    norm = Norm(c.layer_norm_epsilon, is_rms=False, has_bias=True)
    own = sources(
        qkv="attn.q_proj attn.k_proj attn.v_proj",
        out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
    )
    rope = plain_rope(10000, c.rotary_dim or c.hidden_size, is_interleaved=True)
    return gpt_like(
        c,
        norm=norm,
        size=c.n_inner,
        inner=own | (inner or {}),
        attention={"rope": rope, "has_qkv_bias": False, "has_out_bias": False},
        layer={"before": (norm, None), "is_parallel": True},
        has_head_bias=True,
    )


def codegen(c: Any) -> Architecture:
    return gptj(c, sources(BY_CORE, qkv="attn.qkv_proj"))


def falcon(c: Any) -> Architecture:
    norm = Norm(c.layer_norm_epsilon, is_rms=False, has_bias=True)
    heads, is_new = c.num_attention_heads, c.new_decoder_architecture
    of_new, num_norms = c.num_kv_heads, c.num_ln_in_parallel_attn  # of the new layout only
    kv_heads = of_new if is_new else 1 if c.multi_query else heads
    is_parallel, has_two = c.parallel_attn or is_new, is_new and num_norms != 1
    attention: Changes = {"kv_heads": kv_heads, "rope": rope_of(c)}
    if c.alibi:
        attention |= {"rope": None, "alibi": Alibi(interleaved_slopes(heads), is_rounded=True)}
    two = sources(before_attention="ln_attn", before_mlp="ln_mlp") if has_two else {}
    return gpt_like(
        c,
        norm=norm,
        activation=c.activation,
        size=c.ffn_hidden_size,
        inner=BLOOM_INNER | two,
        outer=BLOOM_OUTER,
        attention=attention,
        has_bias=c.bias,
        layer={
            "before": (norm, norm if has_two or not is_parallel else None),
            "is_parallel": is_parallel,
        },
    )


def mpt(c: Any) -> Architecture:
    how = c.attn_config
    attention: Changes = {
        "alibi": Alibi(mpt_slopes(c.num_attention_heads, how.alibi_bias_max)),
        "clip": how.clip_qkv,
    }
    if how.softmax_scale:
        attention["scaling"] = how.softmax_scale
    inner = sources(
        before_attention="norm_1",
        before_mlp="norm_2",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        up="ffn.up_proj",
        down="ffn.down_proj",
    )
    return gpt_like(
        c,
        norm=Norm(c.layer_norm_epsilon, is_rms=False),
        activation="gelu",
        inner=inner,
        outer=sources(final_norm="transformer.norm_f"),
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
        attention={"alibi": Alibi(interleaved_slopes(c.num_attention_heads))},
        layer={"adds_normed": c.apply_residual_connection_post_layernorm},
        embed_norm=Norm(c.layer_norm_epsilon, is_rms=False, has_bias=True),
    )


def _neox_like(c: Any, top: str, head: str, inner: Sources, **more: Any) -> Architecture:
    outer = sources(embed=f"{top}embed_in", final_norm=f"{top}final_layer_norm", head=head)
    return gpt_like(
        c,
        norm=Norm(c.layer_norm_eps, is_rms=False, has_bias=True),
        activation=c.hidden_act,
        inner=inner,
        outer=outer,
        prefix=f"{top}layers.{{}}.",
        **more,
    )


def gpt_neox(c: Any) -> Architecture:
    bias = c.attention_bias
    return _neox_like(
        *(c, "gpt_neox.", "embed_out|lm_head", NEOX_INNER),
        size=c.intermediate_size,
        attention={"has_qkv_bias": bias, "has_out_bias": bias},
        layer={"is_parallel": c.use_parallel_residual},
    )


def gpt_neox_japanese(c: Any) -> Architecture:
    """Only the last layer has a bias, at the output of attention."""
    inner = NEOX_INNER | {"out.bias": parameter("attention.dense_bias")}
    last = c.num_hidden_layers - 1
    return _neox_like(
        *(c, "gpt_neox_japanese.", "embed_out", inner),
        size=c.hidden_size * c.intermediate_multiple_size,
        attention=lambda number: {"has_out_bias": number == last},
        has_bias=False,
    )


ROWS = (
    *(opt, gpt2, gpt_bigcode, gpt_neo, gptj, codegen, falcon, mpt, bloom),
    *(biogpt, xglm, gpt_neox, gpt_neox_japanese),
)

"""Rows with an encoder and a decoder: T5 and what resembles it, BART and mBART."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fminfer.compute.values.spec import (
    Attention,
    Cross,
    Encoder,
    Layer,
    Mlp,
    Model,
    Norm,
    Relative,
)
from fminfer.core.errors import CheckpointError
from fminfer.models.families.config_parts import Row, derive_row, norm_places
from fminfer.models.families.gpt_like import FAIRSEQ_INNER, FAIRSEQ_NORM, embed_scale_of
from fminfer.models.families.tensor_names import (
    AS_ROW,
    Architecture,
    Sources,
    make_sources,
    parameter_source,
)


def t5(c: Any, *, is_shared: bool = True) -> Architecture:
    """Return T5 (Raffel et al. 2020), v1.1, Flan-T5, UL2, T0 or mT5.

    If `is_shared`, all layers have the biases by distance of the first; in UMT5 each
    has its own.
    """
    is_scaled = getattr(c, "scale_decoder_outputs", c.tie_word_embeddings)
    is_scaled = is_scaled and c.model_type != "mt5"
    norm = Norm(c.layer_norm_epsilon)
    mlp = Mlp(c.dense_act_fn, c.d_ff, is_gated=c.is_gated_act, is_wide=True)
    plain = Attention(c.num_heads, c.num_heads, c.d_kv, 1.0)
    buckets = c.relative_attention_num_buckets
    most = c.relative_attention_max_distance
    if buckets < 4 or most < 1:
        raise CheckpointError(
            f"config.json has relative_attention_num_buckets {buckets} and "
            f"relative_attention_max_distance {most}; fminfer computes such a model, as "
            "transformers does, only from 4 and from 1 on"
        )

    def make_layer(*, is_causal: bool) -> Layer:
        relative = Relative(buckets, most, is_causal=is_causal)
        attention = replace(plain, is_causal=is_causal, relative=relative)
        cross = Cross(plain, input_norm=norm, sum_norm=None) if is_causal else None
        return Layer(attention, mlp, input_norms=(norm, norm), cross=cross)

    decoder = (make_layer(is_causal=True),) * c.num_decoder_layers
    encoder = (make_layer(is_causal=False),) * c.num_layers
    model = Model(
        c.d_model,
        c.vocab_size,
        decoder + encoder,
        norm,
        embed_size=c.d_model,
        logit_scale=c.d_model**-0.5 if is_scaled else 1.0,
        encoder=Encoder(len(encoder), final_norm=norm, has_embed=True),
    )
    outer = make_sources(
        embed="decoder.embed_tokens|shared|encoder.embed_tokens|lm_head",
        encoder__embed="encoder.embed_tokens|shared|decoder.embed_tokens|lm_head",
        final_norm="decoder.final_layer_norm",
        encoder__final_norm="encoder.final_layer_norm",
        head="lm_head|shared|encoder.embed_tokens|decoder.embed_tokens",
    )
    return Architecture(
        model,
        outer,
        _t5_sources("decoder", mlp, is_shared=is_shared),
        prefix="decoder.block.{}.",
        base="",
        left_out=r"(shared|(encoder|decoder)\.embed_tokens)\.|"
        r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\."
        r"relative_attention_bias",
        encoder_prefix="encoder.block.{}.",
        encoder_inner=_t5_sources("encoder", mlp, is_shared=is_shared),
    )


def _t5_sources(side: str, mlp: Mlp, *, is_shared: bool) -> Sources:
    self_attention = "layer.0.SelfAttention"
    cross = "layer.1.EncDecAttention"
    mlp_layer = "layer.2" if side == "decoder" else "layer.1"
    dense = f"{mlp_layer}.DenseReluDense"
    relative = f"{self_attention}.relative_attention_bias"
    return make_sources(
        before_attention="layer.0.layer_norm",
        before_cross="layer.1.layer_norm",
        before_mlp=f"{mlp_layer}.layer_norm",
        qkv=f"{self_attention}.q {self_attention}.k {self_attention}.v",
        out=f"{self_attention}.o",
        relative=f"/{side}.block.0.{relative}" if is_shared else relative,
        cross_q=f"{cross}.q",
        cross_kv=f"{cross}.k {cross}.v",
        cross_out=f"{cross}.o",
        up=f"{dense}.wi_0 {dense}.wi_1" if mlp.is_gated else f"{dense}.wi",
        down=f"{dense}.wo",
    )


BART_OUTER = make_sources(
    positions="model.decoder.embed_positions",
    embed_norm="model.decoder.layernorm_embedding",
    final_norm="model.decoder.layer_norm",
    encoder__positions="model.encoder.embed_positions",
    encoder__embed_norm="model.encoder.layernorm_embedding",
    encoder__final_norm="model.encoder.layer_norm",
) | {"head.bias": parameter_source("final_logits_bias", AS_ROW)}
BART_INNER = FAIRSEQ_INNER | make_sources(
    before_cross="encoder_attn_layer_norm",
    sum_cross="encoder_attn_layer_norm",
    cross_q="encoder_attn.q_proj",
    cross_kv="encoder_attn.k_proj encoder_attn.v_proj",
    cross_out="encoder_attn.out_proj",
)


def bart(c: Any, *, is_before: bool = False) -> Architecture:
    """Return BART (Lewis et al. 2019), or mBART (Liu et al. 2020), whose norms stand before."""
    norm = FAIRSEQ_NORM
    heads = c.decoder_attention_heads
    if c.encoder_attention_heads != heads:
        raise CheckpointError(
            f"config.json has {c.encoder_attention_heads} heads in the encoder and "
            f"{heads} in the decoder; fminfer computes such a model only with as many "
            "in both"
        )
    dim = c.d_model // heads
    attention = Attention(
        heads, heads, dim, dim**-0.5, has_qkv_bias=True, has_out_bias=True
    )
    layer_norms = norm_places(norm, "before" if is_before else "of_sum")

    def make_layer(size: int, *, is_causal: bool) -> Layer:
        mlp = Mlp(c.activation_function, size, is_gated=False, has_bias=True)
        cross = Cross(
            attention, norm if is_before else None, None if is_before else norm
        )
        side_attention = replace(attention, is_causal=is_causal)
        return Layer(
            side_attention, mlp, **layer_norms, cross=cross if is_causal else None
        )

    decoder = (make_layer(c.decoder_ffn_dim, is_causal=True),) * c.decoder_layers
    encoder = (make_layer(c.encoder_ffn_dim, is_causal=False),) * c.encoder_layers
    num_positions = c.max_position_embeddings + 2
    tables = {"num_positions": num_positions, "position_offset": 2, "embed_norm": norm}
    final_norm = norm if is_before else None
    model = Model(
        c.d_model,
        c.vocab_size,
        decoder + encoder,
        final_norm,
        embed_size=c.d_model,
        embed_scale=embed_scale_of(c),
        has_head_bias=True,
        encoder=Encoder(len(encoder), final_norm=final_norm, has_embed=True, **tables),
        **tables,
    )
    # Untied, each table is stored, and nothing reads `shared`.
    shared = "|model.shared|lm_head" if c.tie_word_embeddings else ""
    outer = make_sources(
        embed=f"model.decoder.embed_tokens{shared}",
        encoder__embed=f"model.encoder.embed_tokens{shared}",
        head="lm_head|model.shared" if shared else "lm_head",
    )
    return Architecture(
        model,
        BART_OUTER | outer,
        BART_INNER,
        prefix="model.decoder.layers.{}.",
        base="model.",
        left_out=r"(model\.)?(shared|(encoder|decoder)\.embed_tokens)\.",
        encoder_prefix="model.encoder.layers.{}.",
        encoder_inner=BART_INNER,
    )


ROWS: dict[str, Row] = {
    **dict.fromkeys(("t5", "mt5"), t5),
    "umt5": derive_row(t5, is_shared=False),
    "bart": bart,
    "mbart": derive_row(bart, is_before=True),
}

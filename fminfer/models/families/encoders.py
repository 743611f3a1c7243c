"""Rows of encoders: layers that see each prompt whole, and a vector for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fminfer.compute.spec import Attention, Encoder, Layer, Mlp, Model, Norm, Pooling, Relative
from fminfer.models.families.tensor_names import Architecture, Sources, sources

MEAN = Pooling("mean")  # as sentence-transformers pools what does not say how
BERT_OUTER = sources(
    embed="embeddings.word_embeddings",
    encoder__positions="embeddings.position_embeddings",
    encoder__types="embeddings.token_type_embeddings",
    encoder__embed_norm="embeddings.LayerNorm",
)
BERT_INNER = sources(
    qkv="attention.self.query attention.self.key attention.self.value",
    out="attention.output.dense",
    sum_attention="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    sum_mlp="output.LayerNorm",
)


def _bert_like(
    c: Any,
    *,
    base: str,
    attention: Attention | None = None,
    mlp: Mlp | None = None,
    eps: float = 1e-12,
    inner: Sources = BERT_INNER,
    prefix: str = "encoder.layer.{}.",
    **encoder: Any,
) -> Architecture:
    """Return a BERT with what differs.

    Args:
        base: what names begin with, where a head was saved, too.
        attention, mlp: of each layer; None: BERT's.
        eps: of norms.
        inner, prefix: names that differ from BERT's.
        encoder: fields of `Encoder` that differ.
    """
    norm = Norm(eps, is_rms=False, has_bias=True)
    layer = Layer(
        attention or _attention(c),
        mlp or Mlp(c.hidden_act, c.intermediate_size, is_gated=False, has_bias=True),
        before=(None, None),
        of_sum=(norm, norm),
    )
    how: dict[str, Any] = {"num_positions": c.max_position_embeddings, "embed_norm": norm}
    num, size = c.num_hidden_layers, c.hidden_size
    model = Model(
        size,
        c.vocab_size,
        (layer,) * num,
        None,
        embed_size=size,
        encoder=Encoder(num, pooling=MEAN, **how | encoder),
    )
    left_out = rf"({base})?pooler\."
    return Architecture(model, BERT_OUTER, inner, prefix=prefix, base=base, left_out=left_out)


def _attention(c: Any, **changes: Any) -> Attention:
    heads = c.num_attention_heads
    dim = c.hidden_size // heads
    how = Attention(
        heads, heads, dim, dim**-0.5, has_qkv_bias=True, has_out_bias=True, is_causal=False
    )
    return replace(how, **changes)


def bert(c: Any) -> Architecture:
    """Return BERT (Devlin et al. 2018)."""
    return _bert_like(c, base="bert.", eps=c.layer_norm_eps, num_types=c.type_vocab_size)


def roberta(c: Any) -> Architecture:
    """Return RoBERTa (Liu et al. 2019): positions begin behind the padding's row."""
    return _bert_like(
        c,
        base="roberta.",
        eps=c.layer_norm_eps,
        num_types=c.type_vocab_size,
        position_offset=c.pad_token_id + 1,
    )


def distilbert(c: Any) -> Architecture:
    """Return DistilBERT (Sanh et al. 2019)."""
    inner = sources(
        qkv="attention.q_lin attention.k_lin attention.v_lin",
        out="attention.out_lin",
        sum_attention="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        sum_mlp="output_layer_norm",
    )
    return _bert_like(
        c,
        base="distilbert.",
        mlp=Mlp(c.activation, c.hidden_dim, is_gated=False, has_bias=True),
        inner=inner,
        prefix="transformer.layer.{}.",
    )


def mpnet(c: Any) -> Architecture:
    """Return MPNet (Song et al. 2020): biases by distance, which layers share."""
    inner = sources(
        qkv="attention.attn.q attention.attn.k attention.attn.v",
        out="attention.attn.o",
        relative="/encoder.relative_attention_bias",
        sum_attention="attention.LayerNorm",
    )
    relative = Relative(c.relative_attention_num_buckets, 128, is_causal=False)
    return _bert_like(
        c,
        base="mpnet.",
        attention=_attention(c, relative=relative),
        eps=c.layer_norm_eps,
        inner=BERT_INNER | inner,
        position_offset=2,
    )


ROWS = (bert, roberta, distilbert, mpnet)

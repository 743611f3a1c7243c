"""Rows of encoders, and the heads of all models for vectors and for scores of classes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fminfer.compute.values.spec import (
    Encoder,
    Layer,
    Mlp,
    Model,
    Norm,
    Pooling,
    Reading,
    Relative,
)
from fminfer.core.errors import CheckpointError
from fminfer.models.families.config_parts import (
    Changes,
    Row,
    derive_row,
    make_architecture,
    mlp_of,
    norm_of,
    rope_of,
)
from fminfer.models.families.tensor_names import (
    AS_STORED,
    Architecture,
    Source,
    Sources,
    make_sources,
)

MEAN = Pooling("mean")  # as sentence-transformers pools what does not say how
BERT_OUTER = make_sources(
    embed="embeddings.word_embeddings",
    encoder__positions="embeddings.position_embeddings",
    encoder__types="embeddings.token_type_embeddings",
    encoder__embed_norm="embeddings.LayerNorm",
)
BERT_INNER = make_sources(
    qkv="attention.self.query attention.self.key attention.self.value",
    out="attention.output.dense",
    sum_attention="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    sum_mlp="output.LayerNorm",
)
# The two dense layers of heads.
POOLER = make_sources(reading_0="pooler.dense", reading_1="classifier")
CLASSIFIER = make_sources(reading_0="classifier.dense", reading_1="classifier.out_proj")


def _bert_like(
    c: Any,
    *,
    base: str,  # what names begin with, where a head was saved, too
    norm: Norm | None = None,
    head: Sources = POOLER,  # that scores classes
    activation: str = "tanh",  # of that head
    padding_id: int | None = None,  # of tokens without a position
    **more: Any,  # as for `make_architecture`
) -> Architecture:
    """Return a BERT (Devlin et al. 2018) with what differs."""
    norm = norm or norm_of(c)
    usual: Changes = {
        "kv_heads": c.num_attention_heads,
        "rope": None,
        "window": None,
        "has_qkv_bias": True,
        "has_out_bias": True,
        "is_causal": getattr(c, "is_decoder", False),
    }
    arguments: Changes = {
        "num_positions": c.max_position_embeddings,
        "embed_norm": norm,
        "prefix": "encoder.layer.{}.",
        "inner": BERT_INNER,
        "outer": BERT_OUTER,
        "left_out": rf"({base})?pooler\.",
        "norms": "of_sum",
        "final_norm": None,
    }
    if "mlp" not in more:
        arguments["mlp"] = mlp_of(c, is_gated=False, has_bias=True)
    num_types = getattr(c, "type_vocab_size", 0)
    decoder = make_architecture(c, norm=norm, usual=usual, **arguments | more)
    architecture = with_pooling(
        decoder, MEAN, num_types=num_types, padding_id=padding_id
    )
    readings = Reading(c.hidden_size, activation), Reading(c.num_labels)
    scored = Pooling("cls", readings, is_scored=True), head
    return replace(architecture, base=base, scored=scored)


def roberta(c: Any) -> Architecture:
    """Return RoBERTa (Liu et al. 2019): positions begin behind the padding's row."""
    return _bert_like(
        c,
        base="roberta.",
        head=CLASSIFIER,
        position_offset=c.pad_token_id + 1,
        padding_id=c.pad_token_id,
    )


def distilbert(c: Any) -> Architecture:
    """Return DistilBERT (Sanh et al. 2019)."""
    inner = make_sources(
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
        head=make_sources(reading_0="pre_classifier", reading_1="classifier"),
        activation="relu",
        norm=Norm(1e-12, is_rms=False, has_bias=True),
        mlp=Mlp(c.activation, c.hidden_dim, is_gated=False, has_bias=True),
        prefix="transformer.layer.{}.",
        inner=inner,
    )


def mpnet(c: Any) -> Architecture:
    """Return MPNet (Song et al. 2020): biases by distance, which layers share.

    transformers looks 32 of them up, however many a config names. Padding is id 1 in positions,
    whatever a config names.
    """
    inner = make_sources(
        qkv="attention.attn.q attention.attn.k attention.attn.v",
        out="attention.attn.o",
        relative="/encoder.relative_attention_bias",
        sum_attention="attention.LayerNorm",
    )
    return _bert_like(
        c,
        base="mpnet.",
        head=CLASSIFIER,
        attention={"relative": Relative(32, 128, is_causal=False)},
        inner=BERT_INNER | inner,
        position_offset=2,
        padding_id=1,
    )


def nomic_bert(c: Any) -> Architecture:
    """Return Nomic BERT (Nussbaum et al. 2024): rotary positions, a gated MLP, no biases."""
    attn = "self_attn"
    inner = make_sources(
        out=f"attn.out_proj|{attn}.o_proj",
        sum_attention="norm1|post_attention_layernorm",
        up="mlp.fc12|mlp.gate_proj mlp.fc11|mlp.up_proj",
        down="mlp.fc2|mlp.down_proj",
        sum_mlp="norm2|post_mlp_layernorm",
    )
    products = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
    inner["qkv"] = Source(products, whole="attn.Wqkv.weight")
    return _bert_like(
        c,
        base="nomic_bert.|encoder.",
        attention={"rope": rope_of(c), "has_qkv_bias": False, "has_out_bias": False},
        mlp=mlp_of(c),
        prefix="layers.{}.",
        inner=inner,
        outer=BERT_OUTER
        | make_sources(encoder__embed_norm="emb_ln|embeddings.LayerNorm"),
        num_positions=0,
    )


def modernbert(c: Any) -> Architecture:
    """Return ModernBERT (Warner et al. 2024): some layers see a window on both sides."""
    norm = norm_of(c, has_bias=c.norm_bias)
    has_bias = c.attention_bias
    usual = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "is_causal": False}
    span = c.local_attention // 2 + 1  # itself, and so many on either side
    windows = [span if kind == "sliding_attention" else None for kind in c.layer_types]
    dense = Reading(c.hidden_size, c.classifier_activation, c.classifier_bias, norm)
    head = make_sources(
        reading_0="head.dense", reading_0_norm="head.norm", reading_1="classifier"
    )
    pooling = Pooling(
        c.classifier_pooling, (dense, Reading(c.num_labels)), is_scored=True
    )
    outer = make_sources(
        embed="embeddings.tok_embeddings",
        encoder__embed_norm="embeddings.norm",
        encoder__final_norm="final_norm",
    )
    inner = make_sources(
        before_attention="attn_norm",
        qkv="attn.Wqkv",
        out="attn.Wo",
        before_mlp="mlp_norm",
        up="mlp.Wi",
        down="mlp.Wo",
    )
    architecture = make_architecture(
        c,
        norm=norm,
        mlp=mlp_of(c),
        outer=outer,
        inner=inner,
        prefix="layers.{}.",
        usual=usual,
        attention=[{"window": window} for window in windows],
        embed_norm=norm,
    )
    first, *others = architecture.model.layers  # the first one gets what is normed
    layers = (replace(first, input_norms=(None, norm)), *others)
    architecture = with_pooling(
        replace(architecture, model=replace(architecture.model, layers=layers)), MEAN
    )
    return replace(architecture, base="model.", scored=(pooling, head))


ROWS: dict[str, Row] = {
    "bert": derive_row(_bert_like, base="bert."),
    **dict.fromkeys(("roberta", "camembert", "xlm-roberta"), roberta),
    "distilbert": distilbert,
    "mpnet": mpnet,
    "nomic_bert": nomic_bert,
    "modernbert": modernbert,
}


# What `architectures` of a config name and nothing here computes.
_REFUSED = re.compile(
    r"For(MaskedLM|PreTraining|TokenClassification|QuestionAnswering|MultipleChoice"
    r"|NextSentencePrediction)$"
)
# left out where a folder of sentence-transformers says how its vectors are made
_HEADS = r"(model\.)?(cls|lm_head|embed_out|(pre_)?classifier|score|head|decoder|vocab_\w+)\."
_MOVED = ("positions", "embed_norm", "final_norm")  # from a decoder to an encoder


def with_output_head(
    architecture: Architecture, c: Any, pooling: Pooling | None
) -> Architecture:
    """Return an architecture with its checkpoint's output: tokens, vectors or scores.

    Args:
        pooling: of a folder of sentence-transformers; None: the config says it.
    """
    name = (c.architectures or [""])[0]
    model = architecture.model
    if pooling is not None:
        names = {
            f"reading_{n}": f"reading_{n}.linear" for n in range(len(pooling.readings))
        }
        return with_pooling(
            _ignoring_head_tensors(architecture),
            pooling,
            make_sources(AS_STORED, **names),
        )
    if name.endswith("ForSequenceClassification"):
        if model.encoder is not None and architecture.scored is None:
            raise _unsupported_output_error(
                name, "a head for classes behind a decoder, which does not run"
            )
        reading = Reading(c.num_labels, has_bias=False)
        padding_id = getattr(c, "pad_token_id", None)
        last_pooling = Pooling(
            "last", (reading,), is_scored=True, padding_id=padding_id
        )
        return with_pooling(
            architecture,
            *(architecture.scored or (last_pooling, make_sources(reading_0="score"))),
        )
    if _REFUSED.search(name):
        why = "whose head does not run"
        if "MaskedLM" in name:
            headless_name = name.replace("ForMaskedLM", "Model")
            why = (
                f"which fills gaps in texts. Name {headless_name!r} in its place to get "
                "vectors"
            )
        raise _unsupported_output_error(name, why)
    if name.endswith("EncoderModel") and model.encoder is not None:
        return with_pooling(_ignoring_head_tensors(architecture), Pooling("mean"))
    # A model that is stored without a head writes text if its embedding is the head.
    is_tied = getattr(c, "tie_word_embeddings", True)
    if not name.endswith("Model") or "Head" in name:
        return architecture
    if model.encoder is None and not is_tied:
        return with_pooling(_ignoring_head_tensors(architecture), Pooling("last"))
    return _ignoring_head_tensors(architecture) if model.is_pooled else architecture


def _ignoring_head_tensors(architecture: Architecture) -> Architecture:
    """Return an architecture whose checkpoint may hold tensors of heads, which are not read."""
    left_out = "|".join(filter(None, (architecture.left_out, _HEADS)))
    return replace(architecture, left_out=left_out)


def with_pooling(
    architecture: Architecture,
    pooling: Pooling,
    # where the tensors of the pooling's dense layers are
    readings: Sources | None = None,
    num_types: int = 0,  # of tokens
    padding_id: int | None = None,  # of tokens without a position
) -> Architecture:
    """Return an encoder that pools. A decoder's layers become the encoder's, and stay causal."""
    model = architecture.model
    outer = architecture.outer
    encoder = model.encoder
    if encoder is None:
        encoder = _encoder_of_decoder(model, num_types, padding_id)
        outer = {
            f"encoder.{n}" if n in _MOVED else n: where for n, where in outer.items()
        }
    elif not model.is_pooled:
        architecture = replace(
            architecture,
            inner=architecture.encoder_inner,
            prefix=architecture.encoder_prefix,
            encoder_prefix="",
        )
        encoder = replace(encoder, has_embed=False)
        outer = outer | {"embed": outer["encoder.embed"]}
    pooling_model = replace(
        model,
        layers=model.layers[-encoder.num_layers :],
        final_norm=None,
        embed_norm=None,
        num_positions=0,
        position_offset=0,
        encoder=replace(encoder, pooling=pooling),
    )
    return replace(architecture, model=pooling_model, outer=outer | (readings or {}))


def _encoder_of_decoder(
    model: Model, num_types: int, padding_id: int | None
) -> Encoder:
    is_latent = any(layer.attention.latent for layer in model.layers)
    if is_latent or model.embed_size != model.hidden_size or model.has_sinusoids:
        raise CheckpointError(
            "this decoder gives no vectors or scores here: its attention is latent, its "
            "embeddings are projected, or its positions computed. Take another model"
        )
    return Encoder(
        len(model.layers),
        model.final_norm,
        model.embed_norm,
        model.num_positions,
        model.position_offset,
        num_types,
        padding_id,
    )


def with_attention_to_both_sides(architecture: Architecture, c: Any) -> Architecture:
    """Let each token of a pooling model see later ones, if a decoder's config says so.

    `is_causal` counts keys at the window's size (GTE); EmbeddingGemma's field does not.
    """
    is_gemma = getattr(c, "use_bidirectional_attention", False)
    if not is_gemma and getattr(c, "is_causal", None) in (None, True):
        return architecture

    def without_causal_mask(layer: Layer) -> Layer:
        window = layer.attention.window and layer.attention.window + (not is_gemma)
        return replace(
            layer, attention=replace(layer.attention, is_causal=False, window=window)
        )

    layers = tuple(map(without_causal_mask, architecture.model.layers))
    return replace(architecture, model=replace(architecture.model, layers=layers))


def _unsupported_output_error(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"config.json names the architecture {name!r}, {why}. Models give vectors (…Model, or a "
        "folder of sentence-transformers) or scores of classes (…ForSequenceClassification); "
        "docs/encoders.md tells more"
    )

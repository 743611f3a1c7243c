"""What a checkpoint gives beside text: vectors, and scores of classes, by the head that it has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fminfer.compute.spec import Encoder, Layer, Pooling, Reading
from fminfer.core.errors import CheckpointError
from fminfer.models.families.tensor_names import AS_STORED, Architecture, Sources, sources

# What `architectures` of a config name and nothing here computes.
_REFUSED = re.compile(
    r"For(MaskedLM|PreTraining|TokenClassification|QuestionAnswering|MultipleChoice"
    r"|NextSentencePrediction)$"
)
_HEADS = (  # left out where a folder of sentence-transformers says how its vectors are made
    r"(model\.)?(cls|lm_head|embed_out|(pre_)?classifier|score|head|decoder|vocab_\w+)\."
)
_MOVED = ("positions", "embed_norm", "final_norm")  # from a decoder to an encoder


def with_head(architecture: Architecture, c: Any, pooling: Pooling | None) -> Architecture:
    """Return an architecture with what its checkpoint gives: tokens, vectors or scores.

    Args:
        pooling: of a folder of sentence-transformers; None: the config says it.
    """
    name, model = (c.architectures or [""])[0], architecture.model
    if pooling is not None:
        names = {f"reading_{n}": f"reading_{n}.linear" for n in range(len(pooling.readings))}
        return pooled(_without_heads(architecture), pooling, sources(AS_STORED, **names))
    if name.endswith("ForSequenceClassification"):
        if model.encoder is not None and architecture.scored is None:
            raise _refused(name, "a head for classes behind a decoder, which does not run")
        of_last = Pooling("last", (Reading(c.num_labels, has_bias=False),), is_scored=True)
        return pooled(architecture, *(architecture.scored or (of_last, sources(reading_0="score"))))
    if _REFUSED.search(name):
        why = "whose head does not run"
        if "MaskedLM" in name:
            own = name.replace("ForMaskedLM", "Model")
            why = f"which fills gaps in texts. Name {own!r} in its place to get vectors"
        raise _refused(name, why)
    if name.endswith("EncoderModel") and model.encoder is not None:
        return pooled(_without_heads(architecture), Pooling("mean"))
    # A model that is stored without a head writes text if its embedding is the head.
    is_tied = getattr(c, "tie_word_embeddings", True)
    if not name.endswith("Model") or "Head" in name:
        return architecture
    if model.encoder is None and not is_tied:
        return pooled(_without_heads(architecture), Pooling("last"))
    return _without_heads(architecture) if model.is_pooled else architecture


def _without_heads(architecture: Architecture) -> Architecture:
    """Return an architecture whose checkpoint may hold tensors of heads, which are not read."""
    left_out = "|".join(filter(None, (architecture.left_out, _HEADS)))
    return replace(architecture, left_out=left_out)


def pooled(
    architecture: Architecture, pooling: Pooling, readings: Sources | None = None
) -> Architecture:
    """Return an encoder that pools. A decoder's layers become the encoder's, and stay causal.

    Args:
        readings: where the tensors of the pooling's dense layers are.
    """
    model, outer, encoder = architecture.model, architecture.outer, architecture.model.encoder
    if encoder is None:
        is_latent = any(layer.attention.latent for layer in model.layers)
        if is_latent or model.embed_size != model.hidden_size or model.has_sinusoids:
            raise CheckpointError(
                "this decoder gives no vectors or scores here: its attention is latent, its "
                "embeddings are projected, or its positions computed. Take another model"
            )
        encoder = Encoder(
            len(model.layers),
            model.final_norm,
            model.embed_norm,
            model.num_positions,
            model.position_offset,
        )
        outer = {f"encoder.{n}" if n in _MOVED else n: where for n, where in outer.items()}
    elif not model.is_pooled:
        inner, prefix = architecture.encoder_inner, architecture.encoder_prefix
        architecture = replace(architecture, inner=inner, prefix=prefix, encoder_prefix="")
    own = replace(
        model,
        layers=model.layers[-encoder.num_layers :],
        final_norm=None,
        embed_norm=None,
        num_positions=0,
        position_offset=0,
        encoder=replace(encoder, pooling=pooling),
    )
    return replace(architecture, model=own, outer=outer | (readings or {}))


def seen_both_ways(architecture: Architecture, c: Any) -> Architecture:
    """Let layers that pool see what follows a token, too, where a decoder's config says so.

    `is_causal` counts keys at the window's size (GTE); EmbeddingGemma's field does not.
    """
    is_gemma = getattr(c, "use_bidirectional_attention", False)
    if not is_gemma and getattr(c, "is_causal", None) in (None, True):
        return architecture

    def one(layer: Layer) -> Layer:
        window = layer.attention.window and layer.attention.window + (not is_gemma)
        return replace(layer, attention=replace(layer.attention, is_causal=False, window=window))

    layers = tuple(map(one, architecture.model.layers))
    return replace(architecture, model=replace(architecture.model, layers=layers))


def _refused(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"config.json names the architecture {name!r}, {why}. Models give vectors (…Model, or a "
        "folder of sentence-transformers) or scores of classes (…ForSequenceClassification); "
        "docs/encoders.md tells more"
    )

"""What is made of the vectors of a request's prompts: embeddings, scores, rankings, classes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

from fminfer.contract.request import Similarity, VectorWish
from fminfer.engine.sequence import AnswerKind, Array, RequestState


def make_of_vectors(state: RequestState, wish: VectorWish) -> list[dict[str, Any]]:
    """Return what stands in the answer: one entry a prompt, or one a pair."""
    own = [prompt.vector for prompt in state.prompts if prompt.vector is not None]
    vectors: Array = np.stack(own)  # a copy: the step that they are of is large
    kind = state.prepared.kind
    if kind == "embeddings":
        return _embeddings(vectors, wish)
    if kind == "classify":
        return [_classify(index, logits, wish) for index, logits in enumerate(vectors)]
    scores = _scores(vectors, wish).tolist()
    if kind == "score":
        return [
            {"index": i, "object": "score", "score": s} for i, s in enumerate(scores)
        ]
    return _ranking(scores, wish)


def _embeddings(vectors: Array, wish: VectorWish) -> list[dict[str, Any]]:
    is_whole = wish.dimensions is None
    vectors = vectors[:, : wish.dimensions]
    if wish.is_normalized and not (is_whole and wish.facts.is_normalized):
        vectors = _normalize(vectors)
    told: list[Any] = [*np.ascontiguousarray(vectors)]
    if wish.is_base64:  # of float32 numbers, little-endian
        told = [
            b64encode(np.asarray(vector, "<f4").tobytes()).decode()
            for vector in vectors
        ]
    return [
        {"object": "embedding", "index": index, "embedding": each}
        for index, each in enumerate(told)
    ]


def _normalize(vectors: Array) -> Array:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _sigmoid(logits: Array) -> Array:
    return np.exp(-np.logaddexp(0, -logits.astype("f8")))


def _probabilities(logits: Array, wish: VectorWish) -> Array:
    """Return the probabilities of one text's classes, or their logits."""
    logits = logits.astype("f8")
    odds = "identity" if wish.is_raw else wish.facts.odds
    if odds != "softmax":
        return _sigmoid(logits) if odds == "sigmoid" else logits
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _classify(index: int, logits: Array, wish: VectorWish) -> dict[str, Any]:
    probs = _probabilities(logits, wish)
    labels = wish.facts.labels
    best = int(probs.argmax())
    return {
        "index": index,
        "label": labels[best] if best < len(labels) else None,
        "probs": probs.tolist(),
        "num_classes": len(probs),
    }


def _scores(vectors: Array, wish: VectorWish) -> Array:
    """Return a score for each pair: a probability, a logit, or the similarity of two vectors."""
    if wish.facts.is_scored:
        is_logit = wish.is_raw or wish.facts.is_score_logit
        return (vectors if is_logit else _sigmoid(vectors))[:, 0]
    vectors = vectors.astype("f8")
    num_firsts = len(vectors) - len(wish.seconds)
    return _COMPARED_BY[wish.facts.similarity](
        vectors[:num_firsts], vectors[num_firsts:]
    )


def _cosines(firsts: Array, seconds: Array) -> Array:
    products = _dot_products(_normalize(firsts), _normalize(seconds))
    return np.clip(products, -1.0, 1.0)  # rounding may leave 1.0000000000000002


def _dot_products(firsts: Array, seconds: Array) -> Array:
    return (firsts * seconds).sum(axis=1)


def _euclidean(firsts: Array, seconds: Array) -> Array:
    # "0.0 -", for a minus sign makes -0.0
    return 0.0 - np.linalg.norm(firsts - seconds, axis=1)


def _manhattan(firsts: Array, seconds: Array) -> Array:
    return 0.0 - np.abs(firsts - seconds).sum(axis=1)


# Each takes vectors, (one or pairs, size) and (pairs, size).
_COMPARED_BY: dict[Similarity, Callable[[Array, Array], Array]] = {
    "cosine": _cosines,
    "dot": _dot_products,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}


def _ranking(scores: list[float], wish: VectorWish) -> list[dict[str, Any]]:
    """Return the best pairs, best first; of equal ones the earlier."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        {"index": index}
        | (
            {"document": {"text": wish.seconds[index]}}
            if wish.returns_documents
            else {}
        )
        | {"relevance_score": scores[index]}
        for index in order[: wish.top_n or None]
    ]


# How an answer's id begins, and what its object is called.
_HEADS: dict[AnswerKind, tuple[str, str]] = {
    "plain": ("cmpl", "text_completion"),
    "openai": ("cmpl", "text_completion"),
    "chat": ("chatcmpl", "chat.completion"),
    "embeddings": ("embd", "list"),
}


def head_of_answer(
    kind: AnswerKind, own_id: str, created: int, model: str
) -> dict[str, Any]:
    """Return what an object of the API has before its answers; `created` is Unix time."""
    prefix, name = _HEADS.get(kind, (kind, "list"))
    return {
        "id": f"{prefix}-{own_id}",
        "object": name,
        "created": created,
        "model": model,
    }

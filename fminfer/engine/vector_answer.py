"""Makes answers of the vectors of a request's prompts: embeddings, scores, rankings, classes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

from fminfer.contract.request import Similarity, VectorWish
from fminfer.engine.sequence import AnswerKind, Array, RequestState


def make_vector_entries(state: RequestState, wish: VectorWish) -> list[dict[str, Any]]:
    """Return the entries of the answer: one a prompt, or one a pair."""
    prompt_vectors = [
        prompt.vector for prompt in state.prompts if prompt.vector is not None
    ]
    vectors: Array = np.stack(
        prompt_vectors
    )  # a copy: the step that they are of is large
    kind = state.prepared.kind
    if kind == "embeddings":
        return _make_embedding_entries(vectors, wish)
    if kind == "classify":
        return [
            _make_class_entry(index, logits, wish)
            for index, logits in enumerate(vectors)
        ]
    scores = _compute_scores(vectors, wish).tolist()
    if kind == "score":
        return [
            {"index": i, "object": "score", "score": s} for i, s in enumerate(scores)
        ]
    return _make_ranking(scores, wish)


def _make_embedding_entries(vectors: Array, wish: VectorWish) -> list[dict[str, Any]]:
    is_whole = wish.dimensions is None
    vectors = vectors[:, : wish.dimensions]
    if wish.is_normalized and not (is_whole and wish.facts.is_normalized):
        vectors = _normalize(vectors)
    embeddings: list[Any] = [*np.ascontiguousarray(vectors)]
    if wish.is_base64:  # of float32 numbers, little-endian
        embeddings = [
            b64encode(np.asarray(vector, "<f4").tobytes()).decode()
            for vector in vectors
        ]
    return [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(embeddings)
    ]


def _normalize(vectors: Array) -> Array:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _compute_sigmoid(logits: Array) -> Array:
    return np.exp(-np.logaddexp(0, -logits.astype("f8")))


def _compute_probabilities(logits: Array, wish: VectorWish) -> Array:
    """Return the probabilities of one text's classes, or their logits."""
    logits = logits.astype("f8")
    odds = "identity" if wish.is_raw else wish.facts.odds
    if odds != "softmax":
        return _compute_sigmoid(logits) if odds == "sigmoid" else logits
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _make_class_entry(index: int, logits: Array, wish: VectorWish) -> dict[str, Any]:
    probs = _compute_probabilities(logits, wish)
    labels = wish.facts.labels
    best = int(probs.argmax())
    return {
        "index": index,
        "label": labels[best] if best < len(labels) else None,
        "probs": probs.tolist(),
        "num_classes": len(probs),
    }


def _compute_scores(vectors: Array, wish: VectorWish) -> Array:
    """Return a score for each pair: a probability, a logit, or the similarity of two vectors."""
    if wish.facts.is_scored:
        is_logit = wish.is_raw or wish.facts.is_score_logit
        return (vectors if is_logit else _compute_sigmoid(vectors))[:, 0]
    vectors = vectors.astype("f8")
    num_firsts = len(vectors) - len(wish.seconds)
    return _COMPARED_BY[wish.facts.similarity](
        vectors[:num_firsts], vectors[num_firsts:]
    )


def _compute_cosines(firsts: Array, seconds: Array) -> Array:
    products = _compute_dot_products(_normalize(firsts), _normalize(seconds))
    return np.clip(products, -1.0, 1.0)  # rounding may leave 1.0000000000000002


def _compute_dot_products(firsts: Array, seconds: Array) -> Array:
    return (firsts * seconds).sum(axis=1)


def _compute_euclidean(firsts: Array, seconds: Array) -> Array:
    # "0.0 -", for a minus sign makes -0.0
    return 0.0 - np.linalg.norm(firsts - seconds, axis=1)


def _compute_manhattan(firsts: Array, seconds: Array) -> Array:
    return 0.0 - np.abs(firsts - seconds).sum(axis=1)


# Each takes vectors, (one or pairs, size) and (pairs, size).
_COMPARED_BY: dict[Similarity, Callable[[Array, Array], Array]] = {
    "cosine": _compute_cosines,
    "dot": _compute_dot_products,
    "euclidean": _compute_euclidean,
    "manhattan": _compute_manhattan,
}


def _make_ranking(scores: list[float], wish: VectorWish) -> list[dict[str, Any]]:
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


def make_answer_head(
    kind: AnswerKind, answer_id: str, created: int, model: str
) -> dict[str, Any]:
    """Return what an object of the API has before its answers; `created` is Unix time."""
    prefix, name = _HEADS.get(kind, (kind, "list"))
    return {
        "id": f"{prefix}-{answer_id}",
        "object": name,
        "created": created,
        "model": model,
    }

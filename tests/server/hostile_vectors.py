"""Loads that one client puts on a server of an encoder: beside `hostile_loads`, of vectors."""

from __future__ import annotations

from collections.abc import Callable

from .hostile_loads import at_once, post

VECTOR_LOADS: dict[str, Callable[[int], None]] = {}
LONG = "w1 w2 w3 w4 w5 " * 12  # as many tokens as the model reads


def vector_load(function: Callable[[int], None]) -> Callable[[int], None]:
    """List a load by its name; it gets the server's port."""
    VECTOR_LOADS[function.__name__] = function
    return function


@vector_load
def many_texts_to_embed(port: int) -> None:
    post(port, {"input": [f"w{n % 200} {LONG}" for n in range(2048)]}, "/v1/embeddings")


@vector_load
def many_lists_to_embed(port: int) -> None:
    texts = [f"w{n % 200}" for n in range(2048)]
    at_once(
        port, [{"input": texts, "encoding_format": "base64"}] * 16, "/v1/embeddings"
    )


@vector_load
def many_documents_to_rerank(port: int) -> None:
    documents = [f"w{n % 200} {LONG}" for n in range(10_000)]
    post(port, {"query": "w1 w2", "documents": documents}, "/v1/rerank")


@vector_load
def many_pairs_to_score(port: int) -> None:
    texts = [f"w{n % 200} w{n % 7}" for n in range(10_000)]
    post(port, {"text_1": "w1 w2", "text_2": texts}, "/v1/score")


@vector_load
def a_long_text_to_embed(port: int) -> None:
    at_once(port, [{"input": "w1 w2 " * 2_500_000}] * 4, "/v1/embeddings")

"""The endpoints of the API, and which of them a request is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

Endpoint = Literal[
    "completions", "chat", "responses", "embeddings", "score", "rerank", "classify"
]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
# What a Batch line's url, and an HTTP request's path, may be.
URLS: dict[str, Endpoint] = {
    COMPLETIONS: "completions",
    CHAT: "chat",
    RESPONSES: "responses",
    EMBEDDINGS: "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/v1/classify": "classify",
}
URL_OF = {endpoint: url for url, endpoint in URLS.items()}
# The same, and as other servers call them.
ALL_URLS: dict[str, Endpoint] = URLS | {
    "/score": "score",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/classify": "classify",
}
# The others are of models that give vectors.
DRAWING_ENDPOINTS = ("completions", "chat", "responses")
# What is asked, by the first of these fields that a request has. An `input` asks models
# that give vectors for these.
_ENDPOINT_OF_FIELD: dict[str, Endpoint] = {
    "prompt": "completions",
    "messages": "chat",
    "input": "responses",
    "query": "rerank",
    "queries": "score",
    "text_1": "score",
}


def find_endpoint(fields: Mapping[str, Any]) -> Endpoint | None:
    """Return the endpoint that a request's fields are of; None: nothing is asked."""
    return next(
        (
            endpoint
            for name, endpoint in _ENDPOINT_OF_FIELD.items()
            if fields.get(name) is not None
        ),
        None,
    )


def choose_endpoint(fields: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of a request that does not say otherwise which one it is for."""
    return find_endpoint(fields) or "completions"


def find_url_endpoint(url: object) -> Endpoint | None:
    """Return the endpoint of a Batch line's url; None: there is none."""
    return ALL_URLS.get(remove_spare_slashes(url)) if isinstance(url, str) else None


def remove_spare_slashes(path: str) -> str:
    """Return a path with single slashes, and none at its end: `/v1/score` for `//v1/score/`.

    Double slashes come of a base URL that ends with one.
    """
    return re.sub("//+", "/", path).rstrip("/") or "/"

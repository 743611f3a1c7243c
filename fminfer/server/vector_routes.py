"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and `/v1/classify`: for models that give vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fminfer.contract.endpoints import ALL_URLS, OF_DRAWS, Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import TEXT, Schema, allow_null, list_of, object_of, whole
from fminfer.server.answer_schemas import COUNT, NUMBER, extend
from fminfer.server.openai_routes import answer
from fminfer.server.schemas import describe_fields, document
from fminfer.server.service import Service


@dataclass(slots=True, frozen=True)
class _Asked:
    """What the documents say of an endpoint; the first sentence is the routes' help."""

    help: str
    entry: Schema
    example: dict[str, Any]


_VECTOR: Schema = {"anyOf": [list_of(NUMBER), TEXT]}
_OF: dict[Endpoint, _Asked] = {
    "embeddings": _Asked(
        "Return the vectors of texts",
        whole(object={"const": "embedding"}, index=COUNT, embedding=_VECTOR),
        {"input": ["one text", "another"]},
    ),
    "score": _Asked(
        "Score pairs of texts",
        whole(index=COUNT, object={"const": "score"}, score=NUMBER),
        {"text_1": "a question", "text_2": ["an answer", "another"]},
    ),
    "rerank": _Asked(
        "Order documents by how well they fit a query",
        extend(whole(index=COUNT, relevance_score=NUMBER), {"document": object_of({"text": TEXT})}),
        {"query": "a question", "documents": ["an answer", "another"], "top_n": 1},
    ),
    "classify": _Asked(
        "Tell the classes of texts",
        whole(index=COUNT, label=allow_null(TEXT), probs=list_of(NUMBER), num_classes=COUNT),
        {"input": "a text"},
    ),
}


def vector_routes(service: Service) -> APIRouter:
    """Return the routes; each is refused with what to ask instead if the model is another kind."""
    router = APIRouter(tags=["Vectors and scores"])
    for path, endpoint in ALL_URLS.items():
        if endpoint not in OF_DRAWS:
            _add_route(router, service, path, endpoint)
    return router


def _add_route(router: APIRouter, service: Service, path: str, endpoint: Endpoint) -> None:
    told, limits = _OF[endpoint], service.engine.intake.limits

    async def ask(request: Request) -> Response:
        return await answer(service, request, endpoint)

    body = describe_fields(
        f"{told.help}.",
        FIELDS[endpoint].values(),
        limits,
        told.example,
        is_strict=limits.config.strict,
    )
    described = document(_answer_schema(told.entry, endpoint), "The answer.", body=body)
    router.post(path, name=path, description=told.help, **described)(ask)


def _answer_schema(entry: Schema, endpoint: Endpoint) -> Schema:
    """Return the answer of an endpoint for vectors, or for what is made of them."""
    usage = whole(prompt_tokens=COUNT, total_tokens=COUNT)
    head = {"id": TEXT, "object": {"const": "list"}, "created": COUNT, "model": TEXT}
    name = "results" if endpoint == "rerank" else "data"
    return whole(**head, **{name: list_of(entry)}, usage=usage)

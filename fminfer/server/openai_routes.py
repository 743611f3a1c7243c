"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`: what OpenAI's clients call."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fminfer.contract.json_object import dump
from fminfer.server.answer_schemas import (
    chat_completion_chunk_schema,
    chat_completion_schema,
    completion_chunk_schema,
    completion_schema,
    model_list_schema,
    model_schema,
)
from fminfer.server.event_stream import EventStream, until_answered
from fminfer.server.http_errors import JSON, HttpError
from fminfer.server.openai_shapes import AnswerShape, StreamWish
from fminfer.server.schemas import chat_request_schema, completion_request_schema, document
from fminfer.server.service import Service


def openai_routes(service: Service) -> APIRouter:
    """Return the routes of the OpenAI API."""
    router = APIRouter(tags=["OpenAI API"])
    limits = service.engine.limits

    @router.post(
        "/v1/completions",
        **document(
            completion_schema(),
            "The completions.",
            body=completion_request_schema(limits),
            chunk=completion_chunk_schema(),
        ),
    )
    async def completions(request: Request) -> Response:
        """Complete one prompt or several."""
        return await _answer(service, request, is_chat=False)

    @router.post(
        "/v1/chat/completions",
        **document(
            chat_completion_schema(),
            "The model's messages.",
            body=chat_request_schema(limits),
            chunk=chat_completion_chunk_schema(),
        ),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await _answer(service, request, is_chat=True)

    @router.get("/v1/models", **document(model_list_schema(), "The model.", errors=[401]))
    async def models() -> Response:
        """List the model, under each of its names."""
        data = [_describe_model(service, name) for name in service.model.names]
        return respond_json({"object": "list", "data": data})

    @router.get(
        "/v1/models/{model:path}", **document(model_schema(), "The model.", errors=[401, 404])
    )
    async def model(model: str) -> Response:
        """Describe the model."""
        if model not in service.model.names:
            known = " or ".join(service.model.names)
            raise HttpError(
                404,
                f"there is no model {model}; this server has {known}",
                code="model_not_found",
                param="model",
            )
        return respond_json(_describe_model(service, model))

    return router


def respond_json(value: object) -> Response:
    """Return a response of JSON."""
    return Response(dump(value), media_type=JSON)


async def _answer(service: Service, request: Request, *, is_chat: bool) -> Response:
    fields = await service.read(request)
    wish = StreamWish.take(fields)
    service.model.check(fields.get("model"))
    dispatcher = service.dispatcher
    reply = await dispatcher.ask(fields, is_chat=is_chat, is_streamed=wish.is_streamed)
    prepared = reply.prepared
    tells_ids = prepared.params.return_token_ids or not service.engine.tokenizer.has_words
    shape = AnswerShape(
        is_chat,
        service.model.name_for(fields),
        wish.has_usage,
        prompt_ids=[prompt.ids for prompt in prepared.prompts] if tells_ids else None,
        n=prepared.params.n,
    )
    if not wish.is_streamed:
        finished = await until_answered(dispatcher, reply, request.receive)
        return respond_json(shape.whole(finished))
    return EventStream(dispatcher, reply, shape.chunks)


def _describe_model(service: Service, name: str) -> dict[str, Any]:
    model = service.model
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "fminfer",
        "root": service.engine.model_name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "has_chat_template": model.has_chat_template,
    }

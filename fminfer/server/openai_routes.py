"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`: what OpenAI's clients call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fminfer.contract.endpoints import OF_DRAWS, Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.json_object import dump
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.engine.sequence import AnswerKind
from fminfer.engine.vector_answer import head_of_answer
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
from fminfer.server.schemas import chat_request_schema, completion_request_schema, document
from fminfer.server.service import Service


@dataclass(slots=True, frozen=True)
class StreamWish:
    """Whether an answer is to come in parts, and which of them tell its usage."""

    is_streamed: bool = False
    usage: str = ""  # "each", the "last", or none

    @classmethod
    def take(cls, fields: dict[str, Any]) -> StreamWish:
        """Take a request's `stream` and `stream_options` out of its fields.

        Raises:
            RequestError: they are wrong.
        """
        found: dict[str, Any] = {}
        for name in ("stream", "stream_options"):
            value = fields.pop(name, None)
            if value is not None:
                found[name] = FIELDS["chat"][name].kind.read(name, value, 0)
        return cls(found.get("stream", False), found.get("stream_options", ""))


@dataclass(slots=True)
class AnswerShape:
    """One answer as an object of the API, whole or in chunks.

    Args:
        model: its name in the answer.
        usage: which chunks tell it: "each", the "last", or none.
        num_prompt: tokens of all prompts.
        prompt_ids: of each prompt, if chunks tell token ids.
        n: choices of each prompt.
    """

    kind: AnswerKind
    model: str
    usage: str = ""
    num_prompt: int = 0
    prompt_ids: list[list[int]] | None = None
    n: int = 1
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    _num_drawn: int = 0
    _begun: set[int] = field(default_factory=set)  # choices that have had a chunk

    def whole(self, finished: Finished) -> dict[str, Any]:
        """Return the object of a whole answer."""
        return self._head() | finished.result

    def chunks(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        """Turn events of a streamed request into chunks."""
        head, is_chat = self._head(), self.kind == "chat"
        if is_chat:
            head["object"] = "chat.completion.chunk"
        if self.usage:
            head["usage"] = None
        for event in events:
            if isinstance(event, Delta):
                self._num_drawn += len(event.token_ids)
                if self.usage == "each":
                    head["usage"] = self._usage_so_far()
                is_first = event.index not in self._begun
                self._begun.add(event.index)
                if is_chat and is_first:
                    role = {"index": event.index, "delta": {"role": "assistant", "content": ""}}
                    yield head | {"choices": [role | {"logprobs": None, "finish_reason": None}]}
                choice = _choice(event, is_chat=is_chat)
                yield head | {"choices": [choice | self._token_ids(event, is_first=is_first)]}
            elif isinstance(event, Finished) and self.usage:
                yield head | {"choices": [], "usage": event.usage}

    def _usage_so_far(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self._num_drawn,
            "total_tokens": self.num_prompt + self._num_drawn,
        }

    def _token_ids(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """Return the new ids of a choice, and before the first ones its prompt's, if asked for."""
        if self.prompt_ids is None:
            return {}
        told = {"prompt_token_ids": self.prompt_ids[delta.index // self.n]} if is_first else {}
        return told | {"token_ids": delta.token_ids}

    def _head(self) -> dict[str, Any]:
        return head_of_answer(self.kind, self.id, self.created, self.model)


def _choice(delta: Delta, *, is_chat: bool) -> dict[str, Any]:
    said: Any = delta.text
    if is_chat:
        said = {"content": said} if said else {}
        if delta.tool_calls:
            said["tool_calls"] = delta.tool_calls
    return {
        "index": delta.index,
        "delta" if is_chat else "text": said,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
    } | ({} if delta.stop_reason is None else {"stop_reason": delta.stop_reason})


def openai_routes(service: Service) -> APIRouter:
    """Return the routes of the OpenAI API."""
    router = APIRouter(tags=["OpenAI API"])
    limits = service.engine.intake.limits

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
        return await answer(service, request, "completions")

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
        return await answer(service, request, "chat")

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


async def answer(service: Service, request: Request, endpoint: Endpoint) -> Response:
    """Answer a request, whole or as a stream."""
    fields = await service.read(request)
    wish = StreamWish.take(fields) if endpoint in OF_DRAWS else StreamWish()
    service.model.check(fields.get("model"))
    dispatcher = service.dispatcher
    reply = await dispatcher.ask(fields, endpoint=endpoint, is_streamed=wish.is_streamed)
    prepared = reply.prepared
    tells_ids = prepared.params.return_token_ids or not service.engine.tokenizer.has_words
    shape = AnswerShape(
        prepared.kind,
        service.model.name_for(fields),
        wish.usage,
        sum(len(prompt.ids) for prompt in prepared.prompts),
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

"""What OpenAI's clients call: completions, chat, models; and vectors, scores and classes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fminfer.contract.endpoints import ALL_URLS, DRAWING_ENDPOINTS, Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import (
    NULL,
    SWITCH,
    TEXT,
    make_full_object_schema,
    make_list_schema,
)
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.vector_answer import make_answer_head
from fminfer.server.http_errors import HttpError
from fminfer.server.replies import EventStream, StreamShape, run_while_connected
from fminfer.server.request_bodies import is_large
from fminfer.server.response_events import ResponseShape
from fminfer.server.schemas import (
    COUNT,
    ENDPOINT_DOCS,
    document_route,
    extend_schema,
    make_request_schema,
)
from fminfer.server.service import Service, make_json_response

_CONTEXT = COUNT | {"description": "Most tokens of prompt and answer."}
_MODEL = extend_schema(
    make_full_object_schema(
        id=TEXT,
        object={"const": "model"},
        created=COUNT,
        owned_by=TEXT,
    ),
    root=TEXT,
    parent=NULL,
    max_model_len=_CONTEXT,
    has_chat_template=SWITCH,
)
_MODELS = make_full_object_schema(
    object={"const": "list"}, data=make_list_schema(_MODEL)
)


@dataclass(slots=True)
class AnswerShape(StreamShape):
    """One answer as an object of the API, whole or in chunks."""

    prepared: PreparedRequest
    model: str  # its name in the answer
    usage: str  # which chunks have it: "each", the "last", or none
    has_token_ids: bool  # in its chunks
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    _num_prompt: int = field(init=False)  # tokens
    _num_drawn: int = 0
    _begun: set[int] = field(default_factory=set)  # choices that have had a chunk
    # of a chat: those whose role was sent
    _named: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Texts that an encoder reads are counted, too.
        texts = (*self.prepared.prompts, *self.prepared.sources)
        num_start = self.prepared.num_start * len(self.prepared.prompts)
        self._num_prompt = sum(len(text.ids) for text in texts) - num_start

    def make_answer(self, finished: Finished) -> dict[str, Any]:
        """Return the object of a whole answer."""
        return self._make_head() | finished.result

    def make_chunks(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        """Make chunks of a streamed request's events; of no events an empty one."""
        head = self._make_head()
        is_chat = self.prepared.kind == "chat"
        if is_chat:
            head["object"] = "chat.completion.chunk"
        if self.usage:
            head["usage"] = self._make_usage() if self.usage == "each" else None
        finished = next(
            (event for event in events if isinstance(event, Finished)), None
        )

        for event in events:
            if isinstance(event, Delta):
                self._num_drawn += len(event.token_ids)
                # all tokens are drawn; a kept answer has no ids to count
                if finished is not None:
                    self._num_drawn = finished.usage["completion_tokens"]
                if self.usage == "each":
                    head["usage"] = self._make_usage()
                is_first = event.index not in self._begun
                self._begun.add(event.index)
                if is_chat and event.index not in self._named:
                    yield head | {"choices": [self._make_empty_choice(event.index)]}
                choice = _make_choice(event, is_chat=is_chat)
                yield head | {
                    "choices": [choice | self._make_id_fields(event, is_first=is_first)]
                }
                if event.finish_reason is not None:
                    self._ended.add(event.index)
            elif isinstance(event, Finished) and self.usage:
                yield head | {"choices": [], "usage": event.usage}
        if not events:
            index = next(number for number in count() if number not in self._ended)
            yield head | {"choices": [self._make_empty_choice(index)]}

    def _make_empty_choice(self, index: int) -> dict[str, Any]:
        """Return an empty choice. In chat, the first chunk of a choice names the role."""
        if self.prepared.kind != "chat":
            content: dict[str, Any] = {"text": ""}
        elif index in self._named:
            content = {"delta": {}}
        else:
            content = {"delta": {"role": "assistant", "content": ""}}
            self._named.add(index)
        return {"index": index, **content, "logprobs": None, "finish_reason": None}

    def _make_usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_drawn,
            "total_tokens": self._num_prompt + self._num_drawn,
        }

    def _make_id_fields(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """Return a choice's new ids, if asked for; the first time also its prompt's."""
        if not self.has_token_ids:
            return {}
        prompt = self.prepared.prompts[delta.index // self.prepared.params.n]
        fields = {"prompt_token_ids": prompt.ids} if is_first else {}
        return fields | {"token_ids": delta.token_ids}

    def _make_head(self) -> dict[str, Any]:
        return make_answer_head(self.prepared.kind, self.id, self.created, self.model)


def _make_choice(delta: Delta, *, is_chat: bool) -> dict[str, Any]:
    content: Any = delta.text
    if is_chat:
        content = {"content": content} if content else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            content["tool_calls"] = delta.tool_calls
    choice = {
        "index": delta.index,
        "delta" if is_chat else "text": content,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
    }
    if delta.stop_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    return choice | delta.further_fields


def make_openai_routes(service: Service) -> APIRouter:
    """Return the routes of the OpenAI API, and of what it lacks for vectors.

    Those of another kind of model refuse each request, with what to ask instead.
    A server of batches alone has only those of its model.
    """
    router = APIRouter()
    for path, endpoint in {} if service.url_elsewhere else ALL_URLS.items():
        _add_endpoint(router, service, path, endpoint)
    _add_model_routes(router, service)
    return router


def _add_endpoint(
    router: APIRouter, service: Service, path: str, endpoint: Endpoint
) -> None:
    about = ENDPOINT_DOCS[endpoint]

    async def ask(request: Request) -> Response:
        return await _answer_request(service, request, endpoint)

    body = make_request_schema(endpoint, service.engine.intake.limits)
    described = document_route(
        about.answer, "The answer.", body=body, chunk=about.chunk
    )
    draws = endpoint in DRAWING_ENDPOINTS
    tag = "OpenAI API" if draws else "Vectors and scores"
    # of generated clients
    name = path.removeprefix("/v1/").replace("/", "_") if draws else path
    router.post(path, name=name, description=about.help, tags=[tag], **described)(ask)


def _add_model_routes(router: APIRouter, service: Service) -> None:
    @router.get(
        "/v1/models",
        tags=["OpenAI API"],
        **document_route(_MODELS, "The model.", errors=[401]),
    )
    async def models() -> Response:
        """List the model, under each of its names."""
        data = [_describe_model(service, name) for name in service.names]
        return make_json_response({"object": "list", "data": data})

    @router.get(
        "/v1/models/{model:path}",
        tags=["OpenAI API"],
        **document_route(_MODEL, "The model.", errors=[401, 404]),
    )
    async def model(model: str) -> Response:
        """Describe the model."""
        if model not in service.accepted:
            known = " or ".join(service.names)
            raise HttpError(
                404,
                f"there is no model {model}; this server has {known}",
                code="model_not_found",
                param="model",
            )
        return make_json_response(_describe_model(service, model))


async def _answer_request(
    service: Service, request: Request, endpoint: Endpoint
) -> Response:
    """Answer a request, whole or as a stream."""
    fields = await service.bodies.read(request)
    is_streamed, usage = (
        _pop_stream_fields(fields, endpoint)
        if endpoint in DRAWING_ENDPOINTS
        else (False, "")
    )
    service.check_model(fields.get("model"))
    asking = service.dispatcher.add_request(
        fields, endpoint=endpoint, is_streamed=is_streamed, is_large=is_large(request)
    )
    reply = await run_while_connected(asking, request.receive)
    prepared = reply.prepared
    shape = (
        ResponseShape(fields, prepared, service.model_name_for(fields))
        if endpoint == "responses"
        else AnswerShape(
            prepared,
            model=service.model_name_for(fields),
            usage=usage,
            has_token_ids=prepared.params.return_token_ids
            or not service.engine.tokenizer.has_words,
        )
    )
    if is_streamed:
        return EventStream(reply, shape)
    return make_json_response(
        shape.make_answer(await reply.wait_for_answer(request.receive))
    )


def _pop_stream_fields(fields: dict[str, Any], endpoint: Endpoint) -> tuple[bool, Any]:
    """Remove a request's stream fields; return whether it is streamed, and with what usage."""
    values: dict[str, Any] = {}
    for name in ("stream", "stream_options"):
        value = fields.pop(name, None)
        if value is not None:
            values[name] = FIELDS[endpoint][name].kind.parse(name, value, 0)
    return values.get("stream", False), values.get("stream_options", "")


def _describe_model(service: Service, name: str) -> dict[str, Any]:
    description = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "fminfer",
        "root": service.served.model_name,
        "parent": None,
    }
    if service.url_elsewhere:
        return description
    return description | {
        "max_model_len": service.engine.context_length,
        "has_chat_template": service.engine.intake.has_chat_template,
    }

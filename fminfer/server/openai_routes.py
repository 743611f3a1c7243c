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

from fminfer.contract.endpoints import ALL_URLS, OF_DRAWS, Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import NULL, SWITCH, TEXT, list_of, whole
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.vector_answer import make_answer_head
from fminfer.server.http_errors import HttpError
from fminfer.server.replies import EventStream, unless_left
from fminfer.server.request_bodies import is_large
from fminfer.server.schemas import (
    COUNT,
    ENDPOINT_DOCS,
    document,
    extend,
    request_schema,
)
from fminfer.server.service import Service, respond_json

_CONTEXT = COUNT | {"description": "Most tokens of prompt and answer."}
_MODEL = extend(
    whole(
        id=TEXT,
        object={"const": "model"},
        created=COUNT,
        owned_by=TEXT,
        max_model_len=_CONTEXT,
    ),
    root=TEXT,
    parent=NULL,
    has_chat_template=SWITCH,
)
_MODELS = whole(object={"const": "list"}, data=list_of(_MODEL))


@dataclass(slots=True)
class AnswerShape:
    """One answer as an object of the API, whole or in chunks."""

    prepared: PreparedRequest
    model: str  # its name in the answer
    usage: str  # which chunks tell it: "each", the "last", or none
    tells_ids: bool  # its chunks have token ids
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

    def whole(self, finished: Finished) -> dict[str, Any]:
        """Return the object of a whole answer."""
        return self._head() | finished.result

    def chunks(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        """Turn events of a streamed request into chunks; of no events make an empty one."""
        head = self._head()
        is_chat = self.prepared.kind == "chat"
        if is_chat:
            head["object"] = "chat.completion.chunk"
        if self.usage:
            head["usage"] = self._usage_so_far() if self.usage == "each" else None
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
                    head["usage"] = self._usage_so_far()
                is_first = event.index not in self._begun
                self._begun.add(event.index)
                if is_chat and event.index not in self._named:
                    yield head | {"choices": [self._empty_choice(event.index)]}
                choice = _choice(event, is_chat=is_chat)
                yield head | {
                    "choices": [choice | self._token_ids(event, is_first=is_first)]
                }
                if event.finish_reason is not None:
                    self._ended.add(event.index)
            elif isinstance(event, Finished) and self.usage:
                yield head | {"choices": [], "usage": event.usage}
        if not events:
            index = next(number for number in count() if number not in self._ended)
            yield head | {"choices": [self._empty_choice(index)]}

    def _empty_choice(self, index: int) -> dict[str, Any]:
        """Return an empty choice. In chat, the first chunk of a choice names the role."""
        if self.prepared.kind != "chat":
            said: dict[str, Any] = {"text": ""}
        elif index in self._named:
            said = {"delta": {}}
        else:
            said = {"delta": {"role": "assistant", "content": ""}}
            self._named.add(index)
        return {"index": index, **said, "logprobs": None, "finish_reason": None}

    def _usage_so_far(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_drawn,
            "total_tokens": self._num_prompt + self._num_drawn,
        }

    def _token_ids(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """Return the new ids of a choice, and before the first ones its prompt's, if
        asked for."""
        if not self.tells_ids:
            return {}
        prompt = self.prepared.prompts[delta.index // self.prepared.params.n]
        told = {"prompt_token_ids": prompt.ids} if is_first else {}
        return told | {"token_ids": delta.token_ids}

    def _head(self) -> dict[str, Any]:
        return make_answer_head(self.prepared.kind, self.id, self.created, self.model)


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
    """Return the routes of the OpenAI API, and of what it lacks for vectors.

    Those of another kind of model refuse each request, with what to ask instead.
    """
    router = APIRouter()
    for path, endpoint in ALL_URLS.items():
        _add_endpoint(router, service, path, endpoint)
    _add_models(router, service)
    return router


def _add_endpoint(
    router: APIRouter, service: Service, path: str, endpoint: Endpoint
) -> None:
    about = ENDPOINT_DOCS[endpoint]

    async def ask(request: Request) -> Response:
        return await _answer(service, request, endpoint)

    body = request_schema(endpoint, service.engine.intake.limits)
    described = document(about.answer, "The answer.", body=body, chunk=about.chunk)
    draws = endpoint in OF_DRAWS
    tag = "OpenAI API" if draws else "Vectors and scores"
    # of generated clients
    name = path.removeprefix("/v1/").replace("/", "_") if draws else path
    router.post(path, name=name, description=about.help, tags=[tag], **described)(ask)


def _add_models(router: APIRouter, service: Service) -> None:
    @router.get(
        "/v1/models",
        tags=["OpenAI API"],
        **document(_MODELS, "The model.", errors=[401]),
    )
    async def models() -> Response:
        """List the model, under each of its names."""
        data = [_describe_model(service, name) for name in service.names]
        return respond_json({"object": "list", "data": data})

    @router.get(
        "/v1/models/{model:path}",
        tags=["OpenAI API"],
        **document(_MODEL, "The model.", errors=[401, 404]),
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
        return respond_json(_describe_model(service, model))


async def _answer(service: Service, request: Request, endpoint: Endpoint) -> Response:
    """Answer a request, whole or as a stream."""
    fields = await service.bodies.read(request)
    is_streamed, usage = _take_stream(fields) if endpoint in OF_DRAWS else (False, "")
    service.check_model(fields.get("model"))
    asking = service.dispatcher.ask(
        fields, endpoint=endpoint, is_streamed=is_streamed, is_large=is_large(request)
    )
    reply = await unless_left(asking, request.receive)
    prepared = reply.prepared
    shape = AnswerShape(
        prepared,
        model=service.name_for(fields),
        usage=usage,
        tells_ids=prepared.params.return_token_ids
        or not service.engine.tokenizer.has_words,
    )
    if is_streamed:
        return EventStream(reply, shape.chunks)
    return respond_json(shape.whole(await reply.finish(request.receive)))


def _take_stream(fields: dict[str, Any]) -> tuple[bool, str]:
    """Take out of a request's fields whether it is streamed, and which chunks tell the usage."""
    found: dict[str, Any] = {}
    for name in ("stream", "stream_options"):
        value = fields.pop(name, None)
        if value is not None:
            found[name] = FIELDS["chat"][name].kind.read(name, value, 0)
    return found.get("stream", False), found.get("stream_options", "")


def _describe_model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "fminfer",
        "root": service.engine.model_name,
        "parent": None,
        "max_model_len": service.engine.context_length,
        "has_chat_template": service.engine.intake.has_chat_template,
    }

"""What the server tells of itself and its model: tokens, health, figures, versions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import (
    SWITCH,
    TEXT,
    Field,
    Schema,
    allow_null,
    make_full_object_schema,
    make_list_schema,
    make_token_ids_schema,
    make_unchecked_kind,
    wrong_type_error,
)
from fminfer.contract.read_fields import check_no_other_fields
from fminfer.core.errors import RequestError
from fminfer.core.version import __version__
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.server.http_errors import HttpError
from fminfer.server.schemas import (
    COUNT,
    ERRORS,
    IDS,
    document_route,
    extend_schema,
    make_fields_schema,
)
from fminfer.server.service import Service, make_json_response

TOKENIZED = extend_schema(
    make_full_object_schema(count=COUNT, max_model_len=COUNT, tokens=IDS),
    token_strs=allow_null(make_list_schema(TEXT)),
)
_FIGURE: Schema = {"type": "number", "minimum": 0}
STATS = make_full_object_schema(
    model=TEXT,
    num_running=COUNT,
    num_waiting=COUNT,
    kv_usage=_FIGURE,
    prompt_tokens_per_s=_FIGURE,
    generation_tokens_per_s=_FIGURE,
    result_cache_queries=COUNT,
    result_cache_hits=COUNT,
    uptime_s=_FIGURE,
)


def make_model_routes(service: Service) -> APIRouter:
    """Return the routes that compute nothing."""
    router = APIRouter(tags=["Model and server"])
    if not service.url_elsewhere:
        _add_token_routes(router, service)
    _add_state_routes(router, service)
    return router


def _add_token_routes(router: APIRouter, service: Service) -> None:
    limits = service.engine.intake.limits

    @router.post(
        "/tokenize",
        **document_route(
            TOKENIZED, "The ids.", body=make_tokenize_request_schema(limits)
        ),
    )
    async def tokenize(request: Request) -> Response:
        """Return the ids of a prompt or of a rendered chat."""
        fields = await service.bodies.read(request)
        service.check_model(fields.get("model"))
        return make_json_response(
            await service.dispatcher.run_in_tokenizers(
                lambda: _answer_tokenize(service, fields)
            )
        )

    @router.post(
        "/detokenize",
        **document_route(
            make_full_object_schema(prompt=TEXT),
            "The text.",
            body=make_detokenize_request_schema(limits),
        ),
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of ids."""
        fields = await service.bodies.read(request)
        service.check_model(fields.get("model"))
        return make_json_response(
            await service.dispatcher.run_in_tokenizers(
                lambda: _answer_detokenize(service, fields)
            )
        )


def _add_state_routes(router: APIRouter, service: Service) -> None:
    @router.get(
        "/version",
        **document_route(
            make_full_object_schema(version=TEXT), "The version.", errors=[401]
        ),
    )
    async def version() -> Response:
        """Return the version of fminfer."""
        return make_json_response({"version": __version__})

    @router.get(
        "/health",
        **document_route(
            make_full_object_schema(status=TEXT), "It answers.", errors=[503]
        ),
    )
    async def health() -> Response:
        """Return 200 while requests are taken, 503 otherwise."""
        if (refusal := service.dispatcher.refusal) is not None:
            raise refusal
        return make_json_response({"status": "ok"})

    @router.get("/stats", **document_route(STATS, "How it stands.", errors=[401]))
    async def stats() -> Response:
        """Return what the server does at the moment."""
        return make_json_response(_describe_state(service))

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={401: {"description": ERRORS[401]}},
    )
    async def metrics() -> Response:
        """Return the figures that Prometheus collects."""
        body, media_type = service.metrics.render()
        return Response(body, media_type=media_type)


def _describe_state(service: Service) -> dict[str, Any]:
    rates = service.throughput.rates
    cache = service.served.runs.cache
    state = service.served.state
    return {
        "model": service.names[0],
        "num_running": state.num_running,
        "num_waiting": service.dispatcher.num_waiting,
        "kv_usage": state.kv_usage,
        "prompt_tokens_per_s": rates.prompt_tokens,
        "generation_tokens_per_s": rates.generation_tokens,
        "result_cache_queries": 0 if cache is None else cache.num_asked,
        "result_cache_hits": 0 if cache is None else cache.num_found,
        "uptime_s": service.throughput.uptime_s,
    }


def _answer_tokenize(service: Service, fields: dict[str, Any]) -> dict[str, Any]:
    """Answer a request as vLLM's /tokenize does."""
    engine = service.engine
    with_words = fields.pop("return_token_strs", None)
    ids = _tokenize_prompt(service, fields, "prompt")
    words = (
        [engine.tokenizer.piece_of_token(token_id) for token_id in ids]
        if with_words
        else None
    )
    return {
        "count": len(ids),
        "max_model_len": engine.context_length,
        "tokens": ids,
        "token_strs": words,
    }


def _answer_detokenize(service: Service, fields: dict[str, Any]) -> dict[str, Any]:
    """Answer a request as vLLM's /detokenize does."""
    check_no_other_fields(fields, ("tokens",), "/detokenize")
    ids = fields.get("tokens")
    if not isinstance(ids, list):
        raise wrong_type_error("tokens", ids, "a list of token ids")
    if not ids:
        return {"prompt": ""}
    prompt_ids = _tokenize_prompt(service, {"prompt": ids}, "tokens")
    tokenizer = service.engine.tokenizer
    return {"prompt": tokenizer.decode(prompt_ids, skip_special_tokens=False)}


def _tokenize_prompt(service: Service, request: dict[str, Any], name: str) -> list[int]:
    """Return the ids of a request's only prompt."""
    try:
        fields = {
            name: value for name, value in request.items() if name not in CONSTRAINTS
        }
        endpoint: Endpoint | None = "chat" if "messages" in request else "completions"
        if (
            service.engine.intake.limits.vectors is not None
            and endpoint == "completions"
        ):
            fields = {"input": fields.pop("prompt", None), **fields}
            endpoint = None
        else:
            fields["max_tokens"] = 0
        prepared = service.engine.prepare(fields, endpoint=endpoint)
    except RequestError as error:
        source = "prompt" if service.engine.intake.limits.vectors is None else "input"
        if error.param != source:
            raise
        raise RequestError(
            error.code, error.message.replace(source, name, 1), name
        ) from None
    if len(prepared.prompts) != 1:
        raise HttpError(400, f"{name} holds several prompts; send one", param=name)
    return prepared.prompts[0].ids


def make_tokenize_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/tokenize`: of a prompt, or of a chat."""
    known = FIELDS["chat"]
    words = Field(
        "return_token_strs",
        make_unchecked_kind(SWITCH),
        "Add the spelling of each token.",
        default=False,
    )
    prompt = Field(
        "prompt", make_unchecked_kind(TEXT), "The text to go on with.", is_required=True
    )
    special = FIELDS["completions"]["add_special_tokens"]
    names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
    chat = (known[name] for name in (*names, "continue_final_message", "model"))
    text = (prompt, special, words, known["model"])
    messages = [{"role": "user", "content": "Hello"}]
    return {
        "anyOf": [
            make_fields_schema("A text.", text, limits, {"prompt": "Hello"}),
            make_fields_schema(
                "A chat.", (*chat, words), limits, {"messages": messages}
            ),
        ]
    }


def make_detokenize_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/detokenize`."""
    ids = make_unchecked_kind(make_token_ids_schema(limits.vocab_size - 1))
    tokens = Field("tokens", ids, "Ids of the model's tokens.", is_required=True)
    fields = (tokens, FIELDS["chat"]["model"])
    return make_fields_schema("Token ids.", fields, limits, {"tokens": [1, 2, 3]})

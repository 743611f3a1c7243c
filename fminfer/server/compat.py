"""Routes that clients of older servers call: EnergonAI's, and FM Inference's latency server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Query
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import (
    NULL,
    SWITCH,
    TEXT,
    TEXTS,
    Field,
    Schema,
    allow_null,
    make_full_object_schema,
    make_object_schema,
    make_unchecked_kind,
    wrong_type_error,
)
from fminfer.contract.read_fields import check_no_other_fields
from fminfer.core.errors import RequestError
from fminfer.core.quantities import with_noun
from fminfer.engine.engine_core import Finished
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.server.replies import run_while_connected
from fminfer.server.request_bodies import is_large
from fminfer.server.schemas import document_route, make_field_schema, make_fields_schema
from fminfer.server.service import Service, make_json_response

NEW_TOKENS = 64
SEQUENCE_TOKENS = 64
LATENCY_TOKENS = 10  # where a request does not say
SAMPLING = ("temperature", "top_p", "top_k")
# What of a completions request would change the shape of the answer.
COMPLETIONS_ONLY = (
    "n",
    "best_of",
    "logprobs",
    "echo",
    "stream",
    "stream_options",
    "suffix",
)
# Parameters of the latency server, and what they are called here; those with None are read here.
LATENCY: dict[str, str | None] = {
    **{name: name for name in (*SAMPLING, "repetition_penalty", "seed", "stop")},
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "return_full_text": "echo",
    "do_sample": None,
}


class _TextConvertor(PathConvertor):
    """A part of a path that may hold any text, of several lines too."""

    regex = "(?s:.*)"


class _OldRoutes:
    """Answers as older servers do. The names of its methods are operations' ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generation(self, request: Request) -> Response:
        """Complete one prompt, as EnergonAI's servers of BLOOM and OPT do."""
        fields = await self._service.bodies.read(request)
        fields = _translate_generation_request(fields)
        finished = await _answer_completion(self._service, request, fields)
        return make_json_response({"text": finished.choices[0]["text"]})

    async def run(
        self,
        request: Request,
        text: str,
        max_seq_length: int = Query(
            SEQUENCE_TOKENS, ge=1, description="prompt and completion"
        ),
    ) -> Response:
        """Continue a text greedily, as EnergonAI's server of GPT-2 does."""
        service = self._service
        _check_run_request(request, text)
        prepared = await service.dispatcher.run_in_tokenizers(
            lambda: service.engine.prepare({"prompt": text, "max_tokens": 0})
        )
        num_prompt = len(prepared.prompts[0].ids)
        if num_prompt >= max_seq_length:
            raise RequestError(
                "out_of_range",
                f"max_seq_length is {max_seq_length}, and the text alone has "
                f"{with_noun(num_prompt, 'token')}; raise max_seq_length, which counts both",
                "max_seq_length",
            )
        fields = {
            "prompt": text,
            "max_tokens": max_seq_length - num_prompt,
            "temperature": 0,
            "echo": True,
        }
        finished = await _answer_completion(service, request, fields)
        return make_json_response([choice["text"] for choice in finished.choices])

    async def latency(self, request: Request) -> Response:
        """Complete prompts, as FM Inference's latency server does."""
        fields = await self._service.bodies.read(request)
        fields = _translate_latency_request(fields)
        finished = await _answer_completion(self._service, request, fields)
        return make_json_response([choice["text"] for choice in finished.choices])


def make_old_routes(service: Service) -> APIRouter:
    """Return the routes of older servers."""
    router = APIRouter(tags=["Older servers"])
    routes = _OldRoutes(service)
    limits = service.engine.intake.limits
    register_url_convertor("text", _TextConvertor())  # the routes below name it
    router.post(
        "/generation",
        **document_route(
            make_full_object_schema(text=TEXT),
            "The text.",
            body=make_generation_request_schema(limits),
        ),
    )(routes.generation)
    for path in ("/run_{name}/{text:text}", "/run/{text:text}"):
        router.get(path, **document_route(TEXTS, "The text, in a list."))(routes.run)
    router.post(
        "/",
        **document_route(TEXTS, "The texts.", body=make_latency_request_schema(limits)),
    )(routes.latency)
    return router


async def _answer_completion(
    service: Service, request: Request, fields: dict[str, Any]
) -> Finished:
    service.check_model(fields.get("model"))
    asking = service.dispatcher.add_request(fields, is_large=is_large(request))
    reply = await run_while_connected(asking, request.receive)
    return await reply.wait_for_answer(request.receive)


def _check_run_request(request: Request, text: str) -> None:
    """Raise for a request to /run/ with other parameters, or without a text."""
    _check_utf8_path(request)
    if others := sorted(request.query_params.keys() - {"max_seq_length"}):
        raise RequestError(
            "unsupported_parameter",
            f"{others[0]} is no parameter of this route, which takes max_seq_length; call "
            "/v1/completions for others",
            others[0],
        )
    if not text:
        raise RequestError(
            "missing_prompt", "there is no text behind /run/; give one", "text"
        )


def _check_utf8_path(request: Request) -> None:
    """Raise for a path whose bytes are no text; it was decoded with replacements by now."""
    raw: bytes = request.scope["raw_path"]
    try:
        unquote_to_bytes(raw).decode()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise RequestError(
            "invalid_utf8",
            f"the path is not UTF-8: byte 0x{wrong:02x}; write each character as the %XX of its "
            "UTF-8 bytes",
            "text",
        ) from None


def _translate_generation_request(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the completions request that a /generation request means."""
    for name in COMPLETIONS_ONLY:
        if fields.get(name) is not None:
            raise RequestError(
                "unsupported_parameter",
                f"{name} has no place in the answer of /generation, which is one text; leave it "
                "out, or call /v1/completions",
                name,
            )
    if not isinstance(fields.get("prompt"), str):
        raise wrong_type_error("prompt", fields.get("prompt"), "a string")
    request = {**fields, "echo": True}
    limits = (
        request.pop("max_new_tokens", None),
        request.get("max_tokens"),
        NEW_TOKENS,
    )
    request["max_tokens"] = next(limit for limit in limits if limit is not None)
    if all(fields.get(name) is None for name in SAMPLING):
        request["temperature"] = 0
    return request


def _translate_latency_request(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the completions request that one of the latency server means."""
    check_no_other_fields(fields, ("inputs", "parameters"), "POST /")
    parameters = {} if fields.get("parameters") is None else fields["parameters"]
    if not isinstance(parameters, dict):
        raise wrong_type_error("parameters", parameters, "an object or null")
    for name in parameters:
        if name not in LATENCY:
            raise RequestError(
                "unsupported_parameter",
                f"parameters has {name}, and known are {', '.join(LATENCY)}; leave it "
                "out, or call /v1/completions",
                name,
            )
    request: dict[str, Any] = {
        "prompt": fields.get("inputs"),
        "max_tokens": LATENCY_TOKENS,
    }
    for name, value in parameters.items():
        if (ours := LATENCY[name]) is not None and value is not None:
            request[ours] = value
    do_sample = parameters.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise wrong_type_error("do_sample", do_sample, "true, false or null")
    if do_sample is False:
        request["temperature"] = 0
    return request


def make_generation_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/generation`."""
    of_chat = FIELDS["chat"]
    both = [
        replace(each, help=f"{each.help} Default: greedy.")
        if name in SAMPLING
        else each
        for name, each in FIELDS["completions"].items()
        if of_chat.get(name) is each
        and each.fate == "acted on"
        and name not in COMPLETIONS_ONLY
    ]
    fields = (
        Field(
            "prompt",
            make_unchecked_kind(TEXT),
            "The text to go on with.",
            is_required=True,
        ),
        replace(of_chat["max_tokens"], name="max_new_tokens", default=NEW_TOKENS),
        replace(
            of_chat["max_tokens"], help="The same, where max_new_tokens is absent."
        ),
        *both,
        *(
            Field(name, make_unchecked_kind(NULL), "It has no place in this answer.")
            for name in COMPLETIONS_ONLY
        ),
    )
    return make_fields_schema(
        "Go on with a text. It is greedy unless temperature, top_p or top_k is sent.",
        fields,
        limits,
        {"prompt": "Question: How do you go"},
    )


def make_latency_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `POST /`."""
    known = FIELDS["completions"]
    parameters = {
        name: allow_null(SWITCH)
        if ours is None
        else make_field_schema(known[ours], limits)
        for name, ours in LATENCY.items()
    }
    max_tokens = replace(known["max_tokens"], default=LATENCY_TOKENS)
    parameters["max_new_tokens"] = make_field_schema(max_tokens, limits)
    inputs = known["prompt"].make_schema(limits.vocab_size - 1) | {
        "description": "One text or several."
    }
    of_parameters = make_object_schema(parameters) | {"additionalProperties": False}
    return make_object_schema(
        {"inputs": inputs, "parameters": allow_null(of_parameters)}, "inputs"
    ) | {
        "examples": [
            {"inputs": "Question: How do you go", "parameters": {"max_new_tokens": 8}}
        ]
    }

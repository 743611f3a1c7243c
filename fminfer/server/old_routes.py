"""Routes that clients of older servers call: EnergonAI's, and FM Inference's latency server."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Query
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from fminfer.contract.fields import wrong_type
from fminfer.core.errors import RequestError
from fminfer.core.quantities import counted
from fminfer.engine.engine_core import Finished
from fminfer.server.answer_schemas import generation_schema, texts_schema
from fminfer.server.event_stream import until_answered
from fminfer.server.openai_routes import respond_json
from fminfer.server.schemas import document, generation_request_schema, latency_request_schema
from fminfer.server.service import Service

NEW_TOKENS, SEQUENCE_TOKENS, LATENCY_TOKENS = 64, 64, 10  # where a request does not say
SAMPLING = ("temperature", "top_p", "top_k")
# What of a completions request would change the shape of the answer.
OF_COMPLETIONS = ("n", "best_of", "logprobs", "echo", "stream", "stream_options", "suffix")
# Parameters of the latency server, and what they are called here; those with None are read here.
LATENCY = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "num_return_sequences": "n",
    "return_full_text": "echo",
    "do_sample": None,
}


class _TextConvertor(PathConvertor):
    """A part of a path that may hold any text, of several lines too."""

    regex = "(?s:.*)"


def old_routes(service: Service) -> APIRouter:
    """Return the routes of older servers."""
    router = APIRouter(tags=["Older servers"])
    limits = service.engine.intake.limits
    of_generation = generation_request_schema(limits, NEW_TOKENS, OF_COMPLETIONS)
    of_latency = latency_request_schema(limits, LATENCY_TOKENS, LATENCY)
    register_url_convertor("text", _TextConvertor())  # the routes below name it

    @router.post("/generation", **document(generation_schema(), "The text.", body=of_generation))
    async def generation(request: Request) -> Response:
        """Complete one prompt, as EnergonAI's servers of BLOOM and OPT do."""
        fields = await service.read(request)
        finished = await _complete(service, request, _from_generation(fields))
        return respond_json({"text": finished.choices[0]["text"]})

    @router.get("/run/{text:text}", **document(texts_schema(), "The text, in a list."))
    @router.get("/run_{name}/{text:text}", **document(texts_schema(), "The text, in a list."))
    async def run(
        request: Request,
        text: str,
        max_seq_length: int = Query(SEQUENCE_TOKENS, ge=1, description="prompt and completion"),
    ) -> Response:
        """Continue a text greedily, as EnergonAI's server of GPT-2 does."""
        _require_utf8(request)
        if others := sorted(request.query_params.keys() - {"max_seq_length"}):
            raise RequestError(
                "unsupported_parameter",
                f"{others[0]} is no parameter of this route, which takes max_seq_length; call "
                "/v1/completions for others",
                others[0],
            )
        if not text:
            raise RequestError("missing_prompt", "there is no text behind /run/; give one", "text")
        num_prompt = await _count_tokens(service, text)
        if num_prompt >= max_seq_length:
            raise RequestError(
                "out_of_range",
                f"max_seq_length is {max_seq_length}, and the text alone has "
                f"{counted(num_prompt, 'token')}; raise max_seq_length, which counts both",
                "max_seq_length",
            )
        fields = {"prompt": text, "max_tokens": max_seq_length - num_prompt}
        finished = await _complete(service, request, fields | {"temperature": 0, "echo": True})
        return respond_json([choice["text"] for choice in finished.choices])

    @router.post("/", **document(texts_schema(), "The texts.", body=of_latency))
    async def latency(request: Request) -> Response:
        """Complete prompts, as FM Inference's latency server does."""
        fields = await service.read(request)
        finished = await _complete(service, request, _from_latency(fields))
        return respond_json([choice["text"] for choice in finished.choices])

    return router


async def _complete(service: Service, request: Request, fields: dict[str, Any]) -> Finished:
    service.model.check(fields.get("model"))
    reply = await service.dispatcher.ask(fields)
    return await until_answered(service.dispatcher, reply, request.receive)


def _require_utf8(request: Request) -> None:
    """Refuse a path whose bytes are no text; it was decoded with replacements by now."""
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


async def _count_tokens(service: Service, text: str) -> int:
    prepared = await service.dispatcher.prepare({"prompt": text, "max_tokens": 0})
    return len(prepared.prompts[0].ids)


def _from_generation(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the completions request that a /generation request means."""
    for name in OF_COMPLETIONS:
        if fields.get(name) is not None:
            raise RequestError(
                "unsupported_parameter",
                f"{name} has no place in the answer of /generation, which is one text; leave it "
                "out, or call /v1/completions",
                name,
            )
    if not isinstance(fields.get("prompt"), str):
        raise wrong_type("prompt", fields.get("prompt"), "a string")
    request = {**fields, "echo": True}
    new_tokens = request.pop("max_new_tokens", None)
    if new_tokens is None:
        new_tokens = request.get("max_tokens")
    request["max_tokens"] = NEW_TOKENS if new_tokens is None else new_tokens
    if all(fields.get(name) is None for name in SAMPLING):
        request["temperature"] = 0
    return request


def _from_latency(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the completions request that one of the latency server means."""
    parameters = {} if fields.get("parameters") is None else fields["parameters"]
    if not isinstance(parameters, dict):
        raise wrong_type("parameters", parameters, "an object or null")
    for name in parameters:
        if name not in LATENCY:
            raise RequestError(
                "unsupported_parameter",
                f"parameters has {name}, and known are {', '.join(LATENCY)}; leave it out, or call "
                "/v1/completions",
                name,
            )
    request: dict[str, Any] = {"prompt": fields.get("inputs"), "max_tokens": LATENCY_TOKENS}
    for name, value in parameters.items():
        if (ours := LATENCY[name]) is not None and value is not None:
            request[ours] = value
    do_sample = parameters.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise wrong_type("do_sample", do_sample, "true, false or null")
    if do_sample is False:
        request["temperature"] = 0
    return request

"""What /openapi.json says of routes: the bodies they take, and what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import (
    INT64,
    NULL,
    SWITCH,
    TEXT,
    Field,
    Schema,
    allow_null,
    as_it_is,
    list_of_ids,
    object_of,
)
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.server.answer_schemas import error_schema

JSON = "application/json"
ERRORS = {
    400: "The request is wrong; the error names the field and what is allowed.",
    401: "The key is missing or wrong.",
    403: "The host or the page's origin is not known to the server.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    409: "It is in use, or is over; the error says which.",
    410: "It was removed from the server's disk.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After tells when to try again.",
    500: "fminfer failed on this request.",
    503: "The server ends, or its engine has failed.",
    507: "The server's disk is full or cannot be written; nothing is kept of the request.",
}
OF_ANSWERS = (400, 401, 404, 408, 413, 415, 429, 500, 503)  # with which most routes may end
GREEDY = ("temperature", "top_p", "top_k")  # without all of them, /generation is greedy
STREAM = (
    "With stream true: server-sent events. Each is `data: ` and a chunk, whose choices hold what "
    "is new; the last one is `data: [DONE]`. Lines that begin with a colon are signs of life. An "
    "error in the middle is an event with the error object."
)


_PROMPT = Field("prompt", as_it_is(TEXT), "The text to go on with.", is_required=True)
_SWITCH = as_it_is(SWITCH)


def describe_field(each: Field, limits: RequestLimits | None) -> Schema:
    """Return the JSON Schema of a field, with its help and its default.

    Args:
        limits: what numbers are bounded by; None: no field is of a model.
    """
    most = {}
    if limits is not None:
        most = {"context": limits.context_length - 1, "vocab": limits.vocab_size - 1}
        most |= {"logprobs": limits.config.max_logprobs}
    told = each.help
    if each.fate == "refused":
        told = f"Not supported; the name of that is {each.ours}." if each.ours else "Not supported."
    found = each.schema(most.get(each.limit, INT64 - 1)) | {"description": told}
    default = each.default
    if (
        default is None
        and limits is not None
        and each.fate == "acted on"
        and "Default:" not in each.help
    ):
        default = getattr(limits.defaults, each.name, None)
    return found if default in (None, ()) else found | {"default": default}


def describe_fields(
    meaning: str,
    fields: Iterable[Field],
    limits: RequestLimits | None,
    example: dict[str, Any],
    *,
    is_strict: bool = False,
) -> Schema:
    """Return the JSON Schema of a request's object.

    Args:
        is_strict: it has no other fields.
    """
    fields = tuple(fields)
    return object_of(
        {each.name: describe_field(each, limits) for each in fields},
        *(each.name for each in fields if each.is_required),
    ) | {"description": meaning, "additionalProperties": not is_strict, "examples": [example]}


def completion_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/v1/completions`."""
    example = {"prompt": "Question: How do you go", "max_tokens": 8, "temperature": 0}
    fields = {**FIELDS["completions"]}
    if limits.start_ids is None:
        fields["decoder_prompt"] = replace(fields["decoder_prompt"], fate="refused")
    return describe_fields(
        "Complete prompts.", fields.values(), limits, example, is_strict=limits.config.strict
    )


def chat_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/v1/chat/completions`."""
    example = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    return describe_fields(
        "Answer a conversation.",
        FIELDS["chat"].values(),
        limits,
        example,
        is_strict=limits.config.strict,
    )


def generation_request_schema(
    limits: RequestLimits, new_tokens: int, refused: Iterable[str]
) -> Schema:
    """Return the schema of a request to `/generation`.

    Args:
        new_tokens: the default of max_new_tokens.
        refused: fields of completions that must be null.
    """
    of_chat, refused = FIELDS["chat"], tuple(refused)
    both = [
        each
        for name, each in FIELDS["completions"].items()
        if of_chat.get(name) is each and each.fate == "acted on" and name not in refused
    ]
    fields = (
        _PROMPT,
        replace(of_chat["max_tokens"], name="max_new_tokens", default=new_tokens),
        replace(of_chat["max_tokens"], help="The same, where max_new_tokens is absent."),
        *(
            replace(each, help=f"{each.help} Default: greedy.") if each.name in GREEDY else each
            for each in both
        ),
        *(Field(name, as_it_is(NULL), "It has no place in this answer.") for name in refused),
    )
    meaning = "Go on with a text. It is greedy unless temperature, top_p or top_k is sent."
    return describe_fields(meaning, fields, limits, {"prompt": "Question: How do you go"})


def latency_request_schema(
    limits: RequestLimits, new_tokens: int, names: Mapping[str, str | None]
) -> Schema:
    """Return the schema of a request to `POST /`.

    Args:
        new_tokens: the default of max_new_tokens.
        names: of the parameters, and what completions call them; None: they do not have it.
    """
    known = FIELDS["completions"]
    given = {"max_new_tokens": new_tokens}
    parameters = {
        name: describe_field(replace(known[ours], default=given.get(name)), limits)
        if ours
        else allow_null(SWITCH)
        for name, ours in names.items()
    }
    inputs = known["prompt"].schema(limits.vocab_size - 1) | {"description": "One text or several."}
    of_parameters = object_of(parameters) | {"additionalProperties": False}
    return object_of({"inputs": inputs, "parameters": allow_null(of_parameters)}, "inputs") | {
        "examples": [{"inputs": "Question: How do you go", "parameters": {"max_new_tokens": 8}}]
    }


def tokenize_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/tokenize`: of a prompt, or of a chat."""
    known = FIELDS["chat"]
    words = Field("return_token_strs", _SWITCH, "Add the spelling of each token.", default=False)
    special = FIELDS["completions"]["add_special_tokens"]
    names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
    chat = (known[name] for name in (*names, "continue_final_message", "model"))
    text = (_PROMPT, special, words, known["model"])
    messages = [{"role": "user", "content": "Hello"}]
    return {
        "anyOf": [
            describe_fields("A text.", text, limits, {"prompt": "Hello"}),
            describe_fields("A chat.", (*chat, words), limits, {"messages": messages}),
        ]
    }


def detokenize_request_schema(limits: RequestLimits) -> Schema:
    """Return the schema of a request to `/detokenize`."""
    ids = as_it_is(list_of_ids(limits.vocab_size - 1))
    tokens = Field("tokens", ids, "Ids of the model's tokens.", is_required=True)
    fields = (tokens, FIELDS["chat"]["model"])
    return describe_fields("Token ids.", fields, limits, {"tokens": [1, 2, 3]})


def describe_body(schema: Schema) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes such a body."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def document(
    answer: Schema,
    meaning: str,
    *,
    body: Schema | None = None,
    chunk: Schema | None = None,
    errors: Iterable[int] = OF_ANSWERS,
) -> dict[str, Any]:
    """Return what FastAPI is told of a route: what it takes, and what it answers.

    Args:
        body: of the request.
        chunk: of which a stream consists, if the route can send one.
        errors: the statuses with which it may end.
    """
    found: dict[str, Any] = {
        "responses": describe_answers(answer, meaning, chunk=chunk, errors=errors)
    }
    return found if body is None else found | {"openapi_extra": describe_body(body)}


def describe_answers(
    schema: Schema, meaning: str, *, chunk: Schema | None = None, errors: Iterable[int] = OF_ANSWERS
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route.

    Args:
        chunk: of which a stream consists, if the route can send one.
        errors: the statuses with which it may end.
    """
    content: dict[str, Any] = {JSON: {"schema": schema}}
    if chunk is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": STREAM},
            "x-chunk": chunk,
        }
    error = {JSON: {"schema": error_schema()}}
    failed: dict[int | str, dict[str, Any]] = {
        status: {"description": ERRORS[status], "content": error} for status in (403, *errors)
    }
    return {200: {"description": meaning, "content": content}, **failed}

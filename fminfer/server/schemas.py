"""What /openapi.json says of routes: the bodies they take, and what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fminfer.engine.intake import Limits
from fminfer.server.answer_schemas import error_schema
from fminfer.server.json_schema import (
    NULL,
    SWITCH,
    TEXT,
    Field,
    FieldTable,
    Schema,
    allow_null,
    integer,
    object_of,
)
from fminfer.server.request_fields import (
    chat_fields,
    completion_fields,
    draw_fields,
    model_field,
    prompt_field,
    token_ids,
)

JSON = "application/json"
ERRORS = {
    400: "The request is wrong; the error names the field and what is allowed.",
    401: "The key is missing or wrong.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    409: "It is in use, or is over; the error says which.",
    410: "It was removed from the server's disk.",
    413: "The body is too large.",
    429: "The queue is full; Retry-After tells when to try again.",
    500: "fminfer failed on this request.",
    503: "The server ends, or its engine has failed.",
    507: "The server's disk is full or cannot be written; nothing is kept of the request.",
}
OF_ANSWERS = (400, 401, 404, 408, 413, 429, 500, 503)  # with which most routes may end
GREEDY = ("temperature", "top_p", "top_k")  # without all of them, /generation is greedy
STREAM = (
    "With stream true: server-sent events. Each is `data: ` and a chunk, whose choices hold what "
    "is new; the last one is `data: [DONE]`. Lines that begin with a colon are signs of life. An "
    "error in the middle is an event with the error object."
)


def completion_request_schema(limits: Limits) -> Schema:
    """Return the schema of a request to `/v1/completions`."""
    return completion_fields(limits).describe(is_strict=limits.is_strict)


def chat_request_schema(limits: Limits) -> Schema:
    """Return the schema of a request to `/v1/chat/completions`."""
    return chat_fields(limits).describe(is_strict=limits.is_strict)


def generation_request_schema(limits: Limits, new_tokens: int, refused: Iterable[str]) -> Schema:
    """Return the schema of a request to `/generation`.

    Args:
        new_tokens: the default of max_new_tokens.
        refused: fields of completions that must be null.
    """
    most = integer(0, limits.context_length - 1)
    refused = tuple(refused)
    draws = [each for each in draw_fields(limits) if each.name not in refused]
    fields = (
        Field("prompt", "The text to go on with.", TEXT, is_required=True),
        Field("max_new_tokens", "Tokens to draw at most.", most, new_tokens),
        Field("max_tokens", "The same, where max_new_tokens is absent.", most),
        *(replace(each, default=None) if each.name in GREEDY else each for each in draws),
        *(Field(name, "It has no place in this answer.", NULL) for name in refused),
    )
    meaning = "Go on with a text. It is greedy unless temperature, top_p or top_k is sent."
    return FieldTable(meaning, fields, {"prompt": "Question: How do you go"}).describe()


def latency_request_schema(
    limits: Limits, new_tokens: int, names: Mapping[str, str | None]
) -> Schema:
    """Return the schema of a request to `POST /`.

    Args:
        new_tokens: the default of max_new_tokens.
        names: of the parameters, and what completions call them; None: they do not have it.
    """
    known = {each.name: each for each in completion_fields(limits).fields}
    parameters: dict[str, Schema] = {}
    for name, ours in names.items():
        if ours is None:
            parameters[name] = allow_null(SWITCH)
        elif name == "max_new_tokens":
            parameters[name] = replace(known[ours], default=new_tokens).describe()
        else:
            parameters[name] = known[ours].describe()
    inputs = prompt_field(limits).schema | {"description": "One text or several."}
    of_parameters = object_of(parameters) | {"additionalProperties": False}
    return object_of({"inputs": inputs, "parameters": allow_null(of_parameters)}, "inputs") | {
        "examples": [{"inputs": "Question: How do you go", "parameters": {"max_new_tokens": 8}}]
    }


def tokenize_request_schema(limits: Limits) -> Schema:
    """Return the schema of a request to `/tokenize`: of a prompt, or of a chat."""
    known = {each.name: each for each in chat_fields(limits).fields}
    words = Field("return_token_strs", "Add the spelling of each token.", SWITCH, False)
    special = Field("add_special_tokens", "false: no BOS before the text.", SWITCH, True)
    names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
    chat = tuple(known[name] for name in (*names, "continue_final_message"))
    prompt = Field("prompt", "The text.", TEXT, is_required=True)
    of_text = FieldTable("A text.", (prompt, special, words, model_field()), {"prompt": "Hello"})
    messages = [{"role": "user", "content": "Hello"}]
    of_chat = FieldTable("A chat.", (*chat, words, model_field()), {"messages": messages})
    return {"anyOf": [of_text.describe(), of_chat.describe()]}


def detokenize_request_schema(limits: Limits) -> Schema:
    """Return the schema of a request to `/detokenize`."""
    ids = Field("tokens", "Ids of the model's tokens.", token_ids(limits), is_required=True)
    return FieldTable("Token ids.", (ids, model_field()), {"tokens": [1, 2, 3]}).describe()


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
        status: {"description": ERRORS[status], "content": error} for status in errors
    }
    return {200: {"description": meaning, "content": content}, **failed}

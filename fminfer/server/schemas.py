"""What /openapi.json says of routes: the bodies of requests, and the answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import (
    INT64,
    NULL,
    TEXT,
    Field,
    Schema,
    allow_null,
    make_full_object_schema,
    make_list_schema,
    make_object_schema,
)
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.sequence import FinishReason
from fminfer.server.http_errors import JSON

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
# with which most routes may end
OF_ANSWERS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
STREAM = (
    "With stream true: server-sent events. Each is `data: ` and a chunk, whose choices "
    "hold what is new; the last one is `data: [DONE]`. A chunk without anything new "
    "keeps the connection alive. An error in the middle is an event with the error "
    "object."
)


def extend_schema(schema: Schema, **properties: Schema) -> Schema:
    """Return the schema of an object that may have further properties."""
    return schema | {"properties": schema["properties"] | properties}


COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
IDS = make_list_schema(COUNT)
_MESSAGE = TEXT | {"description": "What was found, what is allowed, what to do."}
_PARAM = allow_null(TEXT) | {"description": "The field that is wrong."}
ERROR = make_full_object_schema(
    error=make_full_object_schema(
        message=_MESSAGE, type=TEXT, param=_PARAM, code=allow_null(TEXT)
    )
)
_USAGE = extend_schema(
    make_full_object_schema(
        prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT
    ),
    prompt_tokens_details=allow_null(
        make_object_schema({"cached_tokens": COUNT, "truncated_tokens": COUNT})
    ),
)
_REASONS = get_args(FinishReason)
_CHAT_REASON: Schema = {"enum": list(_REASONS)}
_REASON: Schema = {"enum": [each for each in _REASONS if each != "tool_calls"]}
_ASSISTANT: Schema = {"const": "assistant"}
# What a choice has beside its text, of some requests only.
_AT_TIMES: dict[str, Schema] = {
    "stop_reason": {
        "type": ["string", "integer", "null"],
        "description": "The stop string, or the id of the stop token.",
    },
    "prompt_token_ids": IDS,
    "token_ids": IDS,
    "label_probabilities": {
        "type": "object",
        "additionalProperties": NUMBER,
        "description": "Of each label, or of so many as were asked for; best first.",
    },
    "label_mass": NUMBER
    | {"description": "The probability of all labels together, under the model alone."},
}
_LOGPROBS = make_full_object_schema(
    tokens=make_list_schema(TEXT),
    token_logprobs=make_list_schema(allow_null(NUMBER)),
    top_logprobs=allow_null(
        make_list_schema(allow_null({"type": "object", "additionalProperties": NUMBER}))
    ),
    text_offset=IDS,
)
_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": allow_null(IDS)}
_CHAT_LOGPROBS = extend_schema(
    make_full_object_schema(
        content=make_list_schema(
            make_full_object_schema(
                **_TOKEN,
                top_logprobs=make_list_schema(make_full_object_schema(**_TOKEN)),
            )
        )
    ),
    refusal=NULL,
)
_CALL = make_full_object_schema(
    id=TEXT,
    type={"const": "function"},
    function=make_full_object_schema(name=TEXT, arguments=TEXT),
)
# Of a call under a grammar, further pieces have more of the arguments alone.
_CALL_PIECE = make_object_schema(
    {
        "index": COUNT,
        "id": TEXT,
        "type": {"const": "function"},
        "function": make_object_schema({"name": TEXT, "arguments": TEXT}, "arguments"),
    },
    "index",
    "function",
)


def _make_text_choice_schema(reason: Schema) -> Schema:
    choice = make_full_object_schema(
        text=TEXT, index=COUNT, logprobs=allow_null(_LOGPROBS), finish_reason=reason
    )
    return extend_schema(choice, **_AT_TIMES)


def _make_chat_choice_schema(name: str, content: Schema, reason: Schema) -> Schema:
    choice = make_full_object_schema(
        **{name: content}, index=COUNT, finish_reason=reason
    )
    return extend_schema(choice, **_AT_TIMES, logprobs=allow_null(_CHAT_LOGPROBS))


def _make_answer_schema(kind: str, **rest: Schema) -> Schema:
    return make_full_object_schema(
        id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, **rest
    )


def _make_chunk_schema(kind: str, choice: Schema) -> Schema:
    return extend_schema(
        _make_answer_schema(kind, choices=make_list_schema(choice)),
        usage=allow_null(_USAGE),
    )


def _make_list_schema(entry: Schema, name: str = "data") -> Schema:
    usage = make_full_object_schema(prompt_tokens=COUNT, total_tokens=COUNT)
    return _make_answer_schema("list", **{name: make_list_schema(entry)}, usage=usage)


_CHAT_MESSAGE = extend_schema(
    make_full_object_schema(role=_ASSISTANT, content=allow_null(TEXT)),
    refusal=NULL,
    tool_calls=make_list_schema(_CALL),
)
_CHAT_DELTA = make_object_schema(
    {
        "role": _ASSISTANT,
        "content": allow_null(TEXT),
        "tool_calls": make_list_schema(_CALL_PIECE),
    }
)
COMPLETION = _make_answer_schema(
    "text_completion",
    choices=make_list_schema(_make_text_choice_schema(_REASON)),
    usage=_USAGE,
)
CHAT_COMPLETION = _make_answer_schema(
    "chat.completion",
    choices=make_list_schema(
        _make_chat_choice_schema("message", _CHAT_MESSAGE, _CHAT_REASON)
    ),
    usage=_USAGE,
)
_ITEM = make_object_schema({"type": TEXT, "id": TEXT, "status": TEXT}, "type", "id")
RESPONSE = extend_schema(
    make_full_object_schema(
        id=TEXT,
        object={"const": "response"},
        created_at=COUNT,
        model=TEXT,
        status={"enum": ["completed", "incomplete"]},
        output=make_list_schema(_ITEM),
        usage=make_full_object_schema(
            input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT
        ),
    ),
    error=NULL,
    incomplete_details=allow_null(make_full_object_schema(reason=TEXT)),
)


@dataclass(slots=True, frozen=True)
class EndpointDocs:
    """What the document says of an endpoint; its request's fields stand in their table."""

    help: str
    example: dict[str, Any]
    answer: Schema
    chunk: Schema | None = None  # of a stream


ENDPOINT_DOCS: dict[Endpoint, EndpointDocs] = {
    "completions": EndpointDocs(
        "Complete one prompt or several",
        {"prompt": "Question: How do you go", "max_tokens": 8, "temperature": 0},
        COMPLETION,
        _make_chunk_schema(
            "text_completion", _make_text_choice_schema(allow_null(_REASON))
        ),
    ),
    "chat": EndpointDocs(
        "Answer a chat",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        CHAT_COMPLETION,
        _make_chunk_schema(
            "chat.completion.chunk",
            _make_chat_choice_schema("delta", _CHAT_DELTA, allow_null(_CHAT_REASON)),
        ),
    ),
    "responses": EndpointDocs(
        "Answer a text or a conversation as a response",
        {"input": "Hello", "max_output_tokens": 8},
        RESPONSE,
        make_full_object_schema(type=TEXT, sequence_number=COUNT),
    ),
    "embeddings": EndpointDocs(
        "Return the vectors of texts",
        {"input": ["one text", "another"]},
        _make_list_schema(
            make_full_object_schema(
                object={"const": "embedding"},
                index=COUNT,
                embedding={"anyOf": [make_list_schema(NUMBER), TEXT]},
            )
        ),
    ),
    "score": EndpointDocs(
        "Score pairs of texts",
        {"text_1": "a question", "text_2": ["an answer", "another"]},
        _make_list_schema(
            make_full_object_schema(
                index=COUNT, object={"const": "score"}, score=NUMBER
            )
        ),
    ),
    "rerank": EndpointDocs(
        "Order documents by how well they fit a query",
        {"query": "a question", "documents": ["an answer", "another"], "top_n": 1},
        _make_list_schema(
            extend_schema(
                make_full_object_schema(index=COUNT, relevance_score=NUMBER),
                document=make_object_schema({"text": TEXT}),
            ),
            "results",
        ),
    ),
    "classify": EndpointDocs(
        "Tell the classes of texts",
        {"input": "a text"},
        _make_list_schema(
            make_full_object_schema(
                index=COUNT,
                label=allow_null(TEXT),
                probs=make_list_schema(NUMBER),
                num_classes=COUNT,
            )
        ),
    ),
}


def make_request_schema(endpoint: Endpoint, limits: RequestLimits) -> Schema:
    """Return the schema of a request to an endpoint."""
    about = ENDPOINT_DOCS[endpoint]
    fields = {**FIELDS[endpoint]}
    if endpoint == "completions" and limits.start_ids is None:
        fields["decoder_prompt"] = replace(fields["decoder_prompt"], fate="refused")
    return make_fields_schema(
        f"{about.help}.",
        fields.values(),
        limits,
        about.example,
        is_strict=limits.config.strict,
    )


def make_fields_schema(
    meaning: str,
    fields: Iterable[Field],
    limits: RequestLimits | None,
    example: dict[str, Any],
    *,
    is_strict: bool = False,
) -> Schema:
    """Return the JSON Schema of a request's object; a strict one has no other fields."""
    fields = tuple(fields)
    return make_object_schema(
        {field.name: make_field_schema(field, limits) for field in fields},
        *(field.name for field in fields if field.is_required),
    ) | {
        "description": meaning,
        "additionalProperties": not is_strict,
        "examples": [example],
    }


def make_field_schema(field: Field, limits: RequestLimits | None) -> Schema:
    """Return the JSON Schema of a field, with its help and its default.

    Args:
        limits: what numbers are bounded by; None: no field is of a model.
    """
    limits_by_name: dict[str, int] = {}
    default = field.default
    description = field.help
    if limits is not None:
        limits_by_name = {
            "context": limits.context_length - 1,
            "vocab": limits.vocab_size - 1,
            "logprobs": limits.config.max_logprobs,
        }
        if (
            default is None
            and field.fate == "acted on"
            and "Default:" not in field.help
        ):
            default = getattr(limits.defaults, field.name, None)
    if field.fate == "refused":
        description = (
            f"Not supported; the name of that is {field.ours}."
            if field.ours
            else "Not supported."
        )
    schema = field.make_schema(limits_by_name.get(field.limit, INT64 - 1)) | {
        "description": description
    }
    return schema if default in (None, ()) else schema | {"default": default}


def document_route(
    answer: Schema,
    meaning: str,
    *,
    body: Schema | None = None,
    chunk: Schema | None = None,
    errors: Iterable[int] = OF_ANSWERS,
    media_type: str = JSON,
) -> dict[str, Any]:
    """Return what FastAPI documents of a route: its request and its answers.

    Args:
        body: of the request.
        chunk: of which a stream consists, if the route can send one.
        errors: the statuses with which it may end, beside 403.
        media_type: of the answer.
    """
    content: dict[str, Any] = {media_type: {"schema": answer}}
    if chunk is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": STREAM},
            "x-chunk": chunk,
        }
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": meaning, "content": content}
    }
    for status in (403, *errors):
        responses[status] = {
            "description": ERRORS[status],
            "content": {JSON: {"schema": ERROR}},
        }
    arguments: dict[str, Any] = {"responses": responses}
    return arguments if body is None else arguments | document_body(body, JSON)


def document_body(schema: Schema, media_type: str) -> dict[str, Any]:
    """Return what FastAPI documents of a body that a route reads itself."""
    content = {media_type: {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}

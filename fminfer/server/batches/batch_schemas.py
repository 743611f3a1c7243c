"""The JSON Schemas of files and batches."""

from __future__ import annotations

from typing import Any, get_args

from fminfer.contract.field_table import Field
from fminfer.contract.fields import (
    NULL,
    SWITCH,
    TEXT,
    Schema,
    allow_null,
    as_it_is,
    list_of,
    object_of,
)
from fminfer.server.answer_schemas import COUNT, error_schema
from fminfer.server.batches.batch_request import (
    ENDPOINTS,
    EXAMPLE,
    MOST_KEY_CHARS,
    MOST_PAIRS,
    MOST_VALUE_CHARS,
    WINDOW_FORM,
)
from fminfer.server.batches.stored_batches import TIMES, BatchStatus
from fminfer.server.batches.stored_files import PURPOSES
from fminfer.server.batches.upload import PURPOSE
from fminfer.server.http_errors import JSON
from fminfer.server.schemas import ERRORS, describe_fields

METADATA: Schema = {
    "type": "object",
    "maxProperties": MOST_PAIRS,
    "propertyNames": {"maxLength": MOST_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MOST_VALUE_CHARS},
}
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": object_of(
                    {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "JSON lines, each with custom_id, method, url and body.",
                        },
                        "purpose": {"enum": [PURPOSE]},
                    },
                    *("file", "purpose"),
                )
                | {"additionalProperties": False}
            }
        },
    }
}


def file_schema() -> Schema:
    """Return OpenAI's file object."""
    texts = {name: TEXT for name in ("id", "filename")}
    return object_of(
        texts
        | {
            "object": {"const": "file"},
            "bytes": COUNT,
            "created_at": COUNT,
            "expires_at": NULL,
            "purpose": {"enum": list(PURPOSES)},
            "status": {"const": "processed"},
            "status_details": NULL,
        },
        *("id", "object", "bytes", "created_at", "filename", "purpose"),
    )


def deleted_schema() -> Schema:
    """Return what a deleted file leaves."""
    return object_of(
        {"id": TEXT, "object": {"const": "file"}, "deleted": SWITCH}, "id", "object", "deleted"
    )


def list_schema(items: Schema) -> Schema:
    """Return a page of a list."""
    return object_of(
        {
            "object": {"const": "list"},
            "data": list_of(items),
            "first_id": allow_null(TEXT),
            "last_id": allow_null(TEXT),
            "has_more": SWITCH,
        },
        *("object", "data", "has_more"),
    )


def batch_request_schema() -> Schema:
    """Return the body of `POST /v1/batches`."""
    window = as_it_is(TEXT | {"pattern": f"^{WINDOW_FORM}$"})
    endpoint = as_it_is({"enum": list(ENDPOINTS)})
    until = "Lines that are not answered by then get an error: 24h, 90m, 7d; up to 366 days."
    fields = (
        Field("input_file_id", as_it_is(TEXT), "A file with purpose batch.", is_required=True),
        Field("endpoint", endpoint, "The url of its lines.", is_required=True),
        Field("completion_window", window, until, is_required=True),
        Field("metadata", as_it_is(METADATA), "Pairs of strings, which come back."),
    )
    return describe_fields("A file to answer.", fields, None, EXAMPLE, is_strict=True)


def batch_schema() -> Schema:
    """Return OpenAI's batch object."""
    error = object_of(
        {"code": TEXT, "message": TEXT, "param": allow_null(TEXT), "line": allow_null(COUNT)}
    )
    counts = ("total", "completed", "failed")
    usage = ("input_tokens", "output_tokens", "total_tokens")
    texts = ("id", "model", "input_file_id", "completion_window")
    return object_of(
        {name: TEXT for name in texts}
        | {
            "object": {"const": "batch"},
            "endpoint": {"enum": list(ENDPOINTS)},
            "errors": allow_null(object_of({"object": {"const": "list"}, "data": list_of(error)})),
            "status": {"enum": list(get_args(BatchStatus))},
            "output_file_id": allow_null(TEXT),
            "error_file_id": allow_null(TEXT),
            "created_at": COUNT,
        }
        | {name: allow_null(COUNT) for name in TIMES}
        | {
            "request_counts": object_of({name: COUNT for name in counts}, *counts),
            "usage": object_of(
                {name: COUNT for name in usage}
                | {
                    "input_tokens_details": object_of({"cached_tokens": COUNT}),
                    "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
                },
                *usage,
            ),
            "metadata": allow_null(METADATA),
        },
        *("id", "object", "endpoint", "status", "created_at", "request_counts"),
    )


def describe_content(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that sends a file."""
    schema = {"type": "string", "format": "binary"}
    error = {JSON: {"schema": error_schema()}}
    return {
        200: {"description": "The bytes.", "content": {media_type: {"schema": schema}}},
        **{n: {"description": ERRORS[n], "content": error} for n in (401, 404, 410)},
    }

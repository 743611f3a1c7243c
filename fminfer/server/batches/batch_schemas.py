"""The JSON Schemas of files and batches."""

from __future__ import annotations

from typing import Any, get_args

from fminfer.contract.fields import (
    NULL,
    SWITCH,
    TEXT,
    Schema,
    allow_null,
    list_of,
    object_of,
    whole,
)
from fminfer.server.answer_schemas import COUNT, error_schema, extend
from fminfer.server.batches.batch_request import (
    ANCHORS,
    ENDPOINTS,
    EXAMPLE,
    FIELDS,
    METADATA,
    SECONDS,
)
from fminfer.server.batches.stored_batches import TIMES, BatchStatus
from fminfer.server.batches.stored_files import PURPOSES
from fminfer.server.batches.upload import PURPOSE
from fminfer.server.http_errors import JSON
from fminfer.server.schemas import ERRORS, describe_fields

BYTES: Schema = {"type": "string", "format": "binary"}
LINES = BYTES | {"description": "JSON lines, each with custom_id, method, url and body."}
LIFE = SECONDS | {"description": "Life of the file. Without it, the file stays."}
UPLOAD = extend(
    whole(file=LINES, purpose={"enum": [PURPOSE]}),
    {"expires_after[anchor]": ANCHORS, "expires_after[seconds]": LIFE},
) | {"additionalProperties": False}
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
}


def file_schema() -> Schema:
    """Return OpenAI's file object."""
    purposes: Schema = {"enum": list(PURPOSES)}
    found = whole(id=TEXT, object={"const": "file"}, bytes=COUNT, created_at=COUNT, filename=TEXT)
    times = {"expires_at": allow_null(COUNT)}
    return extend(
        found,
        times | {"purpose": purposes, "status": {"const": "processed"}, "status_details": NULL},
    )


def deleted_schema() -> Schema:
    """Return what a deleted file leaves."""
    return whole(id=TEXT, object={"const": "file"}, deleted=SWITCH)


def list_schema(items: Schema) -> Schema:
    """Return a page of a list."""
    found = whole(object={"const": "list"}, data=list_of(items), has_more=SWITCH)
    return extend(found, {"first_id": allow_null(TEXT), "last_id": allow_null(TEXT)})


def batch_request_schema() -> Schema:
    """Return the body of `POST /v1/batches`."""
    return describe_fields("A file to answer.", FIELDS, None, EXAMPLE, is_strict=True)


def batch_schema() -> Schema:
    """Return OpenAI's batch object."""
    texts = {"code": TEXT, "message": TEXT}
    error = object_of(texts | {"param": allow_null(TEXT), "line": allow_null(COUNT)})
    usage = extend(
        whole(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
        {
            "input_tokens_details": object_of({"cached_tokens": COUNT}),
            "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
        },
    )
    found = whole(
        id=TEXT,
        object={"const": "batch"},
        endpoint={"enum": list(ENDPOINTS)},
        status={"enum": list(get_args(BatchStatus))},
        created_at=COUNT,
        request_counts=whole(total=COUNT, completed=COUNT, failed=COUNT),
    )
    others = dict.fromkeys(("model", "input_file_id", "completion_window"), TEXT)
    others |= dict.fromkeys(("output_file_id", "error_file_id"), allow_null(TEXT))
    others |= dict.fromkeys(TIMES, allow_null(COUNT)) | {"metadata": allow_null(METADATA)}
    errors = object_of({"object": {"const": "list"}, "data": list_of(error)})
    return extend(found, others | {"errors": allow_null(errors), "usage": usage})


def describe_content(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that sends a file."""
    error = {JSON: {"schema": error_schema()}}
    return {
        200: {"description": "The bytes.", "content": {media_type: {"schema": BYTES}}},
        **{n: {"description": ERRORS[n], "content": error} for n in (401, 403, 404, 410)},
    }

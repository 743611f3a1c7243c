"""`/v1/files` and `/v1/batches`: upload, create, list, look at, fetch, cancel and delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from fminfer.contract.endpoints import URLS
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
from fminfer.contract.vectors import check_model
from fminfer.server.batch_service import BatchService
from fminfer.server.batches.batch_request import (
    ANCHORS,
    ENDPOINTS,
    EXAMPLE,
    FIELDS,
    METADATA,
    PURPOSE,
    SECONDS,
    parse_batch,
)
from fminfer.server.batches.stored_batches import TIMES, BatchStatus, StoredBatch
from fminfer.server.batches.stored_files import PURPOSES, ServerFile
from fminfer.server.http_errors import HttpError
from fminfer.server.request_bodies import take_upload
from fminfer.server.schemas import COUNT, describe_fields, document, extend, take_body
from fminfer.server.service import Service, respond_json

BYTES: Schema = {"type": "string", "format": "binary"}
UPLOAD = extend(
    whole(
        file=BYTES
        | {"description": "JSON lines, each with custom_id, method, url and body."},
        purpose={"enum": [PURPOSE]},
    ),
    **{
        "expires_after[anchor]": ANCHORS,
        "expires_after[seconds]": SECONDS
        | {"description": "Life of the file. Without it, the file stays."},
    },
) | {"additionalProperties": False}
FILE = extend(
    whole(
        id=TEXT, object={"const": "file"}, bytes=COUNT, created_at=COUNT, filename=TEXT
    ),
    expires_at=allow_null(COUNT),
    purpose={"enum": list(PURPOSES)},
    status={"const": "processed"},
    status_details=NULL,
)
DELETED = whole(id=TEXT, object={"const": "file"}, deleted=SWITCH)
ERROR_OF_BATCH = object_of(
    {
        "code": TEXT,
        "message": TEXT,
        "param": allow_null(TEXT),
        "line": allow_null(COUNT),
    }
)
USAGE = extend(
    whole(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
    input_tokens_details=object_of({"cached_tokens": COUNT}),
    output_tokens_details=object_of({"reasoning_tokens": COUNT}),
)
BATCH = extend(
    whole(
        id=TEXT,
        object={"const": "batch"},
        endpoint={"enum": list(ENDPOINTS)},
        status={"enum": list(get_args(BatchStatus))},
        created_at=COUNT,
        request_counts=whole(total=COUNT, completed=COUNT, failed=COUNT),
    ),
    **dict.fromkeys(("model", "input_file_id", "completion_window"), TEXT),
    **dict.fromkeys(("output_file_id", "error_file_id"), allow_null(TEXT)),
    **dict.fromkeys(TIMES, allow_null(COUNT)),
    metadata=allow_null(METADATA),
    errors=allow_null(
        object_of({"object": {"const": "list"}, "data": list_of(ERROR_OF_BATCH)})
    ),
    usage=USAGE,
)


def page_of(items: Schema) -> Schema:
    """Return the schema of a page of a list."""
    found = whole(object={"const": "list"}, data=list_of(items), has_more=SWITCH)
    return extend(found, first_id=allow_null(TEXT), last_id=allow_null(TEXT))


PAGE = 20
MOST_BATCHES = 100  # of a page
MOST_FILES = 10_000  # of a page
OCTETS = "application/octet-stream"
HEADERS = {"Content-Disposition": "attachment"}


class _Download(FileResponse):
    """Sends a file, which its owner may delete between the look and the opening."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except RuntimeError as error:  # starlette's, before anything is sent
            raise HttpError(
                410, "the file was removed while it was asked for", code="file_removed"
            ) from error


def file_routes(given: BatchService | None) -> APIRouter:
    """Return the routes of files; None: the server keeps nothing."""
    router = APIRouter(tags=["Files"])

    @router.post(
        "/v1/files",
        **document(FILE, "The file.", errors=[400, 401, 404, 408, 413, 507])
        | take_body(UPLOAD, "multipart/form-data"),
    )
    async def upload(request: Request) -> Response:
        """Upload a file of requests."""
        batches, owner = _require(given, request)
        found = await take_upload(request, batches.uploads, batches.settings)
        stored = await asyncio.to_thread(batches.keep_upload, found, owner)
        return respond_json(stored.to_object())

    @router.get(
        "/v1/files",
        **document(page_of(FILE), "A page of files.", errors=[400, 401, 404]),
    )
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List files."""
        batches, owner = _require(given, request)
        files = batches.files.of(owner, after)
        files = [
            each
            for each in files
            if purpose in (None, each.purpose) or each.id == after
        ]
        return _send_page(
            batches, files if order == "desc" else files[::-1], after, limit
        )

    @router.get("/v1/files/{file_id}", **document(FILE, "The file.", errors=[401, 404]))
    async def get_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        batches, owner = _require(given, request)
        return respond_json(batches.find_file(file_id, owner).to_object())

    @router.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        **document(BYTES, "The bytes.", errors=[401, 404, 410], media_type=OCTETS),
    )
    async def content(request: Request, file_id: str) -> Response:
        """Return the bytes of a file."""
        batches, owner = _require(given, request)
        return _Download(
            batches.find_bytes(file_id, owner), media_type=OCTETS, headers=HEADERS
        )

    @router.delete(
        "/v1/files/{file_id}",
        **document(DELETED, "It is deleted.", errors=[401, 404, 409, 507]),
    )
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        batches, owner = _require(given, request)
        await asyncio.to_thread(batches.delete_file, file_id, owner)
        return respond_json({"id": file_id, "object": "file", "deleted": True})

    return router


def batch_routes(service: Service, given: BatchService | None) -> APIRouter:
    """Return the routes of batches; None: the server keeps nothing."""
    router = APIRouter(tags=["Batches"])

    @router.post(
        "/v1/batches",
        **document(
            BATCH,
            "The batch.",
            body=describe_fields(
                "A file to answer.", FIELDS, None, EXAMPLE, is_strict=True
            ),
            errors=[400, 401, 404, 408, 413, 429, 507],
        ),
    )
    async def create(request: Request) -> Response:
        """Answer the requests of a file."""
        batches, owner = _require(given, request)
        wish = parse_batch(await service.bodies.read(request))
        check_model(URLS[wish.endpoint], service.engine.intake.limits.vectors)
        batch = await asyncio.to_thread(batches.create_batch, wish, owner)
        return respond_json(batches.describe(batch))

    @router.get(
        "/v1/batches",
        **document(page_of(BATCH), "A page of batches.", errors=[400, 401, 404]),
    )
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_BATCHES)] = PAGE,
    ) -> Response:
        """List batches, the newest first."""
        batches, owner = _require(given, request)
        return _send_page(batches, batches.batches.of(owner), after, limit)

    @router.get(
        "/v1/batches/{batch_id}", **document(BATCH, "The batch.", errors=[401, 404])
    )
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Tell how a batch stands."""
        batches, owner = _require(given, request)
        return respond_json(batches.describe(batches.find_batch(batch_id, owner)))

    @router.post(
        "/v1/batches/{batch_id}/cancel",
        **document(BATCH, "The batch.", errors=[401, 404, 409, 507]),
    )
    async def cancel(request: Request, batch_id: str) -> Response:
        """End a batch; what is finished becomes its output."""
        batches, owner = _require(given, request)
        batch = await asyncio.to_thread(batches.cancel_batch, batch_id, owner)
        return respond_json(batches.describe(batch))

    return router


def _send_page(
    batches: BatchService,
    items: Sequence[ServerFile | StoredBatch],
    after: str | None,
    limit: int,
) -> Response:
    """Send the items behind the one of an id, as OpenAI's API lists them."""
    places = dict[str | None, int]({None: 0})
    places |= {each.id: place for place, each in enumerate(items, 1)}
    if after not in places:
        raise HttpError(
            400,
            "after is no id in this list; give the last_id of the page before, or leave it out",
            param="after",
        )
    end = places[after] + limit
    page = items[places[after] : end]
    return respond_json(
        {
            "object": "list",
            "data": [batches.describe(each) for each in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(items) > end,
        }
    )


def _require(
    batches: BatchService | None, request: Request
) -> tuple[BatchService, str]:
    """Return what serves files and batches, and whose a request is."""
    if batches is None:
        raise HttpError(
            404,
            "this server keeps no files and batches; start it with --state FOLDER",
            code="no_state_folder",
        )
    return batches, batches.owner_of(request)

"""`/v1/files` and `/v1/batches`: upload, create, list, look at, fetch, cancel and delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

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
from fminfer.server.answer_schemas import COUNT, error_schema, extend
from fminfer.server.batches.batch_request import (
    ANCHORS,
    ENDPOINTS,
    EXAMPLE,
    FIELDS,
    METADATA,
    SECONDS,
    parse_batch,
)
from fminfer.server.batches.desk import BatchService
from fminfer.server.batches.stored_batches import TIMES, BatchStatus, StoredBatch
from fminfer.server.batches.stored_files import PURPOSES, ServerFile
from fminfer.server.batches.upload import PURPOSE, take_upload
from fminfer.server.http_errors import JSON, HttpError
from fminfer.server.openai_routes import respond_json
from fminfer.server.schemas import ERRORS, describe_fields, document
from fminfer.server.service import Service

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


PAGE, MOST_BATCHES = 20, 100  # of a page
MOST_FILES = 10_000  # of a page
OCTETS = "application/octet-stream"
HEADERS = {"Content-Disposition": "attachment"}


class _Download(FileResponse):
    """Sends a file, which its owner may delete between the look and the opening."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except RuntimeError as error:  # starlette's, before anything is sent
            message = "the file was removed while it was asked for"
            raise HttpError(410, message, code="file_removed") from error


def file_routes(desk: BatchService | None) -> APIRouter:
    """Return the routes of files; None: the server keeps nothing."""
    router = APIRouter(tags=["Files"])
    one = file_schema()

    @router.post(
        "/v1/files",
        **document(one, "The file.", errors=[400, 401, 404, 408, 413, 507])
        | {"openapi_extra": UPLOAD_BODY},
    )
    async def upload(request: Request) -> Response:
        """Upload a file of requests."""
        shop = _require(desk)
        owner = shop.owner_of(request)
        found = await take_upload(request, shop.uploads, shop.max_upload_bytes)
        stored = await asyncio.to_thread(shop.keep_upload, found, owner)
        return respond_json(stored.to_object())

    @router.get(
        "/v1/files", **document(list_schema(one), "A page of files.", errors=[400, 401, 404])
    )
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List files."""
        shop = _require(desk)
        files = shop.files.of(shop.owner_of(request), after)
        files = [each for each in files if purpose in (None, each.purpose) or each.id == after]
        return _send_page(shop, files if order == "desc" else files[::-1], after, limit)

    @router.get("/v1/files/{file_id}", **document(one, "The file.", errors=[401, 404]))
    async def get_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        shop = _require(desk)
        return respond_json(shop.find_file(file_id, shop.owner_of(request)).to_object())

    @router.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        responses=describe_content(OCTETS),
    )
    async def content(request: Request, file_id: str) -> Response:
        """Return the bytes of a file."""
        shop = _require(desk)
        path = shop.find_bytes(file_id, shop.owner_of(request))
        return _Download(path, media_type=OCTETS, headers=HEADERS)

    @router.delete(
        "/v1/files/{file_id}",
        **document(deleted_schema(), "It is deleted.", errors=[401, 404, 409, 507]),
    )
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        shop = _require(desk)
        await asyncio.to_thread(shop.delete_file, file_id, shop.owner_of(request))
        return respond_json({"id": file_id, "object": "file", "deleted": True})

    return router


def batch_routes(service: Service, desk: BatchService | None) -> APIRouter:
    """Return the routes of batches; no desk: the server keeps nothing."""
    router = APIRouter(tags=["Batches"])
    one = batch_schema()

    @router.post(
        "/v1/batches",
        **document(
            one,
            "The batch.",
            body=batch_request_schema(),
            errors=[400, 401, 404, 408, 413, 429, 507],
        ),
    )
    async def create(request: Request) -> Response:
        """Answer the requests of a file."""
        shop = _require(desk)
        wish = parse_batch(await service.read(request))
        check_model(URLS[wish.endpoint], service.engine.intake.limits.vectors)
        batch = await asyncio.to_thread(shop.create_batch, wish, shop.owner_of(request))
        return respond_json(shop.describe(batch))

    @router.get(
        "/v1/batches", **document(list_schema(one), "A page of batches.", errors=[400, 401, 404])
    )
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_BATCHES)] = PAGE,
    ) -> Response:
        """List batches, the newest first."""
        shop = _require(desk)
        return _send_page(shop, shop.batches.of(shop.owner_of(request)), after, limit)

    @router.get("/v1/batches/{batch_id}", **document(one, "The batch.", errors=[401, 404]))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Tell how a batch stands."""
        shop = _require(desk)
        return respond_json(shop.describe(shop.find_batch(batch_id, shop.owner_of(request))))

    @router.post(
        "/v1/batches/{batch_id}/cancel",
        **document(one, "The batch.", errors=[401, 404, 409, 507]),
    )
    async def cancel(request: Request, batch_id: str) -> Response:
        """End a batch; what is finished becomes its output."""
        shop = _require(desk)
        owner = shop.owner_of(request)
        batch = await asyncio.to_thread(shop.cancel_batch, batch_id, owner)
        return respond_json(shop.describe(batch))

    return router


def _send_page(
    shop: BatchService, items: Sequence[ServerFile | StoredBatch], after: str | None, limit: int
) -> Response:
    """Send the items behind the one of an id, as OpenAI's API lists them.

    Raises:
        HttpError: none has that id.
    """
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
            "data": [shop.describe(each) for each in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(items) > end,
        }
    )


def _require(desk: BatchService | None) -> BatchService:
    """Return what serves files and batches.

    Raises:
        HttpError: the server was started without a folder for them.
    """
    if desk is None:
        raise HttpError(
            404,
            "this server keeps no files and batches; start it with --state FOLDER",
            code="no_state_folder",
        )
    return desk

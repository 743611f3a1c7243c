"""`/v1/files`: upload, list, fetch and delete files."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from fminfer.server.batches.batch_schemas import (
    UPLOAD_BODY,
    deleted_schema,
    describe_content,
    file_schema,
    list_schema,
)
from fminfer.server.batches.desk import Desk
from fminfer.server.batches.listing import as_list, page_of
from fminfer.server.batches.no_state import require
from fminfer.server.batches.upload import take_upload
from fminfer.server.openai_routes import respond_json
from fminfer.server.schemas import document

MOST_FILES = 10_000  # of a page
OCTETS = "application/octet-stream"
HEADERS = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}


def file_routes(desk: Desk | None) -> APIRouter:
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
        shop = require(desk)
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
        shop = require(desk)
        files = shop.files.of(shop.owner_of(request))
        files = [each for each in files if purpose in (None, each.purpose)]
        page, has_more = page_of(files if order == "desc" else files[::-1], after, limit)
        return respond_json(as_list([each.to_object() for each in page], has_more=has_more))

    @router.get("/v1/files/{file_id}", **document(one, "The file.", errors=[401, 404]))
    async def get_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        shop = require(desk)
        return respond_json(shop.find_file(file_id, shop.owner_of(request)).to_object())

    @router.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        responses=describe_content(OCTETS),
    )
    async def content(request: Request, file_id: str) -> Response:
        """Return the bytes of a file."""
        shop = require(desk)
        path = shop.find_bytes(file_id, shop.owner_of(request))
        return FileResponse(path, media_type=OCTETS, headers=HEADERS)

    @router.delete(
        "/v1/files/{file_id}",
        **document(deleted_schema(), "It is deleted.", errors=[401, 404, 409, 507]),
    )
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        shop = require(desk)
        await asyncio.to_thread(shop.delete_file, file_id, shop.owner_of(request))
        return respond_json({"id": file_id, "object": "file", "deleted": True})

    return router

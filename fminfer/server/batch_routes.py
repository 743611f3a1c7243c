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
    make_full_object_schema,
    make_list_schema,
    make_object_schema,
)
from fminfer.contract.vectors import check_endpoint
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
from fminfer.server.request_bodies import receive_upload
from fminfer.server.schemas import (
    COUNT,
    document_body,
    document_route,
    extend_schema,
    make_fields_schema,
)
from fminfer.server.service import Service, make_json_response

BYTES: Schema = {"type": "string", "format": "binary"}
UPLOAD = extend_schema(
    make_full_object_schema(
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
FILE = extend_schema(
    make_full_object_schema(
        id=TEXT, object={"const": "file"}, bytes=COUNT, created_at=COUNT, filename=TEXT
    ),
    expires_at=allow_null(COUNT),
    purpose={"enum": list(PURPOSES)},
    status={"const": "processed"},
    status_details=NULL,
)
DELETED = make_full_object_schema(id=TEXT, object={"const": "file"}, deleted=SWITCH)
ERROR_OF_BATCH = make_object_schema(
    {
        "code": TEXT,
        "message": TEXT,
        "param": allow_null(TEXT),
        "line": allow_null(COUNT),
    }
)
USAGE = extend_schema(
    make_full_object_schema(
        input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT
    ),
    input_tokens_details=make_object_schema({"cached_tokens": COUNT}),
    output_tokens_details=make_object_schema({"reasoning_tokens": COUNT}),
)
BATCH = extend_schema(
    make_full_object_schema(
        id=TEXT,
        object={"const": "batch"},
        endpoint={"enum": list(ENDPOINTS)},
        status={"enum": list(get_args(BatchStatus))},
        created_at=COUNT,
        request_counts=make_full_object_schema(
            total=COUNT, completed=COUNT, failed=COUNT
        ),
    ),
    **dict.fromkeys(("model", "input_file_id", "completion_window"), TEXT),
    **dict.fromkeys(("output_file_id", "error_file_id"), allow_null(TEXT)),
    **dict.fromkeys(TIMES, allow_null(COUNT)),
    metadata=allow_null(METADATA),
    errors=allow_null(
        make_object_schema(
            {"object": {"const": "list"}, "data": make_list_schema(ERROR_OF_BATCH)}
        )
    ),
    usage=USAGE,
)


def make_page_schema(items: Schema) -> Schema:
    """Return the schema of a page of a list."""
    page = make_full_object_schema(
        object={"const": "list"}, data=make_list_schema(items), has_more=SWITCH
    )
    return extend_schema(page, first_id=allow_null(TEXT), last_id=allow_null(TEXT))


PAGE = 20
MOST_BATCHES = 100  # of a page
MOST_FILES = 10_000  # of a page
OCTETS = "application/octet-stream"
HEADERS = {"Content-Disposition": "attachment"}


class _Download(FileResponse):
    """Sends a file, which its owner may delete before it is opened."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except RuntimeError as error:  # starlette's, before anything is sent
            raise HttpError(
                410, "the file was removed while it was asked for", code="file_removed"
            ) from error


class _FileRoutes:
    """Answers requests for an owner's files. The names of its methods are operations' ids."""

    def __init__(self, batches: BatchService | None) -> None:
        self._batches = batches

    async def upload(self, request: Request) -> Response:
        """Upload a file of requests."""
        batches, owner = _require_batches(self._batches, request)
        upload = await receive_upload(request, batches.uploads, batches.settings)
        stored = await asyncio.to_thread(batches.add_upload, upload, owner)
        return make_json_response(stored.to_openai_object())

    async def list_files(
        self,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List files."""
        batches, owner = _require_batches(self._batches, request)
        files = [
            file
            for file in batches.files.list_of_owner(owner, after)
            if purpose in (None, file.purpose) or file.id == after
        ]
        if order == "asc":
            files.reverse()
        return _make_page_response(batches, files, after, limit)

    async def get_file(self, request: Request, file_id: str) -> Response:
        """Describe a file."""
        batches, owner = _require_batches(self._batches, request)
        stored = batches.require_file(file_id, owner)
        return make_json_response(stored.to_openai_object())

    async def content(self, request: Request, file_id: str) -> Response:
        """Return the bytes of a file."""
        batches, owner = _require_batches(self._batches, request)
        path = batches.require_bytes(file_id, owner)
        return _Download(path, media_type=OCTETS, headers=HEADERS)

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file."""
        batches, owner = _require_batches(self._batches, request)
        await asyncio.to_thread(batches.delete_file, file_id, owner)
        return make_json_response({"id": file_id, "object": "file", "deleted": True})


def make_file_routes(batches: BatchService | None) -> APIRouter:
    """Return the routes of files; None: the server keeps nothing."""
    router = APIRouter(tags=["Files"])
    routes = _FileRoutes(batches)
    router.post(
        "/v1/files",
        **document_route(FILE, "The file.", errors=[400, 401, 404, 408, 413, 507])
        | document_body(UPLOAD, "multipart/form-data"),
    )(routes.upload)
    router.get(
        "/v1/files",
        **document_route(
            make_page_schema(FILE), "A page of files.", errors=[400, 401, 404]
        ),
    )(routes.list_files)
    router.get(
        "/v1/files/{file_id}", **document_route(FILE, "The file.", errors=[401, 404])
    )(routes.get_file)
    router.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        **document_route(
            BYTES, "The bytes.", errors=[401, 404, 410], media_type=OCTETS
        ),
    )(routes.content)
    router.delete(
        "/v1/files/{file_id}",
        **document_route(DELETED, "It is deleted.", errors=[401, 404, 409, 507]),
    )(routes.delete)
    return router


class _BatchRoutes:
    """Answers requests for an owner's batches. The names of its methods are operations' ids."""

    def __init__(self, service: Service, batches: BatchService | None) -> None:
        self._service = service
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """Answer the requests of a file."""
        batches, owner = _require_batches(self._batches, request)
        batch_request = parse_batch(await self._service.bodies.read(request))
        if not self._service.url_elsewhere:
            vectors = self._service.engine.intake.limits.vectors
            check_endpoint(URLS[batch_request.endpoint], vectors)
        batch = await asyncio.to_thread(batches.create_batch, batch_request, owner)
        return make_json_response(batches.describe(batch))

    async def list_batches(
        self,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_BATCHES)] = PAGE,
    ) -> Response:
        """List batches, the newest first."""
        batches, owner = _require_batches(self._batches, request)
        owned = batches.batches.list_of_owner(owner)
        return _make_page_response(batches, owned, after, limit)

    async def get_batch(self, request: Request, batch_id: str) -> Response:
        """Tell how a batch stands."""
        batches, owner = _require_batches(self._batches, request)
        batch = batches.require_batch(batch_id, owner)
        return make_json_response(batches.describe(batch))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch; what is finished becomes its output."""
        batches, owner = _require_batches(self._batches, request)
        batch = await asyncio.to_thread(batches.cancel_batch, batch_id, owner)
        return make_json_response(batches.describe(batch))


def make_batch_routes(service: Service, batches: BatchService | None) -> APIRouter:
    """Return the routes of batches; None: the server keeps nothing."""
    router = APIRouter(tags=["Batches"])
    routes = _BatchRoutes(service, batches)
    router.post(
        "/v1/batches",
        **document_route(
            BATCH,
            "The batch.",
            body=make_fields_schema(
                "A file to answer.", FIELDS, None, EXAMPLE, is_strict=True
            ),
            errors=[400, 401, 404, 408, 413, 429, 507],
        ),
    )(routes.create)
    router.get(
        "/v1/batches",
        **document_route(
            make_page_schema(BATCH), "A page of batches.", errors=[400, 401, 404]
        ),
    )(routes.list_batches)
    router.get(
        "/v1/batches/{batch_id}",
        **document_route(BATCH, "The batch.", errors=[401, 404]),
    )(routes.get_batch)
    router.post(
        "/v1/batches/{batch_id}/cancel",
        **document_route(BATCH, "The batch.", errors=[401, 404, 409, 507]),
    )(routes.cancel)
    return router


def _make_page_response(
    batches: BatchService,
    items: Sequence[ServerFile | StoredBatch],
    after: str | None,
    limit: int,
) -> Response:
    """Return the items behind the one of an id, as OpenAI's API lists them."""
    starts = dict[str | None, int]({None: 0})
    starts |= {item.id: start for start, item in enumerate(items, 1)}
    if after not in starts:
        raise HttpError(
            400,
            "after is no id in this list; give the last_id of the page before, or leave it out",
            param="after",
        )
    end = starts[after] + limit
    page = items[starts[after] : end]
    return make_json_response(
        {
            "object": "list",
            "data": [batches.describe(item) for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(items) > end,
        }
    )


def _require_batches(
    batches: BatchService | None, request: Request
) -> tuple[BatchService, str]:
    """Return the service of files and batches, and the owner who sends a request."""
    if batches is None:
        raise HttpError(
            404,
            "this server keeps no files and batches; start it with --state FOLDER",
            code="no_state_folder",
        )
    return batches, batches.owner_of(request)

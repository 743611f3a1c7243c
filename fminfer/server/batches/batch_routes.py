"""`/v1/batches`: create, list, look at and cancel batches."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from fminfer.server.batches.batch_request import parse_batch
from fminfer.server.batches.batch_schemas import batch_request_schema, batch_schema, list_schema
from fminfer.server.batches.desk import Desk
from fminfer.server.batches.listing import as_list, page_of
from fminfer.server.batches.no_state import require
from fminfer.server.openai_routes import respond_json
from fminfer.server.schemas import document
from fminfer.server.service import Service

PAGE, MOST_BATCHES = 20, 100  # of a page


def batch_routes(service: Service, desk: Desk | None) -> APIRouter:
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
        shop = require(desk)
        wish = parse_batch(await service.read(request))
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
        shop = require(desk)
        page, has_more = page_of(shop.batches.of(shop.owner_of(request)), after, limit)
        return respond_json(as_list([shop.describe(each) for each in page], has_more=has_more))

    @router.get("/v1/batches/{batch_id}", **document(one, "The batch.", errors=[401, 404]))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Tell how a batch stands."""
        shop = require(desk)
        return respond_json(shop.describe(shop.find_batch(batch_id, shop.owner_of(request))))

    @router.post(
        "/v1/batches/{batch_id}/cancel",
        **document(one, "The batch.", errors=[401, 404, 409, 507]),
    )
    async def cancel(request: Request, batch_id: str) -> Response:
        """End a batch; what is finished becomes its output."""
        shop = require(desk)
        owner = shop.owner_of(request)
        batch = await asyncio.to_thread(shop.cancel_batch, batch_id, owner)
        return respond_json(shop.describe(batch))

    return router

"""Reads a request's body within limits, and the JSON object in it."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from fminfer.contract.json_object import load_object
from fminfer.core.errors import RequestError
from fminfer.core.quantities import show_bytes
from fminfer.server.http_errors import HttpError, as_http

READ_S = 60.0  # for a whole body
MOST_DISCARDED = 64 * 2**20  # bytes of a body beyond the limit, so that its client hears of it


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object that a request's body holds.

    Raises:
        HttpError: the body is too large, too slow, or no JSON object.
    """
    body = await read_body(request, max_bytes)
    try:
        return load_object(body.strip(), "the body")
    except RequestError as error:
        raise as_http(error) from None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return a request's body.

    Raises:
        HttpError: it has more than `max_bytes`, or it does not come.
    """
    try:
        return await asyncio.wait_for(_read(request, max_bytes), READ_S)
    except asyncio.TimeoutError:
        raise HttpError(
            408,
            f"the body did not come within {READ_S:g} s; send it without pauses",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise HttpError(400, "the client left before its body was there") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    announced = request.headers.get("content-length", "")
    is_large = announced.isdecimal() and int(announced) > max_bytes
    async for piece in request.stream():
        num_bytes += len(piece)
        is_large = is_large or num_bytes > max_bytes
        if is_large:
            pieces.clear()
        else:
            pieces.append(piece)
        if num_bytes > max_bytes + MOST_DISCARDED:
            break
    if num_bytes > max_bytes:
        raise HttpError(
            413,
            f"the body has {show_bytes(num_bytes)}, and {show_bytes(max_bytes)} are allowed "
            "(--max-body-size); send fewer or shorter prompts",
            code="body_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(pieces)

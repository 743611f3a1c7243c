"""Reads requests' bodies within limits, and the JSON object in each."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from fminfer.contract.json_object import load_object
from fminfer.core.quantities import show_bytes
from fminfer.files.line_reader import UTF8_BOM
from fminfer.server.http_errors import HttpError

READ_S = 60.0  # for a whole body
MOST_DISCARDED = 64 * 2**20  # bytes of a body beyond the limit, so that its client hears of it
SMALL_BYTES = 2**16  # of each body, for which there is always room
MOST_AT_ONCE = 16  # bodies of the largest size that may be coming


class BodyReader:
    """Reads bodies in an event loop.

    Args:
        max_bytes: of one body. All that are coming have so much `MOST_AT_ONCE` times, beside
            `SMALL_BYTES` of each.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_held = 0  # bytes that count

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Return the JSON object that a request's body holds.

        Raises:
            HttpError: the body is too large or too slow.
            RequestError: it is no JSON object.
        """
        body = await self._read_in_time(request)
        return load_object(body.removeprefix(UTF8_BOM).strip(), "the body")

    async def _read_in_time(self, request: Request) -> bytes:
        try:
            return await asyncio.wait_for(self._read(request), READ_S)
        except asyncio.TimeoutError:
            raise HttpError(
                408,
                f"the body did not come within {READ_S:g} s; send it without pauses",
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise HttpError(400, "the client left before its body was there") from None

    async def _read(self, request: Request) -> bytes:
        pieces: list[bytes] = []
        num_bytes = num_held = 0
        announced = request.headers.get("content-length", "")
        is_large = announced.isdecimal() and int(announced) > self._max_bytes
        try:
            async for piece in request.stream():
                num_bytes += len(piece)
                is_large = is_large or num_bytes > self._max_bytes
                if is_large:
                    pieces.clear()
                else:
                    pieces.append(piece)
                    num_more = max(0, num_bytes - SMALL_BYTES) - num_held
                    self._hold(num_more)
                    num_held += num_more
                if num_bytes > self._max_bytes + MOST_DISCARDED:
                    break
        finally:
            self._num_held -= num_held
        if num_bytes > self._max_bytes:
            raise HttpError(
                413,
                f"the body has {num_bytes:,} bytes, and {self._max_bytes:,} are allowed "
                "(--max-body-size); send fewer or shorter prompts",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        return b"".join(pieces)

    def _hold(self, num_bytes: int) -> None:
        """Count bytes of a body that is coming.

        Raises:
            HttpError: there is no room for them.
        """
        most = MOST_AT_ONCE * self._max_bytes
        if self._num_held + num_bytes > most:
            raise HttpError(
                429,
                f"the bodies that are coming have more than {show_bytes(most)} together; try again "
                f"in a second, or send a body of at most {show_bytes(SMALL_BYTES)}",
                code="too_many_bodies",
                headers={"Connection": "close", "Retry-After": "1"},
            )
        self._num_held += num_bytes

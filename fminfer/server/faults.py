"""Faults of ours in a route: each is told once, and its request gets an error."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fminfer.server.http_errors import HttpError, respond
from fminfer.server.metrics import Metrics
from fminfer.server.server_log import ServerLog


class Faults:
    """ASGI middleware: behind the doors, so that the error has what every response has."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, log: ServerLog) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def send_noted(message: Message) -> Awaitable[None]:  # a coroutine less for each token
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if has_begun:
                raise  # the connection is closed, and uvicorn tells why
            text = "".join(traceback.format_exception(error))
            request_id = Request(scope).state.request_id
            self._log.error(f"Request {request_id} failed by a fault of fminfer:\n{text}")
            self._metrics.count_refused(500)
            message = f"fminfer failed on this request ({type(error).__name__}); please report it"
            answer = respond(HttpError(500, message, code="internal_error"))
            await answer(scope, receive, send)

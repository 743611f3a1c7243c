"""What each request passes before its route: its name, where it comes from, and its key."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fminfer.server.http_errors import HttpError, respond

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Static pages and the state of health, which a load balancer asks for, are open to all.
OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json", "/favicon.ico"})
ELSEWHERE = ("cross-site", "same-site")
OPEN_FOLDERS = ("/page/", "/docs/")


class Doors:
    """ASGI middleware: names each request, and refuses those without a key.

    Args:
        api_keys: any of them opens; none: no key is asked for.
        allowed_origins: of pages elsewhere that may call; "*": any.
        log: is told of each response as it begins; None: nobody is.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Iterable[str],
        allowed_origins: Iterable[str],
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._app = app
        self._log = log
        self._keys = [key.encode() for key in api_keys]
        self._origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        def send_named(message: Message) -> Awaitable[None]:  # a coroutine less for each token
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if self._log is not None:
                    self._log(f"{_show(scope)} {message['status']} {request_id}")
            return send(message)

        error = self._refusal(scope, headers)
        if error is None:
            await self._app(scope, receive, send_named)
        else:
            await respond(error)(scope, receive, send_named)

    def _refusal(self, scope: Scope, headers: Headers) -> HttpError | None:
        """Return why a request must not pass, if it must not."""
        is_free = is_open(scope["method"], scope["path"])
        origin = headers.get("origin")
        if origin is None and not is_free and headers.get("sec-fetch-site") in ELSEWHERE:
            origin = "another site"  # a link or picture there, which a browser asks for without one
        if origin is not None and not self._is_own(origin, headers):
            return HttpError(
                403,
                f"the page that calls is of {origin}, which is another origin than this server's; "
                "start the server with --allow-origin to let it call",
                code="origin_not_allowed",
            )
        if not self._keys or is_free:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_key(key.strip()):
            return None
        found = "no key came" if not key else "the key that came is not this server's"
        return HttpError(
            401,
            f"{found}; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _is_key(self, given: str) -> bool:
        """Compare with each key, in a time that tells nothing of them."""
        found = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return any(found)

    def _is_own(self, origin: str, headers: Headers) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            return urlsplit(origin).netloc == headers.get("host")
        except ValueError:  # no address
            return False


def _show(scope: Scope) -> str:
    """Return who asks, and for what as it was sent, which is plain ASCII."""
    client = scope["client"][0] if scope.get("client") else "-"
    query = f"?{scope['query_string'].decode('ascii')}" if scope["query_string"] else ""
    return f"{client} {scope['method']} {scope['raw_path'].decode('ascii')}{query}"


def is_open(method: str, path: str) -> bool:
    """Tell whether a route computes nothing and tells nothing but that the server is there."""
    if method not in ("GET", "HEAD", "OPTIONS"):
        return False
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)

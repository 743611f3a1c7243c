"""What each request passes on its way to its route: a check of host, origin and key."""

from __future__ import annotations

import hmac
import re
import secrets
import traceback
from collections.abc import Awaitable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fminfer.contract.endpoints import remove_spare_slashes
from fminfer.contract.fields import describe_value
from fminfer.server.http_errors import HttpError, make_error_response
from fminfer.server.service import Service
from fminfer.server.settings import ServerSettings, is_loopback_name, parse_host

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# a target with its host
ABSOLUTE = re.compile(rb"[a-z][a-z0-9+.-]*://([^/]*)", re.IGNORECASE)
# Static pages and the state of health, which a load balancer asks for, are open to all.
OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json", "/favicon.ico"})
HOST = re.compile(r"(?i)^[a-z][a-z0-9+.-]*://[^/]*")  # of such a target, as text
ELSEWHERE = ("cross-site", "same-site")
WITH_SLASH = ("/run/", "/run_", "/docs/")  # where one at the end means something
MODELS = "/v1/models/"  # names that may be paths stand behind it
PROMPT_PATH = re.compile("/run(_[a-z_]*)?/")  # a text to complete stands behind it
OPEN_FOLDERS = ("/page/", "/docs/")


class AccessCheck:
    """ASGI middleware: names requests, refuses foreign hosts, sites and keys, logs faults."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, service: Service
    ) -> None:
        self._app = app
        self._log = service.log
        self._count_refused = service.metrics.count_refused
        self._bodies = service.bodies
        self._hosts = settings.hosts
        self._keep_alive = f"timeout={int(settings.keep_alive_s)}"
        self._keys = [key.encode() for key in settings.api_keys]
        self._origins = frozenset(settings.allowed_origins)
        self._inner: ASGIApp = self._answer_allowed
        if self._origins:  # it answers what browsers ask before they send a key
            self._inner = CORSMiddleware(
                self._answer_allowed,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
                # Chrome asks whether a public page may call a server of this machine.
                allow_private_network="*" not in self._origins,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        # a coroutine less for each token
        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                state["has_begun"] = True
                response = MutableHeaders(scope=message)
                response["x-request-id"] = request_id
                response["X-Content-Type-Options"] = "nosniff"
                if scope["http_version"] == "1.1" and not _is_closing(
                    Headers(scope=scope), response
                ):
                    response["Keep-Alive"] = self._keep_alive
                if message["status"] >= 400:
                    self._count_refused(message["status"])
                if self._log.is_shown("debug"):
                    self._log.write(
                        "debug",
                        f"{_describe_request(scope)} {message['status']} {request_id}",
                    )
            return send(message)

        hosts = headers.getlist("host")
        if (target := ABSOLUTE.match(scope["raw_path"])) is not None:
            # HTTP takes this one, and proxies may differ
            hosts.append(target[1].decode("latin-1"))
        foreign = [host for host in hosts if not self._is_known_host(host)]
        app = _respond_to_foreign_host(foreign[0]) if foreign else self._inner
        try:
            await app(_normalize_request(scope), receive, send_named)
        finally:
            self._bodies.release(state)

    def _is_known_host(self, host: str) -> bool:
        if self._hosts is None:
            return True
        if (parsed := parse_host(host)) is None:
            return False
        name, port = parsed
        ports = {"", port} if port else {"", "80", "443"}
        return is_loopback_name(name) or any(
            (name, port) in self._hosts for port in ports
        )

    async def _answer_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._access_error(scope, Headers(scope=scope))
        try:
            app = self._app if error is None else make_error_response(error)
            await app(scope, receive, send)
        except Exception as fault:
            if "has_begun" in scope["state"]:
                raise  # the connection is closed, and uvicorn tells why
            text = "".join(traceback.format_exception(fault))
            self._log.write(
                "error",
                f"Request {scope['state']['request_id']} failed by a fault of fminfer:\n{text}",
            )
            error = HttpError(
                500,
                f"fminfer failed on this request ({type(fault).__name__}); please report it",
                code="internal_error",
            )
            await make_error_response(error)(scope, receive, send)

    def _access_error(self, scope: Scope, headers: Headers) -> HttpError | None:
        """Return why a request must not pass, if it must not."""
        path = scope["path"]
        method = scope["method"]
        is_free = path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
        is_free = is_free and method in ("GET", "OPTIONS")
        remedy = "start the server with --allow-origin to let it call"
        origin = headers.get("origin")
        if (
            origin is None
            and not is_free
            and headers.get("sec-fetch-site") in ELSEWHERE
        ):
            # a link or picture there, which a browser asks for without one
            origin = "another site"
        is_browser = "accept-language" in headers and "Mozilla/" in headers.get(
            "user-agent", ""
        )
        if (
            origin is None
            and is_browser
            and "sec-fetch-site" not in headers
            and path[:4] == "/run"
        ):
            # as to [::ffff:127.0.0.1] and a LAN
            origin = "a site that its browser does not name"
            remedy = "call by localhost, 127.0.0.1 or https, to which browsers name it"
        if origin is not None and not self._is_allowed_origin(origin, headers):
            return HttpError(
                403,
                f"the page that calls is of {origin}, not of this server; {remedy}",
                code="origin_not_allowed",
            )
        coding = headers.get("content-encoding", "").strip().lower()
        if (
            self._keys
            and not is_free
            and (error := self._key_error(headers)) is not None
        ):
            return error
        if coding in ("", "identity"):
            return None
        return HttpError(
            415,
            f"the body is compressed (Content-Encoding: {coding}); send it uncompressed",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "identity"},
        )

    def _key_error(self, headers: Headers) -> HttpError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # compared with all, in a time that tells nothing of them
        sent_key = key.strip().encode()
        is_right = any([hmac.compare_digest(sent_key, each) for each in self._keys])
        if scheme.lower() == "bearer" and is_right:
            return None
        fault = "no key came" if not key else "the key that came is not this server's"
        return HttpError(
            401,
            f"{fault}; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _is_allowed_origin(self, origin: str, headers: Headers) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            host = urlsplit(origin).netloc
        except ValueError:  # no address
            return False
        return host != "" and host.lower() == headers.get("host", "").lower()


def _normalize_request(scope: Scope) -> Scope:
    """Return a request as routes are written: a HEAD as a GET, without extra slashes."""
    path = HOST.sub("", scope["path"]) or "/"
    if path.startswith(MODELS):
        path = path.removesuffix("/")
    elif not path.startswith(WITH_SLASH):
        path = remove_spare_slashes(path)
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": path}


def _respond_to_foreign_host(host: str) -> ASGIApp:
    return make_error_response(
        HttpError(
            403,
            f"the request was sent to the host {describe_value(host)}, which is not known to be "
            "this server; call it by localhost or 127.0.0.1, or start it with "
            "--allow-host and that name",
            code="host_not_allowed",
        )
    )


def _is_closing(*headers: Headers) -> bool:
    return any(
        "close" in value.lower()
        for each in headers
        for value in each.getlist("connection")
    )


def _describe_request(scope: Scope) -> str:
    """Return the client, method and path of a request, without text that may be a prompt."""
    client = scope["client"][0] if scope.get("client") else "-"
    prompt = PROMPT_PATH.search(scope["path"])
    path = f"{prompt[0]}…" if prompt else scope["raw_path"].decode("ascii")
    return f"{client} {scope['method']} {path}"

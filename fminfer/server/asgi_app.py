"""The ASGI application: routes, the errors they end with, and the doors before them."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import swagger_ui_bundle
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fminfer.core.errors import RequestError
from fminfer.core.version import __version__
from fminfer.server.batches.batch_routes import batch_routes, file_routes
from fminfer.server.batches.desk import BatchService
from fminfer.server.doors import AccessCheck
from fminfer.server.http_errors import HttpError, as_http, respond
from fminfer.server.metrics import Metrics
from fminfer.server.model_routes import model_routes
from fminfer.server.old_routes import old_routes
from fminfer.server.openai_routes import openai_routes
from fminfer.server.server_log import ServerLog
from fminfer.server.service import Service
from fminfer.server.settings import ServerSettings
from fminfer.server.vector_routes import vector_routes

_LINE = (
    "fminfer answers POST /v1/completions and /v1/chat/completions, or /v1/embeddings or /v1/score "
    "if its model gives vectors. "
    "/docs has the API, and / a page to try it in a browser.\n"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
# Our own script makes no markup of any text, and with this the browser would not let it.
_PAGE_POLICY = f"{_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    body: bytes
    policy: str

    def headers(self) -> dict[str, str]:
        return {
            "Content-Type": _TYPES[Path(self.name).suffix],
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",
            "Cache-Control": "no-cache",  # a browser asks each time, and the tag spares the bytes
            "ETag": f'"{hashlib.sha256(self.body).hexdigest()[:32]}"',
        }


def page_routes() -> APIRouter:
    """Return the routes of `/`, `/docs` and the files that they need.

    They tell nothing of the model, so they need no key; the page asks for it when a call does.
    """
    own = files("fminfer.server") / "page"
    swagger = Path(swagger_ui_bundle.swagger_ui_path)
    router = APIRouter()
    page = _File("index.html", (own / "index.html").read_bytes(), _PAGE_POLICY)
    router.add_route("/", _serve(page, other=_LINE), include_in_schema=False)
    for path, source in {
        "/page/page.css": own / "page.css",
        "/page/page.js": own / "page.js",
        "/docs": own / "docs.html",
        "/docs/docs.js": own / "docs.js",
        "/docs/docs.css": own / "docs.css",
        "/docs/swagger-ui.css": swagger / "swagger-ui.css",
        "/docs/swagger-ui-bundle.js": swagger / "swagger-ui-bundle.js",
    }.items():
        file = _File(source.name, source.read_bytes(), _POLICY)
        router.add_route(path, _serve(file), include_in_schema=False)
    # Not to /docs: only the browser knows the prefix of a proxy.
    to_docs = RedirectResponse("../docs")
    router.add_route("/docs/", lambda request: to_docs, include_in_schema=False)
    return router


def _serve(file: _File, *, other: str | None = None) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers GET and HEAD.

    Args:
        other: a line of text for those that do not accept HTML by name, as curl does not.
    """
    headers = file.headers() | ({} if other is None else {"Vary": "Accept"})

    async def answer(request: Request) -> Response:
        if other is not None and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(other, headers={"Vary": "Accept"})
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers)

    return answer


PARTS = 4  # that paths of ours have at most
# Paths of other APIs, by what to do instead.
ELSEWHERE = {
    "send messages to /v1/chat/completions": "responses|messages|conversations|assistants|threads|"
    "realtime|invocations|api/chat$",
    "send a prompt to /v1/completions": "engines|generate|generate_stream|completion|infill|"
    "api/generate",
    "send texts to /v1/embeddings": "embed|embedding|api/embed|api/embeddings|pooling",
    "send documents to /v1/rerank": "reranking",
    "this server answers texts with texts and vectors": "moderations|audio|images|videos|"
    "fine_tuning|vector_stores|evals|containers",
    "upload whole files to /v1/files": "uploads",
}


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


def make_app(
    service: Service, settings: ServerSettings, desk: BatchService | None = None
) -> FastAPI:
    """Return the application that serves an engine.

    Args:
        desk: serves files and batches; None: the server keeps none.
    """
    app = FastAPI(
        title="fminfer",
        version=__version__,
        description="Completions and chat with one model, in the form of the OpenAI API.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address of a proxy before it is not known
    )
    for routes in (openai_routes, vector_routes, model_routes, old_routes):
        app.include_router(routes(service))
    app.include_router(file_routes(desk))
    app.include_router(batch_routes(service, desk))
    app.include_router(page_routes())
    _add_errors(app, service)
    document = _describe(app, has_keys=bool(settings.api_keys))
    app.openapi = lambda: document  # type: ignore[method-assign]
    app.add_middleware(Faults, metrics=service.metrics, log=service.log)
    log = service.log.debug if service.log.tells("debug") else None
    app.add_middleware(AccessCheck, settings=settings, log=log, count=service.metrics.count_refused)
    return app


def _describe(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document: FastAPI's, without its own error, and with the key."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # it comes as a 400
            operation["summary"] = operation.pop("description", operation["summary"]).rstrip(".")
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    if has_keys:
        document["paths"]["/health"]["get"]["security"] = []  # it needs none
        scheme = {"type": "http", "scheme": "bearer"}
        document.setdefault("components", {})["securitySchemes"] = {"key": scheme}
        document["security"] = [{"key": []}]
    return document


def _add_errors(app: FastAPI, service: Service) -> None:
    """Give all errors OpenAI's shape."""

    @app.exception_handler(HttpError)
    async def on_error(request: Request, error: HttpError) -> Response:
        service.metrics.count_refused(error.status)
        return respond(error)

    @app.exception_handler(RequestError)
    async def on_refused(request: Request, error: RequestError) -> Response:
        return await on_error(request, as_http(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = "unknown_url" if error.status_code == 404 else None
        message = _explain(request, error)
        told = HttpError(error.status_code, message, code=code, headers=error.headers)
        return await on_error(request, told)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        message = f"{name}: {first['msg']}; it was {str(first.get('input'))[:60]!r}"
        return await on_error(request, HttpError(400, message, code="invalid_type", param=name))


def _explain(request: Request, error: HTTPException) -> str:
    path = request.url.path
    if error.status_code == 404:
        return f"there is no {path}; {_find_remedy(request, path)}/docs lists what there is"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} is not there for {request.method}; use {allowed}"
    return str(error.detail)


def _find_remedy(request: Request, path: str) -> str:
    """Return what to do instead, if the path is of another API or stands at another place."""
    for remedy, pattern in ELSEWHERE.items():
        if re.fullmatch(rf"/(v\d/)?({pattern})(/.*)?", path):
            return f"{remedy}. "
    parts = path.rsplit("/", PARTS)[1:]  # the last ones: a path may have thousands
    tails = ["/".join(parts[start:]) for start in range(len(parts))]
    places = [place for tail in tails for place in (f"/v1/{tail}", f"/{tail}")]
    here = next((place for place in places if place in request.app.openapi()["paths"]), "")
    if here.startswith("/v1/"):
        return f"it is at {here}; set the base_url of your client to {request.base_url}v1. "
    return f"it is at {here}. " if here else ""

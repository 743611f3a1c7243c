"""The ASGI application: routes, the errors that they end with, and the page."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import swagger_ui_bundle
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from fminfer.core.errors import InUseError, OutputError, RequestError
from fminfer.core.version import __version__
from fminfer.server.access import AccessCheck
from fminfer.server.batch_routes import make_batch_routes, make_file_routes
from fminfer.server.batch_service import BatchService
from fminfer.server.compat import make_old_routes
from fminfer.server.http_errors import HttpError, make_error_response, to_http_error
from fminfer.server.model_routes import make_model_routes
from fminfer.server.openai_routes import make_openai_routes
from fminfer.server.service import Service
from fminfer.server.settings import ServerSettings

_LINE = (
    "fminfer answers POST /v1/completions and /v1/chat/completions, or /v1/embeddings "
    "or /v1/score if its model gives vectors. /docs has the API, and / a page to try "
    "it in a browser.\n"
)
_NO_ROOM = (
    "the server's disk is full, or cannot be written; nothing of this is kept. Delete "
    "files that are not needed any more, or have whoever runs the server make room"
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


def make_page_routes(*, has_page: bool = True) -> APIRouter:
    """Return the routes of `/`, `/docs` and the files that they need.

    They tell nothing of the model, so they need no key; the page asks for it when a call does.

    Args:
        has_page: `/` is a page that sends requests; otherwise there is none.
    """
    folder = Path(__file__).parent / "page"
    swagger = Path(swagger_ui_bundle.swagger_ui_path)
    router = APIRouter()
    if has_page:
        router.add_route(
            "/",
            _make_file_route(folder / "index.html", policy=_PAGE_POLICY, other=_LINE),
            include_in_schema=False,
        )
    for path, source in {
        "/page/page.css": folder / "page.css",
        "/page/page.js": folder / "page.js",
        "/docs": folder / "docs.html",
        "/docs/docs.js": folder / "docs.js",
        "/docs/docs.css": folder / "docs.css",
        "/docs/swagger-ui.css": swagger / "swagger-ui.css",
        "/docs/swagger-ui-bundle.js": swagger / "swagger-ui-bundle.js",
    }.items():
        router.add_route(path, _make_file_route(source), include_in_schema=False)
    # Not to /docs: only the browser knows the prefix of a proxy.
    to_docs = RedirectResponse("../docs")
    router.add_route("/docs/", lambda request: to_docs, include_in_schema=False)
    return router


def _make_file_route(
    source: Path, *, policy: str = _POLICY, other: str | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers GET and HEAD with a file; with `other` those that accept no HTML."""
    body = source.read_bytes()
    vary = {} if other is None else {"Vary": "Accept"}
    headers = vary | {
        "Content-Type": _TYPES[source.suffix],
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
        # a browser asks each time, and the tag spares the bytes
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }

    async def answer(request: Request) -> Response:
        if other is not None and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(other, headers=vary)
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return answer


MAX_PARTS = 4  # of our paths
# Paths of other APIs, by what to do instead.
ELSEWHERE = {
    "no response is kept; POST /v1/responses answers each": "responses/.+",
    "send messages to /v1/chat/completions": (
        "messages|conversations|assistants|threads|realtime|invocations|api/chat$"
    ),
    "send a prompt to /v1/completions": (
        "engines|generate|generate_stream|completion|infill|api/generate"
    ),
    "send texts to /v1/embeddings": "embed|embedding|api/embed|api/embeddings|pooling",
    "send documents to /v1/rerank": "reranking",
    "this server answers texts with texts and vectors": "moderations|audio|images|videos|"
    "fine_tuning|vector_stores|evals|containers",
    "upload whole files to /v1/files": "uploads",
}


def make_app(
    service: Service, settings: ServerSettings, batches: BatchService | None
) -> FastAPI:
    """Return the application that serves an engine; without batches it keeps nothing."""
    app = FastAPI(
        title="fminfer",
        version=__version__,
        description="Completions and chat with one model, in the form of the OpenAI API.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address of a proxy before it is not known
    )
    routers = [
        make_openai_routes(service),
        make_model_routes(service),
        APIRouter() if service.url_elsewhere else make_old_routes(service),
        make_file_routes(batches),
        make_batch_routes(service, batches),
        make_page_routes(has_page=not service.url_elsewhere),
    ]
    for router in routers:
        app.include_router(router)
    app.state.elsewhere = service.url_elsewhere
    app.state.paths = {
        route.path
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    }
    _add_error_handlers(app, service)
    # It is made when it is first asked for: that takes as long as all else here.
    make_document = cache(
        partial(_make_openapi_document, app, has_keys=bool(settings.api_keys))
    )
    app.openapi = make_document  # type: ignore[method-assign]
    app.add_middleware(AccessCheck, settings=settings, service=service)
    return app


def _make_openapi_document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
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
            operation["summary"] = operation.pop(
                "description", operation["summary"]
            ).rstrip(".")
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    if has_keys:
        document["paths"]["/health"]["get"]["security"] = []  # it needs none
        scheme = {"type": "http", "scheme": "bearer"}
        document.setdefault("components", {})["securitySchemes"] = {"key": scheme}
        document["security"] = [{"key": []}]
    return document


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Answer all errors in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        # of the state folder; the log has the path
        if isinstance(error, OutputError | InUseError):
            service.log.write("error", f"A client was refused: {error}")
        return make_error_response(_to_http_error(request, error))

    for kind in (
        HttpError,
        RequestError,
        OutputError,
        InUseError,
        HTTPException,
        RequestValidationError,
    ):
        app.add_exception_handler(kind, answer)


def _to_http_error(request: Request, error: Exception) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        return to_http_error(error)
    if isinstance(error, OutputError | InUseError):
        return HttpError(507, _NO_ROOM, code="disk_full")
    if isinstance(error, HTTPException):
        return HttpError(
            error.status_code,
            _describe_error(request, error),
            code="unknown_url" if error.status_code == 404 else None,
            headers=error.headers,
        )
    assert isinstance(error, RequestValidationError), (
        "FastAPI's, of a path's parameters"
    )
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return HttpError(
        400,
        f"{name}: {first['msg']}; it was {str(first.get('input'))[:60]!r}",
        code="invalid_type",
        param=name,
    )


def _describe_error(request: Request, error: HTTPException) -> str:
    path = request.url.path
    if error.status_code == 404:
        return f"there is no {path:.200}; {_find_remedy(request, path)}/docs lists what there is"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path:.200} is not there for {request.method}; use {allowed}"
    return str(error.detail)


def _find_remedy(request: Request, path: str) -> str:
    """Return what to do instead, if the path is of another API or stands at another place."""
    if url := request.app.state.elsewhere:
        return f"this server answers batches alone; send other requests to {url}. "
    for remedy, pattern in ELSEWHERE.items():
        if re.fullmatch(rf"/(v\d/)?({pattern})(/.*)?", path):
            return f"{remedy}. "
    # The last ones: a path may have thousands.
    parts = path.rstrip("/").rsplit("/", MAX_PARTS)[1:]
    tails = ["/".join(parts[start:]) for start in range(len(parts))]
    paths = [path for tail in tails for path in (f"/v1/{tail}", f"/{tail}")]
    ours = next((path for path in paths if path in request.app.state.paths), "")
    if ours.startswith("/v1/"):
        return f"it is at {ours}; set the base_url of your client to {request.base_url}v1. "
    return f"it is at {ours}. " if ours else ""

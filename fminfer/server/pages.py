"""The page at `/` and the documentation at `/docs`: files from memory, none of the internet."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import swagger_ui_bundle
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

_LINE = (
    "fminfer answers POST /v1/completions and /v1/chat/completions. "
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

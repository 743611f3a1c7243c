"""The page at `/` and the documentation at `/docs`, by HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

import pytest

from tests.fakes.serving import Fake, serve_fake

HTML = "text/html,application/xhtml+xml,*/*;q=0.8"


def ask(url: str, accept: str = HTML, **options: str) -> tuple[int, Message, str]:
    request = Request(url, headers={"Accept": accept, **options})
    try:
        with urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture(scope="module")
def served() -> Iterator[Fake]:
    with serve_fake() as fake:
        yield fake


def test_a_browser_gets_the_page_and_others_a_line(served: Fake) -> None:
    status, headers, page = ask(served.url)
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<title>fminfer</title>" in page
    for accept in ("*/*", "application/json"):
        status, headers, line = ask(served.url, accept)
        assert status == 200 and headers["Content-Type"] == "text/plain; charset=utf-8"
        assert line.count("\n") == 1 and "/v1/completions" in line
        assert headers["Vary"] == "Accept"


@pytest.mark.parametrize("accept", [HTML, "*/*"])
def test_head_is_answered_without_a_body(served: Fake, accept: str) -> None:
    request = Request(served.url, headers={"Accept": accept}, method="HEAD")
    with urlopen(request, timeout=20) as answer:
        assert answer.status == 200 and int(answer.headers["Content-Length"]) > 50
        assert answer.read() == b""


@pytest.mark.parametrize("path", ["", "docs"])
def test_pages_allow_no_script_but_the_servers_own(served: Fake, path: str) -> None:
    _, headers, page = ask(urljoin(served.url, path))
    policy = dict(
        part.strip().split(" ", 1)
        for part in headers["Content-Security-Policy"].split(";")
    )
    assert {name: policy[name] for name in policy if "trusted" not in name} == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
    }
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", page)


@pytest.mark.parametrize("path", ["", "docs"])
def test_every_file_of_a_page_comes_from_the_server(served: Fake, path: str) -> None:
    """It works without the internet, and below a proxy's prefix: addresses are relative."""
    _, _, page = ask(urljoin(served.url, path))
    used = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert not [each for each in used if each.startswith(("http", "/"))]
    files = [each for each in used if not each.startswith(("data:", "docs", "openapi"))]
    files += [each for each in used if each.startswith("docs/")]
    assert len(files) >= 2
    for each in files:
        status, headers, text = ask(urljoin(served.url, each), "*/*")
        kind = {"css": "text/css", "js": "text/javascript"}[each.rpartition(".")[2]]
        assert (
            status == 200
            and text
            and headers["Content-Type"] == f"{kind}; charset=utf-8"
        ), each


def test_a_browser_that_has_a_file_gets_no_second_one(served: Fake) -> None:
    url = urljoin(served.url, "docs/swagger-ui-bundle.js")
    _, headers, text = ask(url)
    assert len(text) > 100_000 and headers["Cache-Control"] == "no-cache"
    status, again, text = ask(url, **{"If-None-Match": f'W/"other", {headers["ETag"]}'})
    assert status == 304 and not text and again["ETag"] == headers["ETag"]
    assert ask(url, **{"If-None-Match": '"other"'})[0] == 200

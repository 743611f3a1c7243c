"""One browser for a module's tests, and the page of a fake server for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import Browser, open_browser
from tests.fakes.serving import serve_fake
from tests.server.page import Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open the page of a fake server, whose options are the test's parameter."""
    with serve_fake(**getattr(request, "param", {})) as fake:
        page = Page(browser, fake)
        page.open()
        yield page
        browser.open("about:blank")

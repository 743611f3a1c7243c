"""The page and the documentation of a real server, with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.browser import Browser
from tests.fakes.serving import Fake
from tests.server.page import Page, needs_browser
from tests.server.running import Running, until
from tests.server.server_needs import needs_server

pytestmark = [needs_browser, needs_server(is_fresh=True)]
QUESTION = "How do you go from the moon to the sea?"
BABBLE = {"max_tokens": 80, "temperature": 2, "seed": 2}  # with pieces of characters


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    page = Page(browser, Fake(url=f"{server.url}/"))
    page.open()
    yield page
    browser.open("about:blank")


def set_babble(page: Page) -> None:
    for name, value in BABBLE.items():
        page.browser.type(f"#{name}", str(value))


def ask(server: Running, path: str, **fields: Any) -> str:
    """Return the text of a whole answer."""
    choice = server.post(path, fields | BABBLE | {"top_p": 1}).json["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert "\N{REPLACEMENT CHARACTER}" in text, (
        "the sample shows no pieces of characters"
    )
    return str(text)


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_page_shows_what_the_api_answers(
    page: Page, server: Running, is_chat: bool
) -> None:
    """Every character of it, all under tokens, although some tokens are pieces of characters."""
    set_babble(page)
    if is_chat:
        messages = [{"role": "user", "content": QUESTION}]
        expected = ask(server, "/v1/chat/completions", messages=messages)
    else:
        page.take_completion()
        expected = ask(server, "/v1/completions", prompt=QUESTION)
    page.submit(QUESTION)
    assert "".join(text for text, _ in page.tokens()) == expected
    assert not page.browser.log


def test_stop_frees_what_the_answer_held(page: Page, server: Running) -> None:
    page.browser.type("#max_tokens", "900")
    page.browser.type("#temperature", "2")
    page.browser.type("#text", QUESTION)
    page.browser.press("Enter", 13)
    page.browser.wait("document.querySelector('.token')")
    page.browser.click("#stop")
    page.browser.wait("!running")
    until(server.is_idle, "the answer's blocks are free")


@needs_server(is_fresh=True, api_keys=("sesame",))
def test_the_page_and_the_docs_work_with_a_key(page: Page, server: Running) -> None:
    browser = page.browser
    browser.type("#key", "sesame")
    browser.press("Enter", 13)
    browser.wait("!document.querySelector('#key-dialog').open")
    page.submit(QUESTION)
    assert page.tokens()
    browser.wait("document.querySelector('#num_running').textContent === '0'")
    browser.log.clear()  # 401 was logged
    browser.open(urljoin(page.fake.url, "docs"))
    browser.wait("document.querySelectorAll('.opblock').length > 8")
    assert {"/v1/completions", "/tokenize"} <= {
        path.replace("\u200b", "") for path in page.text_of(".opblock-summary-path")
    }
    assert not browser.log


def test_the_docs_send_the_example_of_a_route(page: Page) -> None:
    """Swagger UI made values such as "Unknown Type: integer,null", which a route refuses."""
    browser = page.browser
    browser.open(urljoin(page.fake.url, "docs"))
    for number, wanted in enumerate(
        [".opblock-summary-control", ".try-out__btn", ".execute"]
    ):
        browser.wait(f"document.querySelector('{wanted}')")
        browser.run(f"document.querySelector('{wanted}').click()")
        if number == 1:
            browser.wait("document.querySelector('.body-param__text')")
            body = json.loads(
                browser.run("document.querySelector('.body-param__text').value")
            )
            assert "max_tokens" in body and len(body) < 5
    browser.wait(
        "document.querySelector('.live-responses-table tbody .response-col_status')"
    )
    assert page.text_of(".live-responses-table tbody .response-col_status")[
        0
    ].startswith("200")
    assert "Unknown Type" not in browser.run("document.body.textContent")
    assert not browser.log

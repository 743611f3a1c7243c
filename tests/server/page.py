"""The page in a browser, and what one does there."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.browser import CHROMIUM, Browser
from tests.fakes.serving import Fake

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a server, which mostly is a fake."""

    browser: Browser
    fake: Fake

    def open(self) -> None:
        """Open it anew, and wait until it knows the model or asks for the key."""
        self.browser.log.clear()
        self.browser.look(1280, 900)
        self.browser.open(self.fake.url)
        is_ready = "document.querySelector('#model').textContent !== '…'"
        self.browser.wait(f"{is_ready} || document.querySelector('#key-dialog').open")

    def text_of(self, selector: str) -> list[str]:
        """Return the text of each element that a selector finds."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return [
            str(each) for each in self.browser.run(f"{every}.map(e => e.textContent)")
        ]

    def tokens(self) -> list[tuple[str, str]]:
        """Return the text and the colour of each token that is seen."""
        seen = (
            "[...document.querySelectorAll('.token')].filter(e => e.checkVisibility())"
        )
        of_each = "[e.textContent, e.className.match(/level-./)[0]]"
        return [
            (text, level)
            for text, level in self.browser.run(f"{seen}.map(e => {of_each})")
        ]

    def wait_for_status(self, status: str) -> None:
        self.browser.wait(
            f"document.querySelector('#status').textContent.startsWith({json.dumps(status)})"
        )

    def submit(self, text: str, status: str = "Done.") -> None:
        """Type a text, send it, and wait for the end."""
        self.browser.type("#text", text)
        self.browser.click("#send")
        self.wait_for_status(status)

    def take_completion(self) -> None:
        """Choose completions in place of chat."""
        self.browser.click(".modes label:last-of-type span")
        self.browser.wait("document.body.dataset.mode === 'completion'")

"""The page in a browser: its live figures, how it is to read, and the documentation."""

from __future__ import annotations

from urllib.parse import urljoin

import pytest

from tests.fakes.serving import ROUTE
from tests.server.page import Page, needs_browser

pytestmark = needs_browser
CONTRAST = """
(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => channel(Number(c)));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return /, 0\\)$/.test(colour) ? ground(e.parentElement) : colour;
  };
  const seen = [...document.querySelectorAll("body *")].filter(
    (e) => e.checkVisibility() && !e.disabled
      && [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()));
  return seen.map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => x - y);
    return [(b + 0.05) / (a + 0.05), e.outerHTML.slice(0, 80)];
  });
})()
"""


def test_live_figures_come_each_second(page: Page) -> None:
    page.browser.wait("document.querySelector('#num_waiting').textContent === '7'")
    assert page.text_of(".stats dd:first-of-type") == ["3", "7", "42.0 %", "120", "35"]
    before = page.fake.num_stats
    page.browser.run("new Promise((resolve) => setTimeout(resolve, 2500))")
    assert 1 <= page.fake.num_stats - before <= 3
    page.browser.run(
        "Object.defineProperty(document, 'visibilityState', {value: 'hidden'})"
    )
    page.browser.run("new Promise((resolve) => setTimeout(resolve, 100))")
    before = page.fake.num_stats
    page.browser.run("new Promise((resolve) => setTimeout(resolve, 1500))")
    assert page.fake.num_stats == before, "a hidden tab asks nothing"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_readable(page: Page, width: int, scheme: str) -> None:
    """Nothing is wider than the window, and each text has the contrast of WCAG's level AA."""
    page.browser.look(width, 844, scheme)
    page.submit(ROUTE)
    page.submit("too long", "Failed")
    page.browser.run("document.querySelector('.token').focus()")
    assert page.browser.run("document.documentElement.scrollWidth") == width
    contrasts = page.browser.run(CONTRAST)
    assert len(contrasts) > 40
    assert [each for each in contrasts if each[0] < 4.5] == []
    box = page.browser.run(
        "(({left, right, top, bottom}) => [left, right, top, "
        "bottom])(hint.getBoundingClientRect())"
    )
    assert box[0] >= 0 and box[1] <= width and box[2] >= 0 and box[3] <= 844


def test_examples_are_whole_and_can_be_copied(page: Page) -> None:
    """On a phone they were cut at the right, without a sign, and no button copied them."""
    page.browser.look(390, 844)
    cut = (
        "[...document.querySelectorAll('pre')].map(e => e.scrollWidth - e.clientWidth)"
    )
    assert page.browser.run(cut) == [0, 0]
    page.browser.click("#try-curl + button")
    assert page.text_of(".code button") == ["Copied", "Copy"]
    copied = page.browser.run("getSelection().toString()")
    assert copied == page.text_of("#try-curl")[0] and copied.count("\n") == 2


def test_the_model_is_named_whole_on_a_phone(page: Page) -> None:
    """Its name was cut with dots, and the length of its context could not be read."""
    page.browser.look(390, 844)
    page.browser.run(
        "document.querySelector('#model').textContent += ' and a long name'.repeat(9)"
    )
    assert (
        page.browser.run(
            "(e => e.scrollWidth - e.clientWidth)(document.querySelector('#model'))"
        )
        == 0
    )


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_the_docs_are_as_dark_as_the_page(
    page: Page, scheme: str, is_dark: bool
) -> None:
    """They stayed white in dark mode."""
    page.browser.look(1280, 844, scheme)
    page.browser.open(urljoin(page.fake.url, "docs"))
    page.browser.wait("document.querySelectorAll('.opblock').length === 4")
    assert (max(page.browser.pixel(2, 2)) < 60) == is_dark
    assert (min(page.browser.pixel(2, 2)) > 200) == (not is_dark)


def test_each_field_has_a_label(page: Page) -> None:
    fields = "[...document.querySelectorAll('input, textarea')]"
    assert page.browser.run(f"{fields}.length") == 9
    assert page.browser.run(f"{fields}.filter(e => !e.labels.length).length") == 0


def test_the_docs_show_the_routes(page: Page) -> None:
    """Without the internet, and without anything that the policy forbids."""
    page.browser.open(urljoin(page.fake.url, "docs"))
    page.browser.wait("document.querySelectorAll('.opblock').length === 4")
    assert "/v1/chat/completions" in "".join(page.text_of(".opblock-summary-path"))
    page.browser.run(
        "document.querySelector('#operations-default-stats_stats_get button').click()"
    )
    page.browser.wait("document.querySelector('.try-out__btn')")
    page.browser.run("document.querySelector('.try-out__btn').click()")
    page.browser.wait("document.querySelector('.execute')")
    page.browser.run("document.querySelector('.execute').click()")
    page.browser.wait("document.body.textContent.includes('generation_tokens_per_s')")
    assert not page.browser.log

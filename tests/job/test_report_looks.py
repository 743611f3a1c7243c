"""The report in a browser: how it is to read, and that nothing of a text is run or loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fminfer.files.output_paths import answers_path
from fminfer.job.report.report_file import write_report
from fminfer.job.report.reported_outputs import find_outputs
from tests.browser import CHROMIUM, Browser, open_browser
from tests.job.report_outputs import (
    FLAGS,
    call,
    make_report,
    mixed_lines,
    plain_answer,
    scored_answer,
    write_lines,
)
from tests.server.test_page_looks import CONTRAST

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
ITEMS = "[...document.querySelectorAll('.row')]"
SEEN = f"{ITEMS}.filter(e => e.checkVisibility())"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report over lines of all kinds, errors and hostile texts among them."""
    source = write_lines(tmp_path_factory.mktemp("looks") / "in.jsonl", mixed_lines())
    assert call("run", "-q", *FLAGS, source).exit_code == 3
    path = source.with_name("report.html")
    make_report(answers_path(source), path=path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        browser.call("Network.enable")
        yield browser


@pytest.fixture(autouse=True)
def opened(browser: Browser, page: Path) -> Iterator[None]:
    """Open it anew; afterwards nothing may have been complained of."""
    browser.log.clear()
    browser.look(1280, 900)
    browser.open("about:blank")
    browser.open(page.as_uri())
    yield
    assert browser.log == []
    loaded = browser.run("performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == [], (
        "it needs no network"
    )


def choose(browser: Browser, field: str, value: str) -> None:
    """Give a field of the filter a value."""
    browser.run(f"$('{field}').value = {json.dumps(value)}")
    browser.run(f"$('{field}').dispatchEvent(new Event('input'))")


def open_all(browser: Browser) -> None:
    browser.run(f"{ITEMS}.forEach(e => e.open = true)")
    browser.wait(f"{ITEMS}.every(e => e.querySelector('.body'))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_readable(browser: Browser, width: int, scheme: str) -> None:
    """Nothing is wider than the window, and each text has the contrast of WCAG's level AA."""
    browser.look(width, 844, scheme)
    open_all(browser)
    assert browser.run("document.documentElement.scrollWidth") == width
    of_html = CONTRAST.replace('"body *"', '"body *:not(svg, svg *, script)"')
    contrasts = browser.run(of_html)
    assert len(contrasts) > 300
    assert [each for each in contrasts if each[0] < 4.5] == []


@pytest.mark.parametrize("width", [390, 1024, 1280])
def test_charts_fill_the_width(browser: Browser, width: int) -> None:
    """The one that stands alone is as wide as two, and on a phone each is as wide as
    the page."""
    browser.look(width, 900)
    charts = (
        "[...document.querySelectorAll('.chart')].map(e => e.getBoundingClientRect()"
    )
    edges = browser.run(f"{charts}.right)")
    assert len(edges) == 3 and edges[1] == edges[2]
    assert (edges[0] == edges[1]) == (width < 600)
    assert len(set(browser.run(f"{charts}.left)"))) == (1 if width < 600 else 2)


def test_tables_tear_no_word_on_a_phone(browser: Browser) -> None:
    """Errors' codes and heads of columns were broken anywhere; a code breaks after a
    low line."""
    browser.look(390, 844)
    words = "[...document.querySelectorAll('.errors :is(thead th, code)')]"
    lines = browser.run(
        f"{words}.flatMap(e => [...e.childNodes]).filter(e => e.data).map(e => {{"
        " const range = document.createRange(); range.selectNode(e);"
        " return range.getClientRects().length; })"
    )
    assert len(lines) > 5 and max(lines) == 1


def test_cards_line_up(browser: Browser) -> None:
    """Each row of cards had gaps of its own."""
    places = ".tiles div:nth-child(4)", ".chart:nth-child(2)"
    edges = [
        browser.run(f"document.querySelector('{each}').offsetLeft") for each in places
    ]
    assert len(set(edges)) == 1, edges


def test_a_table_that_goes_on_says_so(browser: Browser) -> None:
    """On a phone it was cut at the right without a sign."""
    browser.look(230, 844)
    table = "document.querySelector('.errors')"
    browser.run(f"{table}.scrollIntoView()")
    assert browser.run(f"{table}.scrollWidth - {table}.clientWidth") > 50
    x, y = browser.run(
        f"(b => [b.right - 3, b.top + scrollY + 4])({table}.getBoundingClientRect())"
    )
    bright = sum(browser.pixel(x, y))
    browser.run(f"{table}.scrollLeft = 1e6")
    assert sum(browser.pixel(x, y)) > bright + 150, (
        "the shade goes where the table ends"
    )


def test_a_scored_prompt_has_its_score(browser: Browser, tmp_path: Path) -> None:
    """It was called an answer of 0 tokens."""
    output = tmp_path / "out.jsonl"
    output.write_bytes(scored_answer("a b c"))
    path = output.with_name("report.html")
    make_report(output, path=path)
    browser.open(path.as_uri())
    browser.wait("document.querySelector('.body')")
    titles = browser.run("[...document.querySelectorAll('h4')].map(e => e.textContent)")
    score = "2 logprobs: sum -3.500, mean -1.750 (17.4 % a token)"
    assert titles == [f"Prompt · no token drawn · {score}"]
    assert browser.run("document.querySelector('.said').textContent") == "a b c"
    told = browser.run("document.querySelector('.figures').textContent")
    assert told.split() == ["mean", "logprob", "-1.750"]
    assert "not known" not in browser.run("document.querySelector('.body').textContent")


def test_no_text_is_run(browser: Browser) -> None:
    open_all(browser)
    title = browser.run("document.title")
    assert title == "output_in.jsonl · fminfer report"
    assert browser.run("document.images.length") == 0
    assert browser.run("document.scripts.length") == 2
    shown = browser.run("document.querySelector('#list').textContent")
    assert "<img src=x onerror=" in shown and "‹U+202E›evil" in shown


def test_rows_are_found(browser: Browser) -> None:
    total = browser.run(f"{SEEN}.length")
    assert (
        total == 57
        and browser.run("document.querySelector('#count').textContent") == "57 rows"
    )
    browser.type("#search", "from the PANTRY")
    browser.wait(f"{SEEN}.length === 6")
    assert browser.run("document.querySelector('#count').textContent") == "6 of 57 rows"
    choose(browser, "search", "")
    choose(browser, "why", "error")
    assert browser.run(f"{SEEN}.every(e => e.matches('.is-error'))")
    assert browser.run(f"{SEEN}.length") == 6
    choose(browser, "why", "")
    choose(browser, "order", "completion_tokens")
    tokens = browser.run(
        f"{SEEN}.map(e => parseInt(e.querySelector('.figures').textContent))"
    )
    counts = [count for count in tokens if count is not None]
    assert counts == sorted(counts, reverse=True) and counts[0] > 11


def test_a_link_opens_its_row(browser: Browser) -> None:
    browser.type("#search", "no such text")
    browser.wait(f"{SEEN}.length === 0")
    browser.click(".errors a")
    browser.wait("document.activeElement.matches('.row[open] > summary')")
    target = browser.run(
        "document.querySelector('.errors a').getAttribute('href').slice(1)"
    )
    assert browser.run("document.activeElement.parentElement.id") == target
    assert browser.run("document.querySelector('#search').value") == ""


def test_tokens_show_what_else_could_have_come(browser: Browser) -> None:
    """With the mouse and by keys; a part that was given says how likely it was, too."""
    browser.type("#search", "from the den")
    browser.wait(f"{SEEN}.length === 6")
    browser.run(f"{SEEN}.forEach(e => e.open = true)")
    browser.wait(f"{SEEN}[0].querySelectorAll('.token').length > 1")
    browser.run(f"{SEEN}[0].querySelector('.token[tabindex=\"0\"]').focus()")
    browser.wait("!document.querySelector('#hint').hidden")
    assert browser.run("document.querySelectorAll('#hint .chosen').length") == 1
    first = browser.run("document.activeElement.textContent")
    browser.press("ArrowRight", 39)
    assert (
        browser.run("document.activeElement.previousElementSibling.textContent")
        == first
    )
    browser.press("Escape", 27)
    assert browser.run("document.querySelector('#hint').hidden")
    browser.click(".row[open] .token.given[tabindex]", only_point=True)
    browser.wait("!document.querySelector('#hint').hidden")
    lines = browser.run(
        "[...document.querySelectorAll('#hint span')].map(e => e.textContent)"
    )
    assert len(lines) >= 2 and all(line.endswith("%") for line in lines)


def test_the_end_of_a_long_prompt_is_in_view(browser: Browser, tmp_path: Path) -> None:
    """Under echo, the box of the answer shows where the answer begins."""
    output = tmp_path / "out.jsonl"
    prompt = "an example\n" * 60 + "the question"
    output.write_bytes(
        plain_answer(1, f"{prompt} and its answer", prompt=prompt, echo=True)
    )
    path = output.with_name("report.html")
    make_report(output, path=path)
    browser.open(path.as_uri())
    browser.wait("document.querySelectorAll('.said').length === 2")
    boxes = "[...document.querySelectorAll('.said')]"
    left = browser.run(
        f"{boxes}.map(e => e.scrollHeight - e.clientHeight - e.scrollTop)"
    )
    assert browser.run(f"{boxes}.every(e => e.scrollTop > 500)") and max(left) <= 1
    signs = "[...document.querySelectorAll('h4')].map(e => e.textContent.split(' · ').at(-1))"
    assert browser.run(signs) == ["scroll up for its beginning"] * 2


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1280, "light")])
def test_labels_have_tables(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    """They fit the window and can be read; the least sure row comes first, and is open."""
    names = [f" label {n} <b>" for n in range(40)]
    output = tmp_path / "out.jsonl"
    with output.open("wb") as file:
        for n in range(80):
            odds = {names[n % 40]: 0.9 - n / 100, names[(n + 1) % 40]: 0.1}
            record = json.loads(plain_answer(1, names[n % 40]))
            record["request"]["structured_outputs"] = {"choice": names}
            choice = record["result"]["choices"][0]
            choice |= {"label_probabilities": odds, "label_mass": 0.25}
            truth = names[n % 20].strip()
            file.write(json.dumps({**record, "truth": truth}).encode() + b"\n")
    path = output.with_name("report.html")
    write_report(find_outputs([output]), path, truth="truth")
    browser.look(width, 844, scheme)
    browser.open(path.as_uri())

    tables = "[...document.querySelectorAll('#label-tables table')]"
    sizes = f"{tables}.map(e => [e.tBodies[0].rows.length, e.rows[0].cells.length])"
    # 30 labels and the others, of which 20 are true ones
    assert browser.run(sizes) == [[40, 5], [20, 32], [10, 6]]
    hits = f"{tables}[1].querySelectorAll('.hit').length"
    assert browser.run(hits) == 20
    part = f"[...{tables}[2].rows[9].cells].map(e => e.textContent)"
    line = ["80\u00a0–\u00a090\u00a0%", "10", "", "84.5 %", "100.0 %", "72.2 – 100.0 %"]
    assert browser.run(part) == line

    assert browser.run(f"{ITEMS}[0].open && $('order').value") == "unsure"
    names_shown = (
        "[...document.querySelectorAll('.part .odds b')].map(e => e.textContent)"
    )
    browser.wait("document.querySelector('.part .odds')")
    assert browser.run(names_shown) == ["·label·39·<b>", "·label·0·<b>"]
    facts = browser.run("document.querySelector('.body').textContent")
    assert "Labels have 25.0 % of the probability of all texts" in facts
    assert "true label label 19 <b>: the answer is wrong" in facts
    choose(browser, "why", "wrong")
    wrong = f"{SEEN}.every(e => e.querySelector('.tag.wrong'))"
    assert browser.run(wrong) and browser.run(f"{SEEN}.length") == 40

    assert browser.run("document.documentElement.scrollWidth") == width
    of_html = CONTRAST.replace('"body *"', '"body *:not(svg, svg *, script)"')
    assert [each for each in browser.run(of_html) if each[0] < 4.5] == []


def test_a_page_without_labels_has_none_of_their_choices(browser: Browser) -> None:
    assert browser.run("document.querySelectorAll('.of-labels').length") == 0
    assert browser.run(f"{ITEMS}[0].open && $('order').value") == ""


def test_each_field_and_chart_has_a_name(browser: Browser) -> None:
    fields = "[...document.querySelectorAll('input, select')]"
    assert browser.run(f"{fields}.length") == 3
    assert browser.run(f"{fields}.filter(e => !e.labels.length).length") == 0
    charts = "[...document.querySelectorAll('svg:not([aria-hidden]):not(svg svg)')]"
    assert browser.run(f"{charts}.length") == 3
    assert browser.run(
        f"{charts}.every(e => e.role === 'img' || e.getAttribute('role') === 'img')"
    )
    assert browser.run(f"{charts}.every(e => e.getAttribute('aria-label').length > 20)")

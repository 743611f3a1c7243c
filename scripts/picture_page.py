#!/usr/bin/env python
"""Take pictures of the page of `fminfer serve` in Chromium: wide and narrow, light and dark.

scripts/picture_page.py docs                       # docs/serve-1280-light.png and three more
scripts/picture_page.py /tmp/pictures --model-name /models/chat --ask "Who was Ada Lovelace?"

The server really runs, and other clients ask meanwhile, so that the figures have
something to show.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import click

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.browser import Browser, open_browser

# The demo model knows the first answer, and guesses the second one.
QUESTIONS = (
    "How do you go from the bathroom to the office?",
    "Is it far to the garden, or to the basement?",
)
SETTINGS = {"max_tokens": "60", "temperature": "1.3", "seed": "5"}
SIZES = {1280: 900, 390: 844}  # pixels
NUM_CLIENTS = 12
# The token that is shown with its alternatives: the least certain one of the last answer.
LEAST_CERTAIN = """
(() => {
  const last = [...document.querySelectorAll("#chat-log .said")].at(-1);
  const words = [...last.querySelectorAll(".token")].filter((e) => e.textContent.trim());
  const level = (e) => Number(e.className.match(/level-(.)/)[1]);
  words.sort((a, b) => level(b) - level(a))[0].focus({ preventScroll: true });
})()
"""


@contextmanager
def serve(model_name: str | None) -> Iterator[str]:
    """Start a server, and return its address without a slash."""
    command = [sys.executable, "-m", "fminfer", "serve", "--port", "0"]
    command += [] if model_name is None else ["--model-name", model_name]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if (found := re.search(r"Serving .* at (http://\S+)", line)) is not None:
                yield found[1]
                return
        raise SystemExit("the server has not started")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def other_clients(url: str) -> Iterator[None]:
    """Let clients ask one request after another."""
    is_over = threading.Event()
    fields = {"prompt": QUESTIONS[0], "max_tokens": 400, "ignore_eos": True}
    body = json.dumps(fields).encode()

    def ask() -> None:
        while not is_over.is_set():
            try:
                urlopen(Request(f"{url}/v1/completions", body), timeout=60).read()
            except URLError as error:
                if not is_over.is_set():
                    raise SystemExit(f"a client failed: {error}") from error

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    yield
    is_over.set()


def ask_in_page(browser: Browser, questions: tuple[str, ...]) -> None:
    """Type each question, and wait for its answer."""
    for name, value in SETTINGS.items():
        browser.type(f"#{name}", value)
    for number, question in enumerate(questions, start=1):
        browser.type("#text", question)
        browser.press("Enter", 13)
        browser.wait(
            f"document.querySelectorAll('.meta').length === {number} && !running", 120
        )
        if error := browser.run(
            "document.querySelector('.error:not(noscript *)')?.textContent"
        ):
            raise SystemExit(f"the page shows an error: {error}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model-name", help="A chat model.  [default: the demo model]")
@click.option(
    "--ask", "questions", multiple=True, default=QUESTIONS, help="May be repeated."
)
def main(folder: Path, model_name: str | None, questions: tuple[str, ...]) -> None:
    """Write serve-WIDTH-light.png and serve-WIDTH-dark.png into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    with serve(model_name) as url, open_browser() as browser, other_clients(url):
        browser.look(1280, SIZES[1280])
        browser.open(f"{url}/")
        # for the curve
        browser.run("new Promise((resolve) => setTimeout(resolve, 8000))")
        ask_in_page(browser, questions)
        for width, height in SIZES.items():
            for scheme in ("light", "dark"):
                browser.look(width, height, scheme)
                browser.run("window.scrollTo(0, 0)")
                browser.run("document.querySelector('#chat-log').scrollTop = 1e6")
                browser.run("new Promise((resolve) => setTimeout(resolve, 300))")
                browser.run("document.activeElement.blur()")
                browser.run(LEAST_CERTAIN)
                browser.picture(folder / f"serve-{width}-{scheme}.png")
        if browser.log:
            raise SystemExit("the browser complains:\n" + "\n".join(browser.log))


if __name__ == "__main__":
    main()

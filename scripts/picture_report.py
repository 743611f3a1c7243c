#!/usr/bin/env python
"""Take pictures of a report in Chromium: wide and narrow, its rows, and one of many errors.

scripts/picture_report.py docs --model-name SmolLM2-135M-Instruct     # docs/report-….png

The lines are answered by a real run: chats and completions with logprobs, and wrong ones. Signs
such as ▸ need fonts that have them, or they are empty boxes: fonts-noto-core and
fonts-dejavu-core.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.browser import Browser, open_browser

REPOSITORY = Path(__file__).resolve().parent.parent
SYSTEM = {
    "role": "system",
    "content": "You are a friendly assistant. Answer in plain words.",
}
ASKED = (
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "Why do people like {}?",
    "Name three facts about {}.",
    "Tell a very short story about {}.",
)
TOPICS = (
    "the moon",
    "bread",
    "a lighthouse",
    "tides",
    "the violin",
    "volcanoes",
    "penguins",
    "snow",
    "honey",
    "the number seven",
    "the printing press",
    "green tea",
    "chess",
    "the Silk Road",
)
BEGUN = (
    "Once upon a time, there was",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, the first",
    "The best way to learn a language is",
    "Water boils at",
)
WRONG = (
    '{"prompt": "broken',
    '{"prompt": 5}',
    '{"prompt": "x", "max_tokens": 99999}',
    '"a string"',
    '{"prompt": "x", "temperature": 3}',
    '{"max_tokens": 5}',
    '{"prompt": [999999999]}',
    '{"prompt": "x", "top_p": 1.5}',
    '{"prompt": "x", "stream": true}',
    '{"messages": []}',
)
LEAST_CERTAIN = """
(() => {
  const all = [...document.querySelectorAll(".row[open] .token")];
  const words = all.filter((e) => e.textContent.trim());
  const level = (e) => Number(e.className.match(/level-(.)/)?.[1] ?? 0);
  words.sort((a, b) => level(b) - level(a))[0].focus({ preventScroll: true });
})()
"""


def make_lines(number: int) -> list[dict[str, Any]]:
    """Return chats and completions, the same ones each time."""
    rng = random.Random(4)
    lines: list[dict[str, Any]] = []
    for each in range(number):
        own = {
            "max_tokens": rng.choice([16, 32, 64, 96]),
            "temperature": rng.choice([0, 0.7, 1]),
        }
        if each % 2:
            lines.append(
                {"prompt": rng.choice(BEGUN), "logprobs": 4, "seed": each, **own}
            )
            continue
        asked = {
            "role": "user",
            "content": rng.choice(ASKED).format(rng.choice(TOPICS)),
        }
        chat = {"messages": [SYSTEM, asked], "logprobs": True, "top_logprobs": 4, **own}
        url = "/v1/chat/completions"
        batch = {
            "custom_id": f"chat-{each}",
            "method": "POST",
            "url": url,
            "body": chat,
        }
        lines.append(chat if each % 3 else batch)
    return lines


def answer(folder: Path, name: str, lines: list[str], model_name: str | None) -> Path:
    """Run over lines; return the report. Paths in it are those of the folder."""
    source = f"{name}.jsonl"
    report = f"{name}.html"
    (folder / source).write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "fminfer", "run", "-q", source, "--report", report]
    if model_name is not None and Path(model_name).is_dir():
        link = folder / Path(model_name).name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(model_name).resolve())
        model_name = link.name
    command += [] if model_name is None else ["--model-name", model_name]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    if subprocess.run(command, cwd=folder, env=environ).returncode not in (0, 3):
        raise SystemExit("the run has failed")
    return folder / report


def take(browser: Browser, path: Path, place: str = "body") -> None:
    """Take a picture of the window, once an element stands at its top."""
    browser.run(
        f"document.querySelector('{place}').scrollIntoView({{behavior: 'instant'}})"
    )
    browser.run("new Promise((resolve) => setTimeout(resolve, 500))")
    if place == "#filter":
        browser.run(LEAST_CERTAIN)
    browser.picture(path)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model-name", help="A chat model.  [default: the demo model]")
def main(folder: Path, model_name: str | None) -> None:
    """Write report-….png into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) for line in make_lines(300)]
    with tempfile.TemporaryDirectory() as place, open_browser() as browser:
        good = answer(Path(place), "requests", lines, model_name)
        bad = answer(
            Path(place), "drafts", [*lines[:40], *WRONG, *WRONG[:6]], model_name
        )
        browser.look(1280, 1340)
        browser.open(good.as_uri())
        take(browser, folder / "report-1280-light.png")
        browser.look(1280, 760)
        take(browser, folder / "report-rows-1280-light.png", "#filter")
        browser.look(390, 844, "dark")
        take(browser, folder / "report-390-dark.png", "#filter")
        browser.look(1280, 900)
        browser.open(bad.as_uri())
        take(browser, folder / "report-errors-1280-light.png")
        if browser.log:
            raise SystemExit("the browser complains:\n" + "\n".join(browser.log))


if __name__ == "__main__":
    main()

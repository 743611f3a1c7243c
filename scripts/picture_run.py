#!/usr/bin/env python
"""Draw what a terminal shows during and after a command, as an SVG picture.

scripts/picture_run.py docs/run.svg -- fminfer run reviews.jsonl --output answers.jsonl

The command really runs, in a pseudo-terminal. The screen is kept each time that something is
written; the picture shows one from the middle of its time and the last one.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
import time
from html import escape
from pathlib import Path

import click

COLUMNS = 120
WIDTH_OF_CHARACTER = 7.83
LINE = 19
PAD = 16
TITLE = 34
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
BACK = "#0d1117"
BORDER = "#57606a"
TEXT = "#e6edf3"
DIM = "#9da7b3"
PROMPT = "#7ee787"
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Screen:
    """A terminal, as far as progress bars use it: \\r, \\n, up, and erase to the line's end."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        place = 0
        while place < len(text):
            if (found := ESCAPE.match(text, place)) is not None:
                self._move(found[1], found[2])
                place = found.end()
                continue
            self._put(text[place])
            place += 1

    def _move(self, number: str, letter: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - int(number or 1))
        elif letter == "K":
            self.lines[self._row] = self.lines[self._row][: self._column]

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            self._column = 0
            if self._row == len(self.lines):
                self.lines.append("")
        elif character.isprintable():
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = (
                line[: self._column] + character + line[self._column + 1 :]
            )
            self._column += 1


def run(command: list[str]) -> list[tuple[float, list[str]]]:
    """Run a command in a terminal; return each screen that it showed, with its time in
    seconds."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = Screen()
    screens = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the command has closed the terminal
            break
        if not data:
            break
        screen.write(decoder.decode(data))
        screens.append((time.perf_counter() - start_s, list(screen.lines)))
    if process.wait():
        raise SystemExit(
            f"the command ended with {process.returncode}:\n" + "\n".join(screen.lines)
        )
    return screens


def wrapped(text: str) -> list[str]:
    """Break a line as a terminal of COLUMNS columns does."""
    return [
        text[place : place + COLUMNS] for place in range(0, max(1, len(text)), COLUMNS)
    ]


def window(title: str, command: str, lines: list[str], top: int) -> tuple[str, int]:
    """Return one window's SVG elements and its height."""
    shown = [part for line in lines for part in wrapped(line.rstrip())]
    while shown and not shown[-1]:
        shown.pop()
    typed = wrapped(f"$ {command}")
    width = COLUMNS * WIDTH_OF_CHARACTER + 2 * PAD
    height = TITLE + (len(typed) + len(shown)) * LINE + PAD
    out = [
        f'<rect x="0.5" y="{top + 0.5}" width="{width - 1:.1f}" height="{height - 1}" rx="8" '
        f'fill="{BACK}" stroke="{BORDER}"/>',
        f'<text x="{PAD}" y="{top + 22}" fill="{DIM}">{escape(title)}</text>',
    ]
    for number, line in enumerate([*typed, *shown]):
        colour = PROMPT if number < len(typed) else TEXT
        # However wide the reader's font is, columns stand where they stood.
        out.append(
            f'<text x="{PAD}" y="{top + TITLE + LINE * number + 14}" fill="{colour}" '
            f'textLength="{len(line) * WIDTH_OF_CHARACTER:.0f}" lengthAdjust="spacingAndGlyphs" '
            f'xml:space="preserve">{escape(line)}</text>'
        )
    return "\n".join(out), height


def draw(command: str, screens: list[tuple[float, list[str]]]) -> str:
    """Return the picture of a screen half way and of the last one."""
    end_s = screens[-1][0]
    half_s, half = min(screens, key=lambda each: abs(each[0] - end_s / 2))
    during, height = window(f"after {half_s:.0f} s", command, half, 0)
    after, more = window(f"after {end_s:.0f} s", command, screens[-1][1], height + 12)
    width = COLUMNS * WIDTH_OF_CHARACTER + 2 * PAD
    total = height + 12 + more
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {total}" '
        f'width="{width:.0f}" height="{total}" font-family="{escape(FONT)}" font-size="13">\n'
        f"<title>{escape(command)}</title>\n{during}\n{after}\n</svg>\n"
    )


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("picture", type=click.Path(path_type=Path))
@click.argument("command", nargs=-1, required=True)
def main(picture: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND and write PICTURE, an .svg file."""
    picture.write_text(draw(shlex.join(command), run(list(command))))


if __name__ == "__main__":
    main()

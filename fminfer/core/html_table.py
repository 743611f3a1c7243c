"""A small table of HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

MOST_CHARS = 2000  # of a cell


def make_html_table(rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values; texts are escaped, and cut if they are very long."""
    cells = []
    for name, value in rows:
        text = str(value)
        if len(text) > MOST_CHARS:
            text = f"{text[:MOST_CHARS]}… ({len(text):,} characters)"
        style = "text-align: left; white-space: pre-wrap"
        cells.append(
            f'<tr><th style="text-align: left">{escape(name)}</th>'
            f'<td style="{style}">{escape(text)}</td></tr>'
        )
    return f"<table>{''.join(cells)}</table>"

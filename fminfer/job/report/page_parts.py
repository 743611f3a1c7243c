"""Parts of a report's page: large numbers and notes."""

from __future__ import annotations

from collections.abc import Iterable

from fminfer.job.report.plain_text import escape_html


def make_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return large numbers, each with its name and its class."""
    cells = "".join(
        f'<div class="{css}"><dt>{name}</dt><dd>{escape_html(value)}</dd></div>'
        for name, value, css in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def make_notes(notes: Iterable[str]) -> str:
    """Return what a reader should know before he trusts the numbers."""
    items = "".join(f"<li>{escape_html(note)}</li>" for note in notes)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>' if items else ""

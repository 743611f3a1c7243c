"""Makes any text fit to be shown: controls, half surrogates and hidden marks are spelled out."""

from __future__ import annotations

import html
import json
import re

# What is not a character to see: controls but tab and newline, and marks that turn the
# direction of the text behind them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff]"
)
PICTURES = 0x2400  # of control characters: ␀ and so on


def _spell_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(PICTURES + code)
    return "\u2421" if code == 0x7F else f"‹U+{code:04X}›"


def make_visible(text: str) -> str:
    """Return a text in which what cannot be seen is spelled out."""
    text = _UNSEEN.sub(_spell_character, text.replace("\r\n", "\n"))
    return text.encode("utf-8", "backslashreplace").decode()  # half surrogates


class Markup(str):
    """HTML, of which nothing is to be escaped."""


def escape_html(value: object) -> str:
    """Return a value as text for HTML, also for an attribute."""
    return value if isinstance(value, Markup) else html.escape(make_visible(str(value)))


def dump_value(value: object) -> str:
    """Return a value as JSON, which may be nested deeper than it can be written."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "… (nested too deep to be shown)"


def shorten_text(text: str, most: int) -> str:
    """Return a text, or its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"

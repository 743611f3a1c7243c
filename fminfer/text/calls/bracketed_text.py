"""Finds where JSON and Python end: at the bracket that closes the first one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fminfer.text.calls.call_cursor import CallCursor, Reading


@dataclass(slots=True, frozen=True)
class Syntax:
    """Where a language has brackets and strings."""

    brackets: Mapping[str, int]  # 1: it opens; -1: it closes
    # What stands outside of strings, by "", and in strings, by their quotes.
    patterns: Mapping[str, re.Pattern[str]]


JSON = Syntax(
    {"{": 1, "}": -1},
    # A string holds no bare control characters. A model that forgets its end meets a
    # line break.
    {"": re.compile(r"[\w\s:,.+\-\[\]]*"), '"': re.compile(r'[^"\\\x00-\x1f]*')},
)
PYTHON = Syntax(
    {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1},
    {
        "": re.compile(r"[\w\s:,=.+\-]*"),
        '"': re.compile(r'[^"\\\n]*'),
        "'": re.compile(r"[^'\\\n]*"),
    },
)


def hold_brackets(
    cursor: CallCursor, syntax: Syntax, pieces: list[str]
) -> Reading[bool]:
    """Hold text from a bracket, which is there, to the one that closes it; False: none does.

    Args:
        pieces: the text goes there.
    """
    depth = 0
    quote = ""
    while True:
        yield from cursor.read_pattern(syntax.patterns[quote], pieces.append)
        character = yield from cursor.peek_character()
        if character == quote:
            quote = ""
        elif quote and character == "\\":
            cursor.hold_character(pieces)
            yield from cursor.peek_character()  # the escaped character, whatever it is
        elif not quote and character in syntax.brackets:
            depth += syntax.brackets[character]
        elif not quote and character in syntax.patterns:
            quote = character
        else:
            return False
        cursor.hold_character(pieces)
        if depth == 0:
            return True

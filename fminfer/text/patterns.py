"""Rewrites classes of regexes (`[…]`), so that they mean what they mean in their own dialect.

llguidance reads regexes as Rust's crate does. There, `&&`, `--`, `~~` and `[` inside a class are
set operators. JSON Schema's ECMA 262, Python, Lark and GBNF have none of them.
"""

from __future__ import annotations

import re

# A class ends at the first `]`. An unclosed one matches to the end, to keep searches linear.
_ECMA = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)\]|\[.*|(\.)", re.DOTALL)
_PYTHON = re.compile(r"\\.|\[(\^?)(\]?(?:\\.|[^\]\\])*)\]|\[.*", re.DOTALL)
_SETS = r"\\[dDwWsS]|\\[pP](?:\{[^}]{0,40}\}|.)"
ATOM = (
    r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xu]\{[0-9a-fA-F]{1,6}\}"
    r"|c[a-zA-Z]|.)|.)"
)
_ITEM = re.compile(f"{_SETS}|({ATOM})(?:-({ATOM}))?", re.DOTALL)
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/((?:\\.|[^/\\\n])+)(/?)')
_EMPTY = {"[^]": r"[\x00-\x{10FFFF}]", "[]": r"[^\x00-\x{10FFFF}]"}


def rewrite_pattern(pattern: str) -> str:
    """Return an ECMA 262 regex in the syntax of Rust's crate."""
    return _ECMA.sub(_rewrite_class, pattern)


def rewrite_regex(regex: str) -> str:
    """Return a regex without set operators in its classes."""
    return _PYTHON.sub(_rewrite_class, regex)


def rewrite_lark(text: str) -> str:
    """Return a Lark grammar whose regexes have no set operators."""
    return _LARK.sub(
        lambda match: f"/{rewrite_regex(match[1])}{match[2]}" if match[1] else match[0],
        text,
    )


def _rewrite_class(match: re.Match[str]) -> str:
    if match.lastindex == 3:
        return r"[^\n\r\u2028\u2029]"  # ECMA's dot
    if not match[2]:  # [^] is any character, and [] is none
        return _EMPTY.get(match[0], match[0])
    return f"[{match[1]}{_ITEM.sub(_escape_item, match[2])}]"


def _escape_item(match: re.Match[str]) -> str:
    r"""Escape possible operators. Sets such as \d and \p{L} stay; \b is a backspace here."""
    ends = [
        rf"\{atom}" if atom in "[]&~-^" else atom for atom in match.groups() if atom
    ]
    return "-".join(ends).replace(r"\b", r"\x08") or match[0]

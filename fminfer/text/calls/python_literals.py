"""Turns Python's literals into JSON. No code runs."""

from __future__ import annotations

import ast
import json
import re

_STRING = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
_TOKEN = re.compile(
    # A quote without its end takes its line, so that no other start is tried there.
    rf"""(?P<string>{_STRING}|["'](?:[^\\\n]|\\.)*)
    |\b(?P<key>[^\W\d]\w*)\s*=(?!=)
    |\b(?:True|False|None)\b
    |(?P<last_comma>,\s*(?=[)\]}}]))
    |\((?!\s*(?:{_STRING}|[^\s"'()\[\]{{}},]+)\s*\))  # what has no comma is no tuple
    |\)""",
    re.VERBOSE,
)
_SPELLINGS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = "\\'\"abfnrtvxuUN0123"  # what a backslash changes in Python


def convert_literals(text: str) -> str:
    """Return the JSON of literals, or of an object that is written `{key=literal, …}`.

    Tuples become lists. Of a text that is no literal something else is made that is no JSON.
    """
    return _TOKEN.sub(_convert_token, text)


def _convert_token(match: re.Match[str]) -> str:
    token = match[0]
    if match["key"]:
        return f'"{match["key"]}":'
    if match["last_comma"]:
        return ""
    if not match["string"]:
        return _SPELLINGS[token]
    code = _ESCAPE.sub(
        lambda match: match[0] if match[1] in _ESCAPED else "\\" + match[0], token
    )
    try:
        return json.dumps(ast.literal_eval(code))
    except (SyntaxError, ValueError):
        return token

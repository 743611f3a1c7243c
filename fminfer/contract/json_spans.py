"""Where the members of a JSON object stand in its bytes, so that they can be copied verbatim.

For text that has already passed as JSON: it follows strings and brackets and checks nothing. Every
byte is looked at once, without recursion, whatever the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_PLAIN_KEY = re.compile(rb'[ \t\r\n,]*("[^"\\]*")[ \t\r\n]*:[ \t\r\n]*')  # nothing is escaped
_PLAIN_STRING = re.compile(rb'"[^"\\]*"')
_STRING_OR_SIGN = re.compile(rb'"[^"\\]*"|["\[\]{}]')
_SCALAR_END = re.compile(rb"[,} \t\r\n]")
_LINE_BREAK = re.compile(rb"[\r\n][ \t\r\n]*")


@dataclass(slots=True, frozen=True)
class JsonMember:
    """A key with its quotes, and its value, as they were written."""

    key: bytes
    value: bytes


def find_members(raw: bytes) -> dict[str, JsonMember]:
    """Return an object's members by name.

    Of a name that comes twice the last value counts and the first place, as `json.loads` does it.
    """
    members: dict[str, JsonMember] = {}
    place = _skip_space(raw, raw.index(b"{") + 1)
    while raw[place] != ord("}"):
        plain = _PLAIN_KEY.match(raw, place)
        if plain is not None:
            key, start = plain[1], plain.end()
            name = key[1:-1].decode()
        else:
            if raw[place] == ord(","):
                place = _skip_space(raw, place + 1)
            key = raw[place : _string_end(raw, place)]
            colon = _skip_space(raw, place + len(key))
            start = _skip_space(raw, colon + 1)
            name = json.loads(key.decode())
        end = _value_end(raw, start)
        members[name] = JsonMember(key, raw[start:end])
        place = _skip_space(raw, end)
    return members


def on_one_line(raw: bytes) -> bytes:
    """Leave out line breaks and the white space after them.

    JSON has neither inside strings, so they stand between tokens, which need no space there.
    """
    return _LINE_BREAK.sub(b"", raw) if b"\n" in raw or b"\r" in raw else raw


def _skip_space(raw: bytes, place: int) -> int:
    match = _NO_SPACE.search(raw, place)
    assert match is not None, "the object has no end"
    return match.start()


def _string_end(raw: bytes, place: int) -> int:
    """Return the place behind a string whose opening quote is at `place`."""
    while True:
        place = raw.index(b'"', place + 1)
        before = place - 1
        while raw[before] == _BACKSLASH:
            before -= 1
        if (place - 1 - before) % 2 == 0:  # an odd number of backslashes escapes the quote
            return place + 1


def _value_end(raw: bytes, place: int) -> int:
    if raw[place] == _QUOTE:
        plain = _PLAIN_STRING.match(raw, place)
        return _string_end(raw, place) if plain is None else plain.end()
    if raw[place] not in b"[{":
        end = _SCALAR_END.search(raw, place)
        assert end is not None, "the object has no end"
        return end.start()
    depth = 0
    while (match := _STRING_OR_SIGN.search(raw, place)) is not None:
        place = match.end()
        sign = match.group()
        if sign == b'"':
            place = _string_end(raw, match.start())
        elif sign in (b"{", b"["):
            depth += 1
        elif sign in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return place
    raise AssertionError("the object has no end")

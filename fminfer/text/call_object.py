"""The JSON of a tool call: where it ends, and what it says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

# What JSON has outside of strings, but for braces.
OUTSIDE_STRINGS = re.compile(r"[\w\s:,.+\-\[\]]*")
# A string holds no bare control characters. A model that forgets its end meets a line break.
INSIDE_STRING = re.compile(r'[^"\\\x00-\x1f]*')


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def read_call(text: str) -> ToolCall | None:
    """Read `{"name": …, "arguments": {…}}`, or with "parameters"; None is no valid call.

    Arguments that are a string with a JSON object in it stay as they are.
    """
    try:
        call = _load(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            _load(arguments)
        elif isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        else:
            return None
        if not isinstance(name, str) or not name:
            return None
        (name + arguments).encode()  # half of a surrogate pair fits no answer
    except (KeyError, ValueError, RecursionError):
        return None
    return ToolCall(name, arguments)


def _load(text: str) -> dict[str, object]:
    value = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class ObjectScanner:
    """Finds the end of a JSON object by its braces; strings are passed over.

    `is_broken` is set at the first character that no JSON has there.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.is_broken = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, at: int) -> int:
        """Read on, to the object's end or the text's, or to what breaks it; return that place."""
        while at < len(text) and not self.is_whole:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            plain = INSIDE_STRING if self._is_in_string else OUTSIDE_STRINGS
            at = end_of(plain, text, at)
            if at < len(text):
                self._read(text[at])
                if self.is_broken:
                    break
                at += 1
        return at

    def _read(self, character: str) -> None:
        if character == '"':
            self._is_in_string = not self._is_in_string
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self.is_broken = not self._is_escaped
        elif character in "{}":
            self._depth += 1 if character == "{" else -1
            self.is_whole = self._depth == 0
        else:
            self.is_broken = True


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where a match ends that begins at a place; the pattern may match nothing."""
    found = pattern.match(text, at)
    assert found, "the pattern matches the empty text, too"
    return found.end()

"""Reads calls in the forms that write each argument between tags.

The text between tags has no type, so the types come from the schema of the function.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from fminfer.text.calls.argument_types import make_argument
from fminfer.text.calls.call_cursor import CallCursor, Reading, read_row

NAME = re.compile(r'[^<>"\n]*')


@dataclass(slots=True, frozen=True)
class XmlCalls:
    """Reads `call_start NAME name_end (key_start KEY key_end… VALUE value_end)…
    call_end closing`; before closing may stand several calls.

    White space between tags is dropped. An empty text stands for no tag. The closing tag
    may be missing.
    """

    call_start: str
    name_end: str
    key_start: str
    key_end: tuple[str, ...]
    value_end: str
    call_end: str
    closing: str = ""
    # A line break at each end of a value is not the value's.
    has_value_lines: bool = False

    def __call__(self, cursor: CallCursor) -> Reading[None]:
        """Read what is behind the opening tag."""
        yield from read_row(cursor, self.call_start, self.closing, self._read_call)

    def _read_call(self, cursor: CallCursor) -> Reading[bool]:
        """Read a call behind its start; False: it is none."""
        name = (yield from cursor.hold_pattern(NAME)).strip()
        if not name or not (yield from self._hold_tags(cursor, self.name_end)):
            return False
        cursor.begin_call(name)
        parameters = cursor.parameters.get(name)
        cursor.arguments.append("{")
        keys: set[str] = set()
        while True:
            yield from cursor.hold_pattern()
            tag = yield from cursor.hold_tag(self.key_start, self.call_end)
            if tag != self.key_start:
                break
            key = yield from cursor.hold_pattern(NAME)
            if key in keys and not cursor.is_certain:
                return False
            if not (yield from self._hold_tags(cursor, *self.key_end)):
                return False
            value = yield from cursor.hold_until(self.value_end)
            if self.has_value_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            separator = ", " if keys else ""
            cursor.arguments.append(
                f"{separator}{json.dumps(key, ensure_ascii=False)}: "
                f"{make_argument(parameters, key, value)}"
            )
            keys.add(key)
        if not tag:
            return False
        cursor.arguments.append("}")
        yield from cursor.end_call()
        return True

    def _hold_tags(self, cursor: CallCursor, *tags: str) -> Reading[bool]:
        """Hold tags one behind the other; False: something else is there."""
        for place, tag in enumerate(filter(None, tags)):
            if place:
                yield from cursor.hold_pattern()
            if not (yield from cursor.hold_tag(tag)):
                return False
        return True


QWEN3_CODER = XmlCalls(
    call_start="<function=",
    name_end=">",
    key_start="<parameter=",
    key_end=(">",),
    value_end="</parameter>",
    call_end="</function>",
    closing="</tool_call>",
    has_value_lines=True,
)
GLM45 = XmlCalls(
    call_start="",
    name_end="",
    key_start="<arg_key>",
    key_end=("</arg_key>", "<arg_value>"),
    value_end="</arg_value>",
    call_end="</tool_call>",
)
MINIMAX_M2 = XmlCalls(
    call_start='<invoke name="',
    name_end='">',
    key_start='<parameter name="',
    key_end=('">',),
    value_end="</parameter>",
    call_end="</invoke>",
    closing="</minimax:tool_call>",
)

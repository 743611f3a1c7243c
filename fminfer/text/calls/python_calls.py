"""Reads calls in the form of Python: `find(where="den", n=2)`.

All arguments have names, and all values are literals.
"""

from __future__ import annotations

import re

from fminfer.text.calls.bracketed_text import PYTHON, hold_brackets
from fminfer.text.calls.call_cursor import CallCursor, Reading
from fminfer.text.calls.python_literals import convert_literals
from fminfer.text.calls.tool_call import parse_call

NAME = re.compile(r"[\w.:/\-]*")


def read_python_call(cursor: CallCursor) -> Reading[bool]:
    """Read `name(key=value, …)`; False: it is none."""
    name = yield from cursor.hold_pattern(NAME)
    first = len(cursor.held)
    is_call = bool(name) and (yield from cursor.peek_character()) == "("
    if not is_call or not (yield from hold_brackets(cursor, PYTHON, cursor.held)):
        return False
    text = "".join(cursor.held[first:])[1:-1]
    if (call := parse_call(convert_literals(f"{{{text}}}"), name)) is None:
        return False
    cursor.begin_call(name)
    cursor.arguments.append(call.arguments)
    return True

"""Reads JSON objects: calls with their names, or the arguments of a named function.

A call may stand alone (Llama 3), between tags (Hermes), or in a list behind a tag (Mistral,
Granite, Phi-4-mini).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fminfer.text.calls.bracketed_text import JSON, hold_brackets
from fminfer.text.calls.call_cursor import WHITE_SPACE, CallCursor, Reading
from fminfer.text.calls.tool_call import parse_call

SEPARATORS = re.compile(f"[{WHITE_SPACE};]*")


def read_object(cursor: CallCursor, name: str = "") -> Reading[bool]:
    """Read a call's object, or the arguments of a function of that name; False: it is none.

    The object ends at the brace that closes it.
    """
    if (yield from cursor.peek_character()) != "{":
        return False
    if cursor.is_certain:
        return (yield from _read_certain_object(cursor, name))
    first = len(cursor.held)
    if not (yield from hold_brackets(cursor, JSON, cursor.held)):
        return False
    if (call := parse_call("".join(cursor.held[first:]), name)) is None:
        return False
    cursor.begin_call(call.name)
    cursor.arguments.append(call.arguments)
    cursor.can_end = True
    return True


def _read_certain_object(cursor: CallCursor, name: str) -> Reading[bool]:
    """Read what `read_object` does, as a grammar writes it: its arguments come in pieces."""
    has_name = not name
    if has_name:
        yield from cursor.hold_until('": "')
        name = yield from cursor.hold_until('"')
        yield from cursor.hold_until('": ')
    yield from cursor.peek_character()
    cursor.begin_call(name)
    is_whole = yield from hold_brackets(cursor, JSON, cursor.arguments)
    if has_name and is_whole:
        yield from cursor.hold_tag("}")
    return is_whole


def read_llama3_call(cursor: CallCursor) -> Reading[bool]:
    """Read `{"name": …, "parameters": {…}}`, and drop semicolons and white space behind it."""
    is_call = yield from read_object(cursor)
    if is_call:
        yield from cursor.end_call()
        yield from cursor.drop_pattern(SEPARATORS)
    return is_call


def read_tagged_call(cursor: CallCursor, closing: str) -> Reading[None]:
    """Read a call and its closing tag, which may be missing at the text's end: EOS ends it."""
    if (yield from read_object(cursor)):
        yield from cursor.hold_pattern()
        if (yield from cursor.hold_tag(closing)):
            yield from cursor.end_call()


def read_list(
    cursor: CallCursor,
    closing: str = "",
    read_call: Callable[[CallCursor], Reading[bool]] = read_object,
) -> Reading[bool]:
    """Read `[call, …]`, whose calls end one by one; False: it is none.

    Args:
        closing: a tag behind the list, which may be missing.
    """
    separator = yield from cursor.hold_tag("[")
    while separator in {"[", ","}:
        yield from cursor.hold_pattern()
        if not (yield from read_call(cursor)):
            return False
        yield from cursor.hold_pattern()
        separator = yield from cursor.hold_tag(",", "]")
        if separator:
            yield from cursor.end_call()
    if separator:
        yield from cursor.find_next_call("", closing)
    return bool(separator)

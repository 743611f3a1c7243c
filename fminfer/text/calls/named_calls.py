"""Reads calls that write a function's name before the JSON of its arguments, between tags."""

from __future__ import annotations

import re

from fminfer.text.calls.call_cursor import CallCursor, Reading, read_row
from fminfer.text.calls.json_calls import read_list, read_object

CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"

NAME = re.compile(r"[^\[\]<>{}\"`\n]*")
BEFORE_BRACKET = re.compile(r"[^\[]*")
# of Markdown, around JSON
FENCE = re.compile(r"[`json\s]*")


def read_mistral_calls(cursor: CallCursor) -> Reading[None]:
    """Read `[{"name": …, "arguments": {…}}]` or `name[ARGS]{…}`.

    Before `[ARGS]` may stand `[CALL_ID]` with an id, which is dropped.
    """
    if (yield from cursor.peek_character()) == "[":
        yield from read_list(cursor)
        return
    name = yield from cursor.hold_pattern(NAME)
    tag = yield from cursor.hold_tag(CALL_ID, ARGS)
    if tag == CALL_ID:
        yield from cursor.hold_pattern(BEFORE_BRACKET)
        yield from cursor.hold_tag(ARGS)
    yield from cursor.hold_pattern()
    if (yield from read_object(cursor, name.strip())):
        yield from cursor.end_call()


def read_deepseek_calls(cursor: CallCursor) -> Reading[None]:
    """Read DeepSeek's calls: V3 has arguments in a fence of Markdown, V3.1 as they are."""
    yield from read_row(
        cursor, "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>", _read_deepseek_call
    )


def _read_deepseek_call(cursor: CallCursor) -> Reading[bool]:
    """Read `NAME<｜tool▁sep｜>{…}`, or a kind and the name behind it; False: it is none."""
    name = yield from cursor.hold_pattern(NAME)
    if not (yield from cursor.hold_tag("<｜tool▁sep｜>")):
        return False
    fenced_name = yield from cursor.hold_pattern(NAME)
    yield from cursor.hold_pattern(FENCE)
    if not (yield from read_object(cursor, fenced_name.strip() or name.strip())):
        return False
    yield from cursor.hold_pattern(FENCE)
    if not (yield from cursor.hold_tag("<｜tool▁call▁end｜>")):
        return False
    yield from cursor.end_call()
    return True

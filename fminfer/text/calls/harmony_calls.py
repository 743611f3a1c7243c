"""Reads calls in the form of gpt-oss (Harmony): messages to functions, with a header each.

A message is `<|start|>assistant HEADER<|message|>TEXT` and a tag that ends it. The text of a
message to nobody is content, unless its channel is that of thoughts: it is dropped then.
"""

from __future__ import annotations

import re

from fminfer.text.calls.call_cursor import BEFORE_TAG, CallCursor, Reading
from fminfer.text.calls.json_calls import read_object

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END_TAGS = ("<|end|>", "<|call|>", "<|return|>")

TO_FUNCTION = "to=functions."

HEADER = re.compile(r"[^<\n]*")
FUNCTION = re.compile(rf"\b{re.escape(TO_FUNCTION)}([^\s<]+)")
RECIPIENT = re.compile(r"\bto=")
THOUGHT = re.compile(r"<\|channel\|>\s*analysis\b")


def read_harmony(cursor: CallCursor) -> Reading[None]:
    """Read messages, of which the first may lack its beginning.

    The prompt ends with `<|start|>assistant`, so the text may begin with ` to=functions.`.
    """
    yield from cursor.hold_pattern()
    if (yield from cursor.hold_tag(TO_FUNCTION)):
        yield from _read_message(cursor, TO_FUNCTION)
    while True:
        cursor.return_held()
        yield from cursor.read_pattern(BEFORE_TAG, cursor.add_content)
        tag = yield from cursor.hold_tag(START, CHANNEL, *END_TAGS)
        if tag in END_TAGS:
            cursor.held.clear()
        elif tag:
            yield from _read_message(cursor, tag)


def _read_message(cursor: CallCursor, header: str) -> Reading[None]:
    """Read a message: its header and a call or a thought. Content is left to read.

    Args:
        header: its first tag, which is held.
    """
    while not header.endswith(MESSAGE):
        header += yield from cursor.hold_pattern(HEADER)
        tag = yield from cursor.hold_tag(CHANNEL, CONSTRAIN, MESSAGE)
        if not tag:
            return
        header += tag
    if function := FUNCTION.search(header):
        yield from cursor.hold_pattern()
        if (yield from read_object(cursor, function[1])):
            yield from cursor.end_call()
    elif not RECIPIENT.search(header):
        cursor.held.clear()
        if THOUGHT.search(header):
            yield from _drop_thought(cursor)


def _drop_thought(cursor: CallCursor) -> Reading[None]:
    while not (yield from cursor.hold_tag(*END_TAGS)):
        cursor.held.clear()
        yield from cursor.drop_pattern(BEFORE_TAG)
    cursor.held.clear()

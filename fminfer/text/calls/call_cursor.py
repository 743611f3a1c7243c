"""A chat model's text as it comes, with what reading tool calls in it needs.

A form's reader is a generator that pauses where a piece of the text ends. It holds back
only what may be part of a call, and its time is linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from fminfer.text.calls.tool_call import ToolCall

WHITE_SPACE = " \t\r\n"  # JSON's
WHITE = re.compile(f"[{WHITE_SPACE}]*")
BEFORE_TAG = re.compile("[^<]*")
ANYTHING = re.compile("(?s:.*)")

Result = TypeVar("Result")
Reading = Generator[None, None, Result]  # pauses where a piece ends


class CallCursor:
    """Reads one choice's text character by character, and collects content and calls.

    Args:
        parameters: the schema of each function's arguments.
        keeps_one: what follows the first call is dropped.
        is_certain: calls keep to a grammar, so that their pieces come at once.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        keeps_one: bool = False,
        is_certain: bool = False,
    ) -> None:
        self.parameters = parameters
        self.is_certain = is_certain
        self.held: list[str] = []  # what may belong to a call
        self.arguments: list[str] = []  # of the begun call, not yet returned
        self.can_end = False  # what is held is a call's, should the text end
        self._keeps_one = keeps_one
        self._content: list[str] = []
        self._white: list[str] = []  # behind the content; a call drops it
        self._calls: list[ToolCall] = []
        self._name = ""  # of the begun call, until its first piece is returned
        self._text = ""  # the piece that is read
        self._at = 0  # how far it is read

    def begin_piece(self, text: str) -> None:
        """Go on with the next piece; the one before it is read."""
        self._text = text
        self._at = 0

    def add_content(self, text: str) -> None:
        """Add content, of which white space at the end may be dropped."""
        content = text.rstrip(WHITE_SPACE)
        if content:
            self._content += [*self._white, content]
            self._white.clear()
        self._white.append(text[len(content) :])

    def read_pattern(
        self, pattern: re.Pattern[str], add: Callable[[str], object]
    ) -> Reading[None]:
        """Read what a pattern matches, up to a character that it does not match."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match, "the pattern matches the empty text, too"
            self._at = match.end()
            add(match[0])
            if self._at < len(self._text):
                return
            yield

    def hold_pattern(self, pattern: re.Pattern[str] = WHITE) -> Reading[str]:
        """Hold what a pattern matches, and return it."""
        first = len(self.held)
        yield from self.read_pattern(pattern, self.held.append)
        return "".join(self.held[first:])

    def drop_pattern(self, pattern: re.Pattern[str] = WHITE) -> Reading[None]:
        """Drop what a pattern matches."""
        yield from self.read_pattern(pattern, list[str]().append)

    def hold_tag(self, *tags: str) -> Reading[str]:
        """Hold one of some tags, and return it; "": something else is there.

        No tag may be the beginning of another one.
        """
        length = 0
        while True:
            character = yield from self.peek_character()
            tags = tuple(tag for tag in tags if tag[length] == character)
            if not tags:
                return ""
            self.hold_character(self.held)
            length += 1
            if len(tags[0]) == length:
                return tags[0]

    def find_next_call(self, opening: str, closing: str) -> Reading[bool]:
        """Return whether another call begins with a tag, and drop a closing tag.

        Both tags may be missing; an empty text stands for no tag.
        """
        self.can_end = True
        tag = yield from self.hold_tag(*filter(None, (opening, closing)))
        self.can_end = False
        if tag == closing:
            self.held.clear()
            yield from self.drop_pattern()
        return bool(tag) and tag == opening

    def hold_until(self, tag: str) -> Reading[str]:
        """Hold all up to a tag's end; return what is before the tag."""
        before = re.compile(f"[^{tag[0]}]*")
        first = len(self.held)
        while True:
            yield from self.read_pattern(before, self.held.append)
            if (yield from self.hold_tag(tag)):
                return "".join(self.held[first:])[: -len(tag)]

    def peek_character(self) -> Reading[str]:
        """Return the next character, once it is there."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def hold_character(self, held: list[str]) -> None:
        """Hold the next character, which is there."""
        held.append(self._text[self._at])
        self._at += 1

    def begin_call(self, name: str) -> None:
        """Begin a call, whose arguments go to `arguments`."""
        self._name = name
        self.can_end = self.is_certain

    def end_call(self) -> Reading[None]:
        """Add the begun call to the calls, and drop white space behind it."""
        self._add_call()
        while self._keeps_one:
            self._at = len(self._text)
            yield
        yield from self.drop_pattern()

    def return_held(self) -> None:
        """Make content of what is held: the begun call is none, unless it is certain."""
        if self.can_end and self.is_certain:
            self._add_call()
        self.can_end = False
        self.arguments.clear()
        self.add_content("".join(self.held))
        self.held.clear()

    def finish(self) -> None:
        """End with the text, which may end a call."""
        if self.can_end:
            self._add_call()
        self.return_held()
        self._content += self._white

    def pop_results(self) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls since the last time."""
        if self.is_certain:
            self._pop_arguments()
        content = "".join(self._content)
        calls = self._calls
        self._content = []
        self._calls = []
        return content, calls

    def _add_call(self) -> None:
        """Add the begun call. All that is held is the call's."""
        self._pop_arguments()
        self.can_end = False
        self.held.clear()
        self._white.clear()

    def _pop_arguments(self) -> None:
        if arguments := "".join(self.arguments):
            self._calls.append(ToolCall(self._name, arguments))
            self._name = ""
            self.arguments.clear()


def read_row(
    cursor: CallCursor,
    opening: str,
    closing: str,
    read_call: Callable[[CallCursor], Reading[bool]],
) -> Reading[None]:
    """Read calls behind each other, each with its opening tag, up to a closing tag.

    The closing tag may be missing; an empty text stands for no tag.
    """
    has_next = not opening or bool((yield from cursor.hold_tag(opening)))
    while has_next and (yield from read_call(cursor)):
        has_next = yield from cursor.find_next_call(opening, closing)

"""Reads tool calls in a chat model's text, whole or streamed: Hermes' tags, Llama 3's JSON.

    reader = ToolCallReader("hermes")
    content, calls = reader.feed(piece)  # for each piece, as it comes
    content, calls = reader.finish()

A reader holds back only what may be part of a call. Its time is linear in the text's length, and
how the text is cut into pieces does not change what comes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from fminfer.core.config import KnownParser

HERMES_OPENING = "<tool_call>"
HERMES_CLOSING = "</tool_call>"
# Qwen3-Coder and GLM 4.5 put XML between the same tags.
OTHER_FORMS = ("<function=", "<arg_key>")
PYTHON_TAG = "<|python_tag|>"
LLAMA3_INSTRUCTION = (
    '{"name": function name, "parameters": dictionary of argument name and its value}'
)

WHITE_SPACE = " \t\r\n"  # JSON's
WHITE = re.compile(f"[{WHITE_SPACE}]*")
SEPARATORS = re.compile(f"[{WHITE_SPACE};]*")
# What JSON has outside of strings, but for braces.
OUTSIDE_STRINGS = re.compile(r"[\w\s:,.+\-\[\]]*")
# A string holds no bare control characters. A model that forgets its end meets a line break.
INSIDE_STRING = re.compile(r'[^"\\\x00-\x1f]*')

Result = TypeVar("Result")
Reading = Generator[None, None, Result]  # pauses where a piece ends


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def parse_call(text: str) -> ToolCall | None:
    """Read `{"name": …, "arguments": {…}}`, or with "parameters"; None is no valid call.

    Arguments that are a string with a JSON object in it stay as they are.
    """
    try:
        call = parse_object(text)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            parse_object(arguments)
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


def parse_object(text: str) -> dict[str, object]:
    """Return the JSON object that a text is.

    Raises:
        ValueError: it is none, or has NaN or Infinity.
        RecursionError: it is nested too deep.
    """
    value = json.loads(text, parse_constant=_reject_constant)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def find_parser(template: str) -> KnownParser | None:
    """Tell by a chat template how its model writes tool calls; None is neither form."""
    if HERMES_OPENING in template and not any(form in template for form in OTHER_FORMS):
        return "hermes"
    if PYTHON_TAG in template or LLAMA3_INSTRUCTION in template:
        return "llama3_json"
    return None


class ToolCallReader:
    """Splits one choice's text into content and tool calls.

    White space directly around calls is dropped. What is no valid call is content, verbatim.

    Args:
        keeps_one: reading stops behind the first call.
    """

    def __init__(self, parser: KnownParser, *, keeps_one: bool = False) -> None:
        self._keeps_one = keeps_one
        self._is_over = False
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._held: list[str] = []  # what may belong to a call
        self._call: ToolCall | None = None  # a valid one that waits for its closing tag
        self._text = ""  # the piece that is read
        self._at = 0  # how far it is read
        self._reading = (
            self._read_hermes() if parser == "hermes" else self._read_llama3()
        )

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Read the next piece; return the content and the calls that are certain by now."""
        if not self._is_over:
            self._text = text
            self._at = 0
            next(self._reading)
        return self._pop_results()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest, once the text has ended."""
        if self._call:
            self._end_call()
        self._release_held()
        return self._pop_results()

    def _read_hermes(self) -> Reading[None]:
        """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text.

        The last call's closing tag may be missing: models end so with EOS.
        """
        while True:
            yield from self._read_content()
            if (yield from self._hold_tag(HERMES_OPENING)):
                yield from self._read_pattern(WHITE, self._held)
                if (yield from self._hold_call()):
                    yield from self._read_pattern(WHITE, self._held)
                    if (yield from self._hold_tag(HERMES_CLOSING)):
                        self._end_call()
                        yield from self._read_pattern(WHITE, [])
                        continue
            self._fail_call()

    def _read_llama3(self) -> Reading[None]:
        """Read `{"name": …, "parameters": {…}}`, maybe after `<|python_tag|>`, one or several.

        Semicolons between calls are dropped like white space. From the first text that
        is no call on, all is content.
        """
        while True:
            yield from self._read_pattern(WHITE, self._held)
            if self._text[self._at] == PYTHON_TAG[0]:
                if not (yield from self._hold_tag(PYTHON_TAG)):
                    break
            elif (yield from self._hold_call()):
                self._end_call()
                yield from self._read_pattern(SEPARATORS, [])
            else:
                break
        self._fail_call()
        while True:
            self._release_held()
            self._content.append(self._text[self._at :])
            yield

    def _read_content(self) -> Reading[None]:
        """Read up to a `<`; the white space before it may be dropped."""
        while True:
            tag = self._text.find("<", self._at)
            text = self._text[self._at : None if tag < 0 else tag]
            self._at += len(text)
            content = text.rstrip(WHITE_SPACE)
            if content:
                self._release_held()
                self._content.append(content)
            self._held.append(text[len(content) :])
            if tag >= 0:
                return
            yield

    def _hold_tag(self, tag: str) -> Reading[bool]:
        """Hold a tag; False: something else is there."""
        for character in tag:
            if (yield from self._peek_character()) != character:
                return False
            self._hold_character()
        return True

    def _hold_call(self) -> Reading[bool]:
        """Hold a JSON object, up to the brace that ends it; False: it is no call, or no JSON."""
        first = len(self._held)  # of the object's pieces
        depth = 0
        is_in_string = False
        if (yield from self._peek_character()) != "{":
            return False
        while True:
            yield from self._read_pattern(
                INSIDE_STRING if is_in_string else OUTSIDE_STRINGS, self._held
            )
            character = self._text[self._at]
            if character == '"':
                is_in_string = not is_in_string
            elif character == "\\" and is_in_string:
                self._hold_character()
                yield from self._peek_character()  # the escaped character, whatever it is
            elif character in "{}" and not is_in_string:
                depth += 1 if character == "{" else -1
            else:
                return False
            self._hold_character()
            if depth == 0:
                self._call = parse_call("".join(self._held[first:]))
                return self._call is not None

    def _peek_character(self) -> Reading[str]:
        """Return the next character, once it is there."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _hold_character(self) -> None:
        self._held.append(self._text[self._at])
        self._at += 1

    def _read_pattern(self, pattern: re.Pattern[str], held: list[str]) -> Reading[None]:
        """Read what a pattern matches, up to a character that it does not match."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match, "the pattern matches the empty text, too"
            held.append(match[0])
            self._at = match.end()
            if self._at < len(self._text):
                return
            yield

    def _pop_results(self) -> tuple[str, list[ToolCall]]:
        content = "".join(self._content)
        calls = self._calls
        self._content = []
        self._calls = []
        return content, calls

    def _release_held(self) -> None:
        self._content += self._held
        self._held = []

    def _fail_call(self) -> None:
        """Hold on to the white space at the end only: a call may follow."""
        self._call = None
        text = "".join(self._held)
        content = text.rstrip(WHITE_SPACE)
        self._content.append(content)
        self._held = [text[len(content) :]]

    def _end_call(self) -> None:
        assert self._call, "only a valid call ends"
        self._calls.append(self._call)
        self._call = None
        self._held = []
        if self._keeps_one:
            self._is_over = True
            self._at = len(self._text)

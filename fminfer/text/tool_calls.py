"""Tool calls in the text of a chat model: Hermes' tags and Llama 3's JSON, whole or as it streams.

    reader = make_reader("hermes")
    content, calls = reader.feed(piece)  # for each piece, as it comes
    content, calls = reader.finish()

A reader holds back only what may be part of a call. Its time is linear in the text's length, and
how the text is cut into pieces does not change what comes out.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from fminfer.core.config import KnownParser

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
        call = load_object(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            load_object(arguments)
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


def load_object(text: str) -> dict[str, object]:
    """Return the JSON object that a text is; raise ValueError or RecursionError if it is none."""
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


__all__ = ["HERMES_OPENING", "ToolCall", "ToolCallReader", "find_parser", "make_reader"]

HERMES_OPENING, HERMES_CLOSING = "<tool_call>", "</tool_call>"
# Qwen3-Coder and GLM 4.5 put XML between the same tags.
OTHER_FORMS = ("<function=", "<arg_key>")
PYTHON_TAG = "<|python_tag|>"
LLAMA3_INSTRUCTION = (
    '{"name": function name, "parameters": dictionary of argument name and its value}'
)

WHITE_SPACE = " \t\r\n"  # JSON's
WHITE = re.compile(f"[{WHITE_SPACE}]*")
SEPARATORS = re.compile(f"[{WHITE_SPACE};]*")

State = Callable[[str, int], int]  # reads text from a place on, and returns where it stopped


def find_parser(template: str) -> KnownParser | None:
    """Tell by a chat template how its model writes tool calls; None is neither form."""
    if HERMES_OPENING in template and not any(form in template for form in OTHER_FORMS):
        return "hermes"
    if PYTHON_TAG in template or LLAMA3_INSTRUCTION in template:
        return "llama3_json"
    return None


def make_reader(parser: KnownParser, *, keeps_one: bool = False) -> ToolCallReader:
    """Make a reader for one choice's text, which ends behind its first call if that is wished."""
    reader = _HermesReader() if parser == "hermes" else _Llama3Reader()
    reader.keeps_one = keeps_one
    return reader


class ToolCallReader(ABC):
    """Takes a text apart into content and tool calls.

    White space directly around calls is dropped. What was begun and is no valid call is content,
    verbatim.
    """

    keeps_one = False

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._held: list[str] = []  # what may belong to a call
        self._call: ToolCall | None = None  # a valid one that waits for its closing tag
        self._read: State = self._read_content

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Read the next piece; return the content and the calls that are certain by now."""
        at = 0
        while at < len(text):
            at = self._read(text, at)
        return self._take()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest, once the text has ended."""
        if self._call:
            self._end_call()
        self._release()
        return self._take()

    @abstractmethod
    def _read_content(self, text: str, at: int) -> int:
        """Read what no call has been seen in so far."""

    @abstractmethod
    def _end_object(self) -> None:
        """Go on after the JSON of a valid call."""

    @abstractmethod
    def _read_after_call(self, text: str, at: int) -> int:
        """Drop what separates a call from what follows."""

    def _take(self) -> tuple[str, list[ToolCall]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _release(self) -> None:
        self._content += self._held
        self._held = []

    def _fail(self) -> None:
        """Hold on to the white space at the end only: a call may follow."""
        self._call = None
        text = "".join(self._held)
        content = text.rstrip(WHITE_SPACE)
        self._content.append(content)
        self._held = [text[len(content) :]]
        self._read = self._read_content

    def _end_call(self) -> None:
        assert self._call, "only a valid call ends"
        self._calls.append(self._call)
        self._call = None
        self._held = []
        self._read = (lambda text, _: len(text)) if self.keeps_one else self._read_after_call

    def _hold_white(self, text: str, at: int) -> int:
        end = end_of(WHITE, text, at)
        self._held.append(text[at:end])
        return end

    def _expect_tag(self, tag: str, then: Callable[[], None]) -> None:
        num_matched = 0

        def read(text: str, at: int) -> int:
            nonlocal num_matched
            while at < len(text) and num_matched < len(tag):
                if text[at] != tag[num_matched]:
                    self._fail()
                    return at
                self._held.append(text[at])
                num_matched += 1
                at += 1
            if num_matched == len(tag):
                then()
            return at

        self._read = read

    def _expect_object(self) -> None:
        scanner = ObjectScanner()
        first = len(self._held)  # of the object's pieces

        def read(text: str, at: int) -> int:
            end = scanner.scan(text, at)
            self._held.append(text[at:end])
            if scanner.is_whole:
                self._call = read_call("".join(self._held[first:]))
            if self._call:
                self._end_object()
            elif scanner.is_whole or scanner.is_broken:
                self._fail()
            return end

        self._read = read


class _HermesReader(ToolCallReader):
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text.

    The last call's closing tag may be missing: models end so with EOS.
    """

    def _read_content(self, text: str, at: int) -> int:
        tag = text.find("<", at)
        end = len(text) if tag < 0 else tag
        content = text[at:end].rstrip(WHITE_SPACE)
        if content:
            self._release()
            self._content.append(content)
        self._held.append(text[at + len(content) : end])
        if tag >= 0:
            self._expect_tag(HERMES_OPENING, self._open)
        return end

    def _open(self) -> None:
        self._read = self._read_opened

    def _read_opened(self, text: str, at: int) -> int:
        at = self._hold_white(text, at)
        if text.startswith("{", at):
            self._expect_object()
        elif at < len(text):
            self._fail()
        return at

    def _end_object(self) -> None:
        self._read = self._read_ended

    def _read_ended(self, text: str, at: int) -> int:
        at = self._hold_white(text, at)
        if at < len(text):
            self._expect_tag(HERMES_CLOSING, self._end_call)
        return at

    def _read_after_call(self, text: str, at: int) -> int:
        at = end_of(WHITE, text, at)
        if at < len(text):
            self._read = self._read_content
        return at


class _Llama3Reader(ToolCallReader):
    """Reads `{"name": …, "parameters": {…}}`, maybe after `<|python_tag|>`, one or several.

    Semicolons between calls are dropped like white space. From the first text that is no call on,
    all is content.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read = self._read_start

    def _read_start(self, text: str, at: int) -> int:
        at = self._hold_white(text, at)
        if text.startswith("{", at):
            self._expect_object()
        elif text.startswith(PYTHON_TAG[0], at):
            self._expect_tag(PYTHON_TAG, self._start)
        elif at < len(text):
            self._fail()
        return at

    def _start(self) -> None:
        self._read = self._read_start

    def _read_content(self, text: str, at: int) -> int:
        self._release()
        self._content.append(text[at:])
        return len(text)

    def _end_object(self) -> None:
        self._end_call()

    def _read_after_call(self, text: str, at: int) -> int:
        at = end_of(SEPARATORS, text, at)
        if at < len(text):
            self._start()
        return at

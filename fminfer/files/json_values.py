"""Splits a JSON file into its values without holding it, and explains spread objects.

No giant value is held, either. Only brackets and strings are followed; whether a value
is JSON its reader will say.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from fminfer.core.errors import DamagedInputError

# A line, or a value of a .json file. Parsed, it takes up to 25 times as much.
MAX_VALUE_BYTES = 32 << 20
HEAD_BYTES = 400  # that are kept of a longer one
Item = TypeVar("Item")


@dataclass(slots=True, frozen=True)
class CutValue:
    """The beginning of a value that is too long to be held."""

    head: bytes
    num_bytes: int  # of the whole value

    @property
    def fault(self) -> str:
        """Say that it is too long."""
        return (
            f"the line has {self.num_bytes:,} bytes, and at most {MAX_VALUE_BYTES:,} "
            "are read; put its prompts on several lines"
        )


class ValueBytes:
    """Gathers the pieces of a value; of one that is too long only the beginning."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, piece: bytes) -> None:
        if self._num_bytes <= MAX_VALUE_BYTES:
            self._parts.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_VALUE_BYTES and len(self._parts) > 1:
            self._parts = [self.head]

    @property
    def is_empty(self) -> bool:
        return not self._num_bytes

    @property
    def head(self) -> bytes:
        """Return the value if it can be held, or else its beginning."""
        whole = b"".join(self._parts)
        return whole if self._num_bytes <= MAX_VALUE_BYTES else whole[:HEAD_BYTES]

    def pop(self) -> bytes | CutValue:
        """Return the value, and begin another."""
        head = self.head
        num_bytes = self._num_bytes
        self._parts = []
        self._num_bytes = 0
        return head if num_bytes <= MAX_VALUE_BYTES else CutValue(head, num_bytes)


def cut_long_value(value: bytes) -> bytes | CutValue:
    """Return a whole value, or its beginning if it is longer than allowed."""
    is_long = len(value) > MAX_VALUE_BYTES
    return CutValue(value[:HEAD_BYTES], len(value)) if is_long else value


_IN_STRING = re.compile(rb'["\\\n]')  # a newline: the string was not closed
_IN_VALUE = re.compile(rb'["\[\]{}]')
_IN_ARRAY = re.compile(rb'["\[\]{},]')
_OPENED_BY = {b"]": ord("["), b"}": ord("{")}


def split_values(
    chunks: Iterator[bytes], *, is_array: bool
) -> Iterator[bytes | CutValue]:
    """Yield the raw bytes of each value, white space around it included.

    Args:
        chunks: what follows an array's opening bracket; or values, each an object or an array.

    Raises:
        DamagedInputError: a place from which on the values cannot be told apart.
    """
    splitter = _Splitter(is_array)
    try:
        for chunk in chunks:
            yield from splitter.feed(chunk)
    except DamagedInputError as error:
        error.rest = error.rest or splitter.rest
        raise
    rest = splitter.finish()
    if isinstance(rest, CutValue) or rest.strip():
        yield rest


class _Splitter:
    """Where in the JSON the reading is. Each byte is looked at once."""

    def __init__(self, is_array: bool) -> None:
        self._is_array = is_array
        self._brackets = bytearray(b"[" if is_array else b"")  # open ones
        self._value = ValueBytes()  # the one being read
        self._num_values = 0
        self._num_newlines = 0  # in whole chunks before
        self._is_in_string = False
        self._is_escaped = False  # the next chunk's first byte
        self._is_closed = False

    @property
    def rest(self) -> bytes:
        return self._value.head

    def feed(self, chunk: bytes) -> Iterator[bytes | CutValue]:
        """Yield the values that end in this chunk."""
        place = int(self._is_escaped)
        start = 0
        self._is_escaped = False
        while not self._is_closed and (
            match := self._choose_pattern().search(chunk, place)
        ):
            place = match.end()
            sign = match.group()
            if self._is_in_string:
                place += sign == b"\\"
                self._is_escaped = place > len(chunk)
                self._is_in_string = sign != b'"'
                if sign not in b'"\\':
                    self._raise_damage(chunk, start, place, "a string is not closed")
            elif sign == b'"':
                self._is_in_string = True
            elif self._follow_sign(chunk, start, place, sign):
                self._value.add(chunk[start : place - self._is_array])
                start = place
                yield from self._pop_value(chunk, place)
        if self._is_closed and chunk[start:].strip():
            place = len(chunk) - len(chunk[start:].lstrip()) + 1
            self._raise_damage(
                chunk, start, place, "text stands behind the array's last bracket"
            )
        self._value.add(chunk[start:])
        self._num_newlines += chunk.count(b"\n")

    def finish(self) -> bytes | CutValue:
        """Return what stands behind the last whole value."""
        if self._is_array and not self._is_closed:
            self._raise_damage(b"", 0, 0, "the array's last bracket is missing")
        if self._brackets or self._is_in_string:
            self._raise_damage(b"", 0, 0, "a bracket or a quote is not closed")
        return self._value.pop()

    def _choose_pattern(self) -> re.Pattern[bytes]:
        if self._is_in_string:
            return _IN_STRING
        return _IN_ARRAY if self._is_array and len(self._brackets) == 1 else _IN_VALUE

    def _follow_sign(self, chunk: bytes, start: int, place: int, sign: bytes) -> bool:
        """Follow a bracket or comma; tell whether a value ends with it."""
        if sign == b",":
            return True
        if sign not in _OPENED_BY:
            self._brackets += sign
            return False
        if not self._brackets or self._brackets[-1] != _OPENED_BY[sign]:
            self._raise_damage(
                chunk, start, place, f"{sign.decode()} closes what was not opened"
            )
        self._brackets.pop()
        self._is_closed = self._is_array and not self._brackets
        return not self._brackets

    def _pop_value(self, chunk: bytes, place: int) -> Iterator[bytes | CutValue]:
        value = self._value.pop()
        is_empty_array = self._is_closed and not self._num_values
        if isinstance(value, CutValue) or value.strip():
            self._num_values += 1
            yield value
        elif not is_empty_array:
            self._raise_damage(chunk, place, place, "a comma has no value beside it")

    def _raise_damage(self, chunk: bytes, start: int, place: int, reason: str) -> None:
        # The sign before `place` is where it breaks; a newline belongs to the line that it ends.
        line = self._num_newlines + chunk[: max(0, place - 1)].count(b"\n") + 1
        raise DamagedInputError(
            f"the file's JSON breaks in its line {line}: {reason}",
            self.rest + chunk[start:place],
        )


Numbered = tuple[int, bytes | CutValue]  # a line's number, and its bytes
NumberedPiece = tuple[int, bytes]
MAX_LINES = 1000
MAX_BYTES = 2**20  # of lines that may be one object
# A whole string, which stays as it is, or a comma before a closing bracket. A string that is not
# closed matches too: to search in it for another would take quadratic time.
_STRING_OR_COMMA = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|,(?=\s*[}\]])', re.DOTALL)


class ReadAhead(Generic[Item]):
    """Items that are read ahead and put back; where they break off, each reader meets that."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._back: deque[Item] = deque()
        self._damage: DamagedInputError | None = None

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._back:
            return self._back.popleft()
        if self._damage is not None:
            raise self._damage
        try:
            return next(self._items)
        except DamagedInputError as error:
            self._damage = error
            raise

    def put_back(self, items: Sequence[Item]) -> None:
        self._back.extendleft(reversed(items))


def explain_spread_objects(
    lines: Iterator[Numbered],
) -> Iterator[tuple[int, bytes | CutValue, str]]:
    """Yield each line, with what is wrong where it is a piece of a spread object, or "".

    The object's first line gets the whole story, and the others point to it.
    """
    ahead = ReadAhead(lines)
    passed = 0  # the last line of a failed search; none begins before it again
    for number, raw in ahead:
        if (
            isinstance(raw, CutValue)
            or raw.endswith(b"}")
            or not _may_begin_object(raw)
            or number < passed
        ):
            yield number, raw, ""
            continue
        pieces, is_closed = _gather_object((number, raw), ahead)
        fault = _explain_object(pieces) if is_closed else ""
        yield number, raw, fault
        if not fault:
            passed = pieces[-1][0]
            ahead.put_back(pieces[1:])
            continue
        for other, piece in pieces[1:]:
            yield (
                other,
                piece,
                f"the line is a piece of the object that begins in line {number}",
            )


def _may_begin_object(raw: bytes) -> bool:
    """Tell whether an object may begin in a line, and end in a later one."""
    is_open = raw.lstrip().startswith(b"{") and not raw.rstrip().endswith(b"}")
    return is_open and len(raw) <= MAX_BYTES


def _gather_object(
    first: NumberedPiece, ahead: ReadAhead[Numbered]
) -> tuple[list[NumberedPiece], bool]:
    """Gather lines until the brackets of the first one are closed; tell whether they are."""
    pieces = [first]
    depth = _count_open_brackets(first[1])
    num_bytes = len(first[1])
    with suppress(DamagedInputError):  # whoever reads on meets it
        while (
            depth > 0
            and len(pieces) < MAX_LINES
            and (item := next(ahead, None)) is not None
        ):
            number, raw = item
            if (
                isinstance(raw, CutValue)
                or num_bytes + len(raw) > MAX_BYTES
                or _begins_next_request(raw, first[1])
            ):
                ahead.put_back([item])
                break
            num_bytes += len(raw)
            pieces.append((number, raw))
            depth += _count_open_brackets(raw)
    return pieces, depth == 0


def _count_open_brackets(raw: bytes) -> int:
    """Count brackets that a line opens, less those that it closes; below 0: it is no JSON."""
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
    if len(bare) % 2 == 0:
        return -MAX_BYTES  # a string is not closed, and none may hold a newline
    outside = b"".join(bare[::2])
    opened = outside.count(b"{") + outside.count(b"[")
    return opened - outside.count(b"}") - outside.count(b"]")


def _begins_next_request(raw: bytes, first: bytes) -> bool:
    """Tell whether a line begins another request.

    Objects inside the first request stand further right.
    """
    left = raw.lstrip()
    return left.startswith(b"{") and len(raw) - len(left) <= len(first) - len(
        first.lstrip()
    )


def _explain_object(pieces: list[NumberedPiece]) -> str:
    """Say what is wrong with an object, or nothing if the pieces are none."""
    text = b"\n".join(raw for _, raw in pieces)
    places: list[int] = []

    def drop_comma(match: re.Match[bytes]) -> bytes:
        if match.group() != b",":
            return match.group()
        places.append(match.start())
        return b""

    mended = _STRING_OR_COMMA.sub(drop_comma, text)
    try:
        is_object = isinstance(json.loads(mended), dict)
    except (ValueError, RecursionError):
        return ""
    if not is_object:
        return ""
    message = (
        f"lines {pieces[0][0]} to {pieces[-1][0]} are one object, spread over several "
        "lines"
    )
    remedy = "Put the object on one line (jq -c . FILE does it)"
    if places:
        ends = list(accumulate(len(raw) + 1 for _, raw in pieces))
        where = dict.fromkeys(pieces[bisect_right(ends, place)][0] for place in places)
        named = ", ".join(map(str, where))
        message += f", and a comma stands before a closing bracket (line {named})"
        remedy = (
            "Remove that comma; then put the object on one line (jq -c . FILE does it)"
        )
    return (
        f"{message}. This file holds one object a line. {remedy}, or rename the file to "
        "end in .json, where objects may be spread"
    )

"""Explains objects that are spread over several lines of a file that holds one a line."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence

from fminfer.core.errors import DamagedInputError
from fminfer.files.json_values import CutValue

Numbered = tuple[int, bytes | CutValue]  # a line's number, and its bytes
NumberedPiece = tuple[int, bytes]
MAX_LINES, MAX_BYTES, MAX_TRIALS = 1000, 2**20, 32  # of what may be one object
# A whole string, which is to be left alone, or a comma before a closing bracket.
_STRING_OR_COMMA = re.compile(rb'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])')


def explain_spread(lines: Iterator[Numbered]) -> Iterator[tuple[int, bytes | CutValue, str]]:
    """Yield each line, with what is wrong where it is a piece of a spread object, or "".

    The object's first line gets the whole story, and the others point to it.

    Args:
        lines: of a file, blank ones as well. A few are read ahead.
    """
    ahead = _Ahead(lines)
    while (first := ahead.take()) is not None:
        number, raw = first
        if isinstance(raw, CutValue) or raw.endswith(b"}") or not _may_begin(raw):
            yield number, raw, ""
            continue
        pieces, fault = _find_object([(number, raw), *_gather(raw, ahead)], ahead)
        yield number, raw, fault
        for other, piece in pieces[1:]:
            yield other, piece, f"the line is a piece of the object that begins in line {number}"
    if ahead.damage is not None:
        raise ahead.damage


class _Ahead:
    """The lines that are left, of which some were looked at and put back."""

    def __init__(self, lines: Iterator[Numbered]) -> None:
        self._lines = lines
        self._back: deque[Numbered] = deque()
        self.damage: DamagedInputError | None = None  # where the lines break off

    def take(self) -> Numbered | None:
        """Return the next line; None at the end, and where the file breaks off."""
        if self._back:
            return self._back.popleft()
        try:
            return next(self._lines, None)
        except DamagedInputError as error:
            self.damage = error
            return None

    def put_back(self, lines: Sequence[Numbered]) -> None:
        self._back.extendleft(reversed(lines))


def _may_begin(raw: bytes) -> bool:
    return raw.lstrip().startswith(b"{") and not raw.rstrip().endswith(b"}")


def _gather(first: bytes, ahead: _Ahead) -> list[NumberedPiece]:
    """Take the lines that may belong to the object that begins in the first."""
    pieces: list[NumberedPiece] = []
    num_bytes = 0
    while len(pieces) < MAX_LINES and (line := ahead.take()) is not None:
        number, raw = line
        if isinstance(raw, CutValue) or _begins_another(raw, first) or num_bytes > MAX_BYTES:
            ahead.put_back([line])
            break
        num_bytes += len(raw)
        pieces.append((number, raw))
    return pieces


def _begins_another(raw: bytes, first: bytes) -> bool:
    """Tell whether a line begins another request: objects inside the first stand further right."""
    left = raw.lstrip()
    return left.startswith(b"{") and len(raw) - len(left) <= len(first) - len(first.lstrip())


def _find_object(pieces: list[NumberedPiece], ahead: _Ahead) -> tuple[list[NumberedPiece], str]:
    """Return the pieces of the object and what is wrong; the others are put back.

    Without an object the first piece is returned alone, and nothing is known of it.
    """
    ends = [place for place, (_, raw) in enumerate(pieces) if place and raw.rstrip()[-1:] == b"}"]
    for end in ends[:MAX_TRIALS]:
        fault = _explain(pieces[: end + 1])
        if fault:
            ahead.put_back(pieces[end + 1 :])
            return pieces[: end + 1], fault
    ahead.put_back(pieces[1:])
    return pieces[:1], ""


def _explain(pieces: list[NumberedPiece]) -> str:
    """Say what is wrong with an object, or nothing if the pieces are none."""
    text = b"\n".join(raw for _, raw in pieces)
    places: list[int] = []

    def drop(match: re.Match[bytes]) -> bytes:
        if match.group() != b",":
            return match.group()
        places.append(match.start())
        return b""

    mended = _STRING_OR_COMMA.sub(drop, text)
    try:
        is_object = isinstance(json.loads(mended), dict)
    except (ValueError, RecursionError):
        return ""
    if not is_object:
        return ""
    told = f"lines {pieces[0][0]} to {pieces[-1][0]} are one object, spread over several lines"
    remedy = "Put the object on one line (jq -c . FILE does it)"
    if places:
        where = dict.fromkeys(pieces[text.count(b"\n", 0, place)][0] for place in places)
        named = ", ".join(map(str, where))
        told += f", and a comma stands before a closing bracket (line {named})"
        remedy = "Remove that comma; then put the object on one line (jq -c . FILE does it)"
    return (
        f"{told}. This file holds one object a line. {remedy}, or rename the file to end in .json, "
        "where objects may be spread"
    )

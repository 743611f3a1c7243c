"""Explains objects that are spread over several lines of a file that holds one a line."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator

from fminfer.input.pieces import CutValue

Numbered = tuple[int, bytes | CutValue]  # a line's number, and its bytes
Piece = tuple[int, bytes]
MAX_LINES, MAX_BYTES, MAX_TRIALS = 1000, 2**20, 32  # of what may be one object
# A whole string, which is to be left alone, or a comma before a closing bracket.
_STRING_OR_COMMA = re.compile(rb'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])')


def explain_spread(lines: Iterator[Numbered]) -> Iterator[tuple[int, bytes | CutValue, str]]:
    """Yield each line, with what is wrong where it is a piece of a spread object, or "".

    The object's first line gets the whole story, and the others point to it.

    Args:
        lines: of a file, blank ones left out. A few are read ahead.
    """
    ahead: deque[Numbered] = deque()
    while (first := ahead.popleft() if ahead else next(lines, None)) is not None:
        number, raw = first
        if isinstance(raw, CutValue) or raw.endswith(b"}") or not _may_begin(raw):
            yield number, raw, ""
            continue
        pieces, fault = _find_object([(number, raw), *_gather(ahead, lines)], ahead)
        yield number, raw, fault
        for other, piece in pieces[1:]:
            yield other, piece, f"the line is a piece of the object that begins in line {number}"


def _may_begin(raw: bytes) -> bool:
    return raw.lstrip().startswith(b"{") and not raw.rstrip().endswith(b"}")


def _next(ahead: deque[Numbered], lines: Iterator[Numbered]) -> Numbered | None:
    return ahead.popleft() if ahead else next(lines, None)


def _gather(ahead: deque[Numbered], lines: Iterator[Numbered]) -> list[Piece]:
    """Take the lines that may belong to the object before them."""
    pieces: list[Piece] = []
    num_bytes = 0
    while len(pieces) < MAX_LINES and (line := _next(ahead, lines)) is not None:
        number, raw = line
        if isinstance(raw, CutValue) or raw.startswith(b"{") or num_bytes > MAX_BYTES:
            ahead.appendleft(line)  # another request
            break
        num_bytes += len(raw)
        pieces.append((number, raw))
    return pieces


def _find_object(pieces: list[Piece], ahead: deque[Numbered]) -> tuple[list[Piece], str]:
    """Return the pieces of the object and what is wrong; the others are put back.

    Without an object the first piece is returned alone, and nothing is known of it.
    """
    ends = [place for place, (_, raw) in enumerate(pieces) if place and raw.rstrip()[-1:] == b"}"]
    for end in ends[:MAX_TRIALS]:
        fault = _explain(pieces[: end + 1])
        if fault:
            ahead.extendleft(reversed(pieces[end + 1 :]))
            return pieces[: end + 1], fault
    ahead.extendleft(reversed(pieces[1:]))
    return pieces[:1], ""


def _explain(pieces: list[Piece]) -> str:
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

"""One line of an input: what a request is read from, and what its record is known by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(slots=True, frozen=True)
class Line:
    """One line that is not blank; `source` counts the files of a run, `number` starts at 1.

    In a `.json` file `number` counts the values, which may spread over many lines. Of a line that
    is too long to be held (`is_cut`), `raw` is the beginning. All lines of an output have one
    `clock`, whatever run answers them.
    """

    source: int
    number: int
    raw: bytes
    damage: str = ""  # why this line and the rest of its file cannot be read
    num_equal: int | None = None  # equal ones before it that count, where that is known already
    is_alone: bool = False  # lines before it in its file are not seen
    fault: str = ""  # why this line, and only it, cannot be answered
    is_cut: bool = False
    clock: str = ""  # the time that a chat template reads, in ISO format; "": now


def read_clock() -> str:
    """Return the time as `Line.clock` has it, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def as_line(number: int, request: object) -> Line:
    """Return a request as an input line. A wrong one fails alone."""
    if not isinstance(request, Mapping):
        fault = f"request {number} is a {type(request).__name__}; give a dict or a text"
        return Line(0, number, repr(request).encode(), fault=fault)
    try:
        raw = json.dumps(dict(request)).encode()  # nan stays nan, and is refused by name
    except (TypeError, ValueError, RecursionError) as error:
        fault = f"request {number} is no JSON: {error}"
        return Line(0, number, repr(request).encode(), fault=fault)
    return Line(0, number, raw)

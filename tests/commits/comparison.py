"""Compares what two runs wrote: answers byte for byte, without the times in them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

# All that differs between two runs of one commit: times, and sizes of memory.
TIMES = re.compile(rb'"request_time":\{[^{}]*\}|"created":[0-9]+')
NUMBERS = re.compile(rb"[0-9][0-9.,]*( [KMG]iB)?")
# How messages begin that only some runs print: of times and memory, of other work that slows the
# machine, of the progress of slow runs, and of kernels that are built for the first time.
SOMETIMES = re.compile(
    rb"Building kernels|time |speed |memory |warning   other work|[0-9,]+/[0-9,?]+ rows, "
)
CONTEXT = 60  # bytes that are shown around a difference


@dataclass(slots=True, frozen=True)
class Difference:
    """Where two files differ first, and by how many bytes in all."""

    file: str
    num_bytes: int
    line: int  # counted from 1
    base: bytes  # what stands there
    head: bytes

    def describe(self) -> str:
        """Say it in three lines."""
        place = f"{self.file}, line {self.line}: {self.num_bytes:,} bytes differ in all"
        return f"{place}\n  base: {self.base!r}\n  head: {self.head!r}"


def compare(file: str, base: bytes, head: bytes) -> Difference | None:
    """Compare two files line by line; None: every byte is equal.

    A byte differs where its place in the line holds another one, or lies behind the line's end.
    """
    num_bytes = 0
    first: tuple[int, bytes, bytes] | None = None
    pairs = zip_longest(base.splitlines(True), head.splitlines(True), fillvalue=b"")
    for number, (old, new) in enumerate(pairs, start=1):
        if old == new:
            continue
        places = [n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
        num_bytes += len(places) + abs(len(old) - len(new))
        if first is None:
            start = places[0] if places else min(len(old), len(new))
            shown = slice(max(0, start - CONTEXT), start + CONTEXT)
            first = (number, old[shown], new[shown])
    if first is None:
        return None
    line, old, new = first
    return Difference(file, num_bytes, line, old, new)


def without_times(records: bytes) -> bytes:
    """Return records without the fields that differ between two runs of one commit."""
    return TIMES.sub(b"", records)


def without_numbers(messages: bytes) -> bytes:
    """Return messages without their numbers, and without those that only some runs print."""
    lines = messages.splitlines(keepends=True)
    return b"".join(
        NUMBERS.sub(b"#", line) for line in lines if not SOMETIMES.match(line)
    )


def names_of_fields(text: bytes) -> bytes:
    """Return the names of all fields of a JSON document, one a line, without their values."""
    return "".join(
        f"{name}\n" for name in sorted(set(_find_names(json.loads(text))))
    ).encode()


def _find_names(value: Any, start: str = "") -> list[str]:
    if isinstance(value, list):
        return [name for each in value for name in _find_names(each, f"{start}[]")]
    if not isinstance(value, dict):
        return [start]
    return [
        name
        for key, each in value.items()
        for name in _find_names(each, f"{start}.{key}")
    ]

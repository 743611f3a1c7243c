"""Chooses the rows that a report shows, from a stream of any length: a sample, and the extremes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

Reason = Literal["sample", "slow", "long", "unlikely", "error"]
ErrorKind = tuple[str, str]  # an error's code, and its message without numbers and quoted texts
NUM_SHOWN = 200
NUM_EXTREME = 15  # of each kind
NUM_OF_KIND = 3  # errors that say the same
MAX_ERRORS = 40
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
MASK = (1 << 64) - 1


class Place(NamedTuple):
    """Where a row stands: its record can be read again."""

    file: int  # number of the file
    number: int  # of the line in that file, from 1; in a journal: of the input's line
    start: int  # byte
    size: int


@dataclass(slots=True)
class _Best:
    """The rows with the largest keys; of equal ones, the first."""

    most: int
    rows: list[tuple[float, int, Place]] = field(default_factory=list)
    least: float = math.inf  # key of all rows
    _number: int = 0

    def add(self, key: float, place: Place) -> None:
        self.least = min(key, self.least)
        self._number -= 1
        if len(self.rows) < self.most:
            heapq.heappush(self.rows, (key, self._number, place))
        elif key > self.rows[0][0]:
            heapq.heapreplace(self.rows, (key, self._number, place))

    def in_order(self) -> list[tuple[float, Place]]:
        return [(key, place) for key, _, place in sorted(self.rows, reverse=True)]

    def standing_out(self) -> list[Place]:
        """Return the places of those with more than the least key: no row is long if all are."""
        return [place for key, place in self.in_order() if key > self.least]


@dataclass(slots=True)
class RowChoice:
    """The rows to show. The same outputs give the same choice."""

    sampled: _Best = field(default_factory=lambda: _Best(NUM_SHOWN))
    slow: _Best = field(default_factory=lambda: _Best(NUM_EXTREME))
    long: _Best = field(default_factory=lambda: _Best(NUM_EXTREME))
    unlikely: _Best = field(default_factory=lambda: _Best(NUM_EXTREME))
    errors: dict[ErrorKind, list[Place]] = field(default_factory=dict)

    def add_answer(
        self, place: Place, num_drawn: int, seconds: float | None, mean_logprob: float | None
    ) -> None:
        """Consider an answered row."""
        # Multiples of the golden ratio are spread evenly, and so are rows with the largest ones.
        self.sampled.add(((place.number + place.file * 7919) * GOLDEN) & MASK, place)
        self.long.add(num_drawn, place)
        if seconds is not None:
            self.slow.add(seconds, place)
        if mean_logprob is not None:
            self.unlikely.add(-mean_logprob, place)

    def add_error(self, kind: ErrorKind, place: Place) -> None:
        """Consider a row without an answer."""
        found = self.errors.setdefault(kind, [])
        if len(found) < NUM_OF_KIND:
            found.append(place)

    def chosen(self) -> dict[Place, set[Reason]]:
        """Return the rows to show, in their order in the outputs, each with why it is shown."""
        found: dict[Place, set[Reason]] = {}
        # The first of each kind, then the second of each.
        errors = [each for places in zip_longest(*self.errors.values()) for each in places if each]
        extremes: list[tuple[Reason, list[Place]]] = [
            ("error", errors[:MAX_ERRORS]),
            ("slow", self.slow.standing_out()),
            ("long", self.long.standing_out()),
            ("unlikely", self.unlikely.standing_out()),
        ]
        for reason, places in extremes:
            for place in places:
                found.setdefault(place, set()).add(reason)
        for _, place in self.sampled.in_order():
            if place not in found and len(found) < NUM_SHOWN:
                found[place] = {"sample"}
        return dict(sorted(found.items(), key=lambda each: each[0]))

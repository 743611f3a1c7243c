"""Chooses the rows that a report shows, from a stream of any length: a sample, and the extremes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from fminfer.job.report.tally import ErrorKind

Reason = Literal["sample", "slow", "long", "unlikely", "error"]
NUM_SHOWN = 200
NUM_EXTREME = 15  # of each kind
NUM_OF_KIND = 3  # errors that say the same
MAX_ERRORS = 40
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
MASK = (1 << 64) - 1


@dataclass(slots=True, frozen=True, order=True)
class Place:
    """Where a row stands: its record can be read again."""

    file: int  # number of the output
    number: int  # of the line in that file, from 1; in a journal: of the input's line
    start: int  # byte
    size: int
    is_error: bool = False


@dataclass(slots=True)
class _Best:
    """The rows with the largest keys; of equal ones, the first."""

    most: int
    rows: list[tuple[float, int, Place]] = field(default_factory=list)
    least: float = math.inf  # key of all rows
    _number: int = 0

    def add(self, key: float, place: tuple[int, int, int, int]) -> None:
        rows = self.rows
        if key < self.least:
            self.least = key
        if len(rows) < self.most:
            self._number -= 1
            heapq.heappush(rows, (key, self._number, Place(*place)))
        elif key > rows[0][0]:
            self._number -= 1
            heapq.heapreplace(rows, (key, self._number, Place(*place)))

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
        self,
        place: tuple[int, int, int, int],
        num_drawn: int,
        seconds: float | None,
        mean_logprob: float | None,
    ) -> None:
        """Consider an answered row."""
        self.sampled.add(_mix(place[0], place[1]), place)
        self.long.add(num_drawn, place)
        if seconds is not None:
            self.slow.add(seconds, place)
        if mean_logprob is not None:
            self.unlikely.add(-mean_logprob, place)

    def add_error(self, kind: ErrorKind, place: tuple[int, int, int, int]) -> None:
        """Consider a row without an answer."""
        found = self.errors.setdefault(kind, [])
        if len(found) < NUM_OF_KIND:
            found.append(Place(*place, is_error=True))

    def chosen(self) -> dict[Place, set[Reason]]:
        """Return the rows to show, in their order in the outputs, each with why it is shown."""
        found: dict[Place, set[Reason]] = {}
        # The first of each kind, then the second of each.
        errors = [each for places in zip_longest(*self.errors.values()) for each in places if each]
        for error in errors[:MAX_ERRORS]:
            found.setdefault(error, set()).add("error")
        extremes: list[tuple[Reason, _Best]] = [
            *(("slow", self.slow), ("long", self.long), ("unlikely", self.unlikely)),
        ]
        for reason, best in extremes:
            for place in best.standing_out():
                found.setdefault(place, set()).add(reason)
        for _, place in self.sampled.in_order():
            if place not in found and len(found) < NUM_SHOWN:
                found[place] = {"sample"}
        return dict(sorted(found.items()))


def _mix(file: int, number: int) -> int:
    """Return a number that looks random, and is the same for the same row.

    Multiples of the golden ratio are spread evenly, and so are the rows with the largest ones.
    """
    return ((number + file * 7919) * GOLDEN) & MASK

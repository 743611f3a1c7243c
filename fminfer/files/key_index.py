"""Finds where the answers of an earlier run stand, by 16-byte keys, in 25 to 37 bytes each."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np

_LOW, _HIGH = slice(0, 8), slice(8, 16)


class KeyIndex:
    """Places by key. First all are added, then they are looked up."""

    def __init__(self) -> None:
        self._low, self._high = array("Q"), array("Q")  # the halves of each key
        self._places = array("q")
        self._is_used = bytearray()
        self._next = 0  # whose key will probably be asked for next
        # Once one was not: `_low` in order, and the numbers of its answers.
        self._sorted, self._order = array("Q"), array("I")

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: bytes, place: int) -> None:
        """Add an answer."""
        self._low.append(int.from_bytes(key[_LOW], "little"))
        self._high.append(int.from_bytes(key[_HIGH], "little"))
        self._places.append(place)
        self._is_used.append(0)

    def find(self, key: bytes) -> int | None:
        """Return the place of an answer with this key; None: there is none."""
        low, high = int.from_bytes(key[_LOW], "little"), int.from_bytes(key[_HIGH], "little")
        number: int | None = self._next
        if not self._is_at(self._next, low, high):
            number = self._search(low, high)
        if number is None:
            return None
        self._next = number + 1
        self._is_used[number] = 1
        return self._places[number]

    def count_unused(self) -> int:
        """Return how many answers have a key that nobody has asked for."""
        if all(self._is_used):
            return 0
        order = np.lexsort((np.frombuffer(self._high, "u8"), np.frombuffer(self._low, "u8")))
        low, high = (np.frombuffer(half, "u8")[order] for half in (self._low, self._high))
        is_new = np.append(True, (low[1:] != low[:-1]) | (high[1:] != high[:-1]))
        starts = np.flatnonzero(is_new)
        is_used = np.maximum.reduceat(np.frombuffer(self._is_used, "u1")[order], starts)
        sizes = np.diff(np.append(starts, len(order)))
        return int(sizes[is_used == 0].sum())

    def _is_at(self, number: int, low: int, high: int) -> bool:
        is_there = number < len(self._low)
        return is_there and self._low[number] == low and self._high[number] == high

    def _search(self, low: int, high: int) -> int | None:
        if not self._sorted:
            self._sort()
        place = bisect_left(self._sorted, low)
        while place < len(self._sorted) and self._sorted[place] == low:
            number = self._order[place]
            if self._high[number] == high:
                return number
            place += 1
        return None

    def _sort(self) -> None:
        halves = np.frombuffer(self._low, "u8")
        order = np.argsort(halves, kind="stable")
        self._order = array("I", order.astype("u4").tobytes())
        self._sorted = array("Q", halves[order].tobytes())

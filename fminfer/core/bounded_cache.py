"""A cache with two bounds: how many entries it keeps, and how many bytes they have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Keeps the entries that were used last. Any thread may call it.

    Args:
        max_entries: entries that it keeps at most.
        max_bytes: the largest sum of their sizes. `put` gets each size.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, or None. The key counts as just used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        return None if entry is None else entry[0]

    def put(self, key: Key, value: Value, num_bytes: int) -> list[Value]:
        """Store a value; return the values that were dropped.

        The key's former value may be among them. So is this one if it alone exceeds the bound.
        """
        dropped: list[Value] = []
        with self._lock:
            if key in self._entries:
                dropped.append(self._pop(key))
            self._entries[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while (
                len(self._entries) > self._max_entries
                or self.num_bytes > self._max_bytes
            ):
                dropped.append(self._pop(next(iter(self._entries))))
        return dropped

    def _pop(self, key: Key) -> Value:
        value, num_bytes = self._entries.pop(key)
        self.num_bytes -= num_bytes
        return value

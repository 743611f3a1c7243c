"""Answers in memory, by their keys: the ones that were used last, in their bytes."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict


class RecentAnswers:
    """The answers of the last requests. Any thread may call it.

    Args:
        size: requests whose answers are kept; the one that was not used for longest leaves.
        list_size: answers to a request that chance has a part in; once there are so many, one of
            them is drawn. 1: no such request is answered from here.
    """

    def __init__(self, size: int, list_size: int) -> None:
        self._size, self._list_size = size, list_size
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, list[bytes]] = OrderedDict()  # oldest use first
        self._random = random.SystemRandom()

    @property
    def takes_chance(self) -> bool:
        """Whether requests are answered from here that chance has a part in."""
        return self._list_size > 1

    def find(self, key: bytes, *, is_by_chance: bool) -> bytes | None:
        """Return an answer; None: there is none, or there are not enough to draw one."""
        with self._lock:
            answers = self._answers.get(key)
            if answers is None:
                return None
            self._answers.move_to_end(key)
            if not is_by_chance:
                return answers[0]
            return self._random.choice(answers) if len(answers) >= self._list_size else None

    def keep(self, key: bytes, value: bytes, *, is_by_chance: bool) -> None:
        """Keep an answer, unless there are enough of its request."""
        with self._lock:
            answers = self._answers.setdefault(key, [])
            if len(answers) < (self._list_size if is_by_chance else 1):
                answers.append(value)
            self._answers.move_to_end(key)
            while len(self._answers) > self._size:
                self._answers.popitem(last=False)

"""Tokens a second, over the last few seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fminfer.engine.stats import EngineStats

WINDOW_S = 5.0


@dataclass(slots=True, frozen=True)
class Rates:
    """Tokens a second."""

    prompt_tokens: float
    generation_tokens: float


class Throughput:
    """Looks at an engine's counts now and then.

    Args:
        read: returns the counts.
    """

    def __init__(self, read: Callable[[], EngineStats]) -> None:
        self._read = read
        self._started_s = time.monotonic()
        self._seen: deque[tuple[float, int, int]] = deque()
        self.look()

    def look(self) -> None:
        """Take note of the counts."""
        stats = self._read()
        now_s = time.monotonic()
        self._seen.append((now_s, stats.num_prompt_tokens, stats.num_generated_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def uptime_s(self) -> float:
        """Seconds since it began to look."""
        return time.monotonic() - self._started_s

    @property
    def num_tokens(self) -> int:
        """Tokens so far, when it last looked."""
        return sum(self._seen[-1][1:])

    @property
    def rates(self) -> Rates:
        """The mean over the last seconds."""
        (first_s, *first), (last_s, *last) = self._seen[0], self._seen[-1]
        passed_s = max(last_s - first_s, 1e-3)
        prompt, generated = (
            (now - before) / passed_s for before, now in zip(first, last, strict=True)
        )
        return Rates(prompt, generated)

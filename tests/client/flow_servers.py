"""Servers on a simulated clock, of several kinds, for `Flow`."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fminfer.client.flow import Flow


@dataclass
class SimulatedServer:
    """A server with `capacity` places, each of which answers in `service_s`.

    kind: "queue": more requests wait; "thrash": each further one slows all; "refuse": it
    refuses more, with 429.
    """

    capacity: float
    service_s: float = 0.2
    kind: str = "queue"
    spread: float = 0.0  # of the seconds of a request, as a part of them
    halves_at_s: float = 1e9
    seed: int = 0
    flow: Flow = field(init=False)

    def simulate(
        self, choose_limit: Callable[[], int], end_s: float, from_s: float
    ) -> float:
        """Return answers a second between two moments, with requests always waiting."""
        rng = random.Random(self.seed)
        now_s = 0.0
        ends: list[tuple[float, int]] = []  # of the requests that are computed
        num_queued = num_answers = number = 0
        sleeping: list[float] = []
        while now_s < end_s:
            capacity = self.capacity / (2 if now_s >= self.halves_at_s else 1)
            while sleeping and sleeping[0] <= now_s:
                heapq.heappop(sleeping)
            while len(ends) + num_queued < choose_limit() and len(sleeping) < 200:
                num = len(ends)
                if self.kind == "refuse" and num >= capacity:
                    heapq.heappush(sleeping, now_s + 0.5)
                    self.flow.count_trouble(now_s)
                    if len(ends) < choose_limit():
                        break
                    continue
                if self.kind == "queue" and num >= capacity:
                    num_queued += 1
                    continue
                slow = 1.0
                if self.kind == "thrash":
                    slow = max(1.0, (num + 1) / capacity) ** 2
                service_s = (
                    self.service_s * slow * (1 + self.spread * (rng.random() - 0.5))
                )
                number += 1
                heapq.heappush(ends, (now_s + service_s, number))
            now_s, _ = heapq.heappop(ends)
            if self.kind == "queue" and num_queued and len(ends) < capacity:
                num_queued -= 1
                service_s = self.service_s * (1 + self.spread * (rng.random() - 0.5))
                number += 1
                heapq.heappush(ends, (now_s + service_s, number))
            num_answers += now_s >= from_s
            self.flow.count_answer(now_s, is_full=True)
        return num_answers / (end_s - from_s)

"""How many tokens rows will draw, told from the rows of a run that have ended."""

from __future__ import annotations

import math
from bisect import bisect_right

from fminfer.engine.stats import RowEnds, RunningRows

# How many stops at an age the rate of the ages before is worth.
FIRM_STOPS = 1.0
GOLDEN = (math.sqrt(5) - 1) / 2


class RowLengths:
    """What rows draw: each draw is as often the last one as draws of that place have been so far.

    Rows in turn are long and short in every degree, so that the longest is as long as usual.

    Args:
        num_rows: that will be asked for.
    """

    def __init__(self, ends: RowEnds, running: RunningRows, num_rows: int) -> None:
        self._turn, self._num_rows = 0, max(1, num_rows)
        self._stride = round(self._num_rows * GOLDEN)
        while math.gcd(self._stride, self._num_rows) != 1:
            self._stride += 1
        drawn = [*ends.num_drawn]
        for each in running.num_drawn:
            ends.spread(each, drawn)
        num_all, num_stops = sum(drawn), sum(ends.num_stopped)
        self._rates: list[float] = []
        self._sums = [0.0]  # of all rates of the draws before each place
        if not num_stops:
            return
        rate = mean = num_stops / max(1, num_all)
        for place, (stopped, seen) in enumerate(zip(ends.num_stopped, drawn, strict=True)):
            rate = (stopped + FIRM_STOPS) / (seen + FIRM_STOPS / max(mean, rate))
            self._rates.append(rate)
            self._sums.append(self._sums[-1] + rate * (1 << place >> 1))

    def next(self, num_drawn: int, max_left: float) -> float:
        """Return what a row still draws that has drawn so many, and may draw so many more."""
        if not self._rates:
            return max_left
        self._turn = (self._turn + self._stride) % self._num_rows
        return self._after(num_drawn, max_left, -math.log((self._turn + 0.5) / self._num_rows))

    def mean(self, max_left: float) -> float:
        """Return about what a row draws that has not begun."""
        return self._after(0, max_left, 1.0) if self._rates else max_left

    def _after(self, num_drawn: int, max_left: float, wanted: float) -> float:
        """Return the draws after which the rates sum up to what is wanted."""
        first = min((num_drawn + 1).bit_length(), len(self._rates) - 1)
        start = num_drawn - ((1 << first >> 1) - 1)
        target = self._sums[first] + start * self._rates[first] + wanted
        place = min(max(bisect_right(self._sums, target) - 1, first), len(self._rates) - 1)
        at = (1 << place >> 1) - 1 + (target - self._sums[place]) / self._rates[place]
        return min(max_left, max(1.0, at - num_drawn))

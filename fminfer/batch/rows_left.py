"""What is left of a run: the steps until its last row ends, and the tokens of its rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace

from fminfer.engine.stats import EngineStats, RowEnds, RunningRows

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


# Unread and waiting rows that are looked at one by one; the others are like them. Each takes 4 µs.
MOST_UNREAD, MOST_WAITING = 512, 8192


@dataclass(slots=True)
class WorkLeft:
    """What is still to be computed."""

    num_steps: float = 0.0  # in which each running row draws once
    num_fed: float = 0.0
    num_drawn: float = 0.0
    num_keys: float = 0.0  # tokens of KV cache that drawing rows read


def work_left(stats: EngineStats, running: RunningRows, total_rows: int, most_fed: int) -> WorkLeft:
    """Expect what is left: rows take free places one by one. Unread rows are like those read.

    Args:
        most_fed: prompt tokens of a step, at most.
    """
    read = stats.read
    times_unread = max(0, total_rows - read.num_rows) / max(1, read.num_rows)
    waiting = _waiting(read.ends, running)
    num_waiting = sum(count for count, _ in waiting)
    num_unread = sum(read.ends.num_read) * times_unread
    times = max(1.0, num_unread / MOST_UNREAD)  # how many rows each of those looked at stands for
    times_waiting = max(1.0, num_waiting / MOST_WAITING)  # many wait where `n` is large
    num_rows = len(running.num_left) + round(num_waiting / times_waiting + num_unread / times)
    lengths = RowLengths(read.ends, running, num_rows)
    num_fed = _fed_left(stats, times_unread)
    num_unfed = max(1.0, num_waiting + num_unread + running.num_drawn.count(0))
    places = Places(
        _num_places(stats, lengths),
        num_prompt=read.num_tokens / max(1, sum(read.ends.num_read)),
        feeding=num_fed / num_unfed / max(1, most_fed),
    )
    for drawn, left in zip(running.num_drawn, running.num_left, strict=True):
        places.go_on(drawn, lengths.next(drawn, left))
    begun = places.work
    for length in _each([(count / times_waiting, length) for count, length in waiting]):
        places.enter(lengths.next(0, length))
    known, share = places.work, times_unread / times
    for length in _each([(count * share, length) for count, length in read.ends.read_rows]):
        places.enter(lengths.next(0, length))
    work = places.work
    work.num_fed = num_fed
    groups = ((begun, known, num_waiting, times_waiting), (known, places.work, num_unread, times))
    for before, after, number, each in groups:
        _add_others(work, before, after, each - 1, places.count, places.feeding * number / each)
    return work


def _add_others(
    work: WorkLeft, before: WorkLeft, after: WorkLeft, times: float, num_places: int, steps: float
) -> None:
    """Add so many times more what was added in between.

    Args:
        steps: that its prompts take.
    """
    num_drawn = after.num_drawn - before.num_drawn
    work.num_steps += times * max(num_drawn / num_places, steps)
    work.num_drawn += times * num_drawn
    work.num_keys += times * (after.num_keys - before.num_keys)


def _fed_left(stats: EngineStats, times_unread: float) -> float:
    """Expect the prompt tokens that are still to be fed.

    The expected saving of the prefix cache is first that of the best possible one, and then more
    and more what it has saved so far.
    """
    num_fed = stats.num_prompt_tokens - stats.num_again_tokens
    num_met = num_fed + stats.num_cached_tokens
    num_tokens = stats.read.num_tokens * (1 + times_unread)
    seen = num_met / max(1.0, num_tokens)
    share = 1 - stats.num_counted_shareable / max(1, stats.num_counted_tokens)
    if num_met:
        share += seen * (num_fed / num_met - share)
    return share * max(0.0, num_tokens - num_met)


def _waiting(ends: RowEnds, running: RunningRows) -> list[tuple[int, float]]:
    """Return how many sequences wait, and their max_tokens; the longest ones are first."""
    counts, draws = [*ends.num_open], [*ends.max_draws_open]
    for drawn, left in zip(running.num_drawn, running.num_left, strict=True):
        place = (drawn + left).bit_length()
        counts[place] -= 1
        draws[place] -= drawn + left
    pairs = zip(reversed(counts), reversed(draws), strict=True)
    return [(count, max(0.0, total / count)) for count, total in pairs if count > 0]


def _each(groups: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Yield each row's length; parts of rows of one group go to the next."""
    owed = 0.5
    for count, length in groups:
        owed += count
        for _ in range(int(owed)):
            yield length
        owed -= int(owed)


def _num_places(stats: EngineStats, lengths: RowLengths) -> int:
    """Return how many rows run at once: as many as may, if the KV cache holds them."""
    read = stats.read
    num_rows = max(1, sum(read.ends.num_read))
    each = read.num_tokens / num_rows + lengths.mean(sum(read.ends.max_draws_read) / num_rows)
    held = stats.num_kv_tokens / max(1.0, each)
    return max(1, stats.max_rows_running, int(min(stats.max_rows, held)))


class Places:
    """The rows that run at once, and the step after which each ends.

    Args:
        count: of rows that may run at once.
        num_prompt: tokens of a prompt.
        feeding: steps that a prompt takes.
    """

    def __init__(self, count: int, *, num_prompt: float, feeding: float) -> None:
        self.count = count
        self.feeding = feeding
        self._num_prompt = num_prompt
        self._fed_at = self._num_drawn = self._num_keys = 0.0
        self._ends: list[float] = []
        self._is_heap = False

    @property
    def work(self) -> WorkLeft:
        """What all rows so far take, but for their prompts."""
        num_steps = max(self._ends, default=0.0)
        return WorkLeft(num_steps, 0.0, self._num_drawn, self._num_keys)

    def go_on(self, num_drawn: int, num_draws: float) -> None:
        """Let a running row end."""
        if not num_drawn:
            self._fed_at += self.feeding
        self._ends.append(num_draws if num_drawn else self._fed_at + num_draws)
        self._count(num_drawn, num_draws)

    def enter(self, num_draws: float) -> None:
        """Let a waiting row run as soon as a place is free and it is fed."""
        if not self._is_heap:
            self._is_heap = True
            self._ends += [0.0] * (self.count - len(self._ends))
            heapify(self._ends)
        self._fed_at = max(self._fed_at, self._ends[0]) + self.feeding
        heapreplace(self._ends, self._fed_at + num_draws)
        self._count(0, num_draws)

    def _count(self, num_drawn: int, num_draws: float) -> None:
        self._num_drawn += num_draws
        self._num_keys += num_draws * (self._num_prompt + num_drawn + num_draws / 2)

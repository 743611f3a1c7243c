"""Counts of numbers in bounded memory: exact sums and extremes, values to half a thousandth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

EXACT_BITS = 11  # integers below 2^12 are kept as they are; of larger ones, the leading bits


@dataclass(slots=True)
class Histogram:
    """How often each number came.

    Args:
        scale: numbers are kept in units of 1 / scale.
    """

    scale: int = 1
    counts: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        """Count a number."""
        key = _coarsen(round(value * self.scale))  # first: it raises if it is no number
        self.counts[key] += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    @property
    def number(self) -> int:
        return self.counts.total()

    @property
    def mean(self) -> float:
        return self.total / self.number

    def values(self) -> list[tuple[float, int]]:
        """Return each number and how often it came, the least first."""
        return [(value / self.scale, count) for value, count in sorted(self.counts.items())]

    def quantile(self, share: float) -> float:
        """Return the number below which this share of all lies."""
        left = share * self.number
        for value, count in self.values():
            left -= count
            if left <= 0:
                return min(self.most, max(self.least, value))
        return self.most


def _coarsen(value: int) -> int:
    """Keep the leading bits of a number, so that there are few different ones."""
    shift = abs(value).bit_length() - EXACT_BITS - 1
    return value if shift <= 0 else (value >> shift) << shift


@dataclass(slots=True, frozen=True)
class Bin:
    """A bar of a chart: numbers from `first` up to below `end`."""

    first: float
    end: float
    count: int


def make_bins(histogram: Histogram, *, most: int = 24) -> tuple[list[Bin], bool]:
    """Return bins for a chart, and whether they widen from left to right (a log scale).

    Numbers that spread over more than a factor of 50 get widths that double.
    """
    low, high = histogram.least, histogram.most
    unit = 1 / histogram.scale
    start = next((value for value, _ in histogram.values() if value > 0), unit)
    is_log = low >= 0 and high / start > 50
    if is_log:
        edges = _int_edges(start, high, most) if histogram.scale == 1 else log_edges(start, high)
        edges = [0.0, *edges] if low < start else edges
    else:
        edges = _even_edges(low, high, most, unit)
    counts = [0] * (len(edges) - 1)
    place = 0
    for value, count in histogram.values():
        while place < len(counts) - 1 and value >= edges[place + 1]:
            place += 1
        counts[place] += count
    bins = [Bin(*each) for each in zip(edges, edges[1:], counts, strict=False)]
    return bins, is_log


def _even_edges(low: float, high: float, most: int, unit: float) -> list[float]:
    """Return edges of one width, which is 1, 2 or 5 times a power of ten."""
    least = max(unit, (high - low) / (most - 1))
    width = 10 ** math.floor(math.log10(least))
    width *= next(times for times in (1, 2, 5, 10) if times * width >= least * (1 - 1e-9))
    first, last = math.floor(low / width), math.floor(high / width)
    return [round(width * place, 10) for place in range(first, last + 2)]


def _int_edges(start: float, high: float, most: int) -> list[float]:
    """Return edges of integers whose widths grow: powers of two, and some between them."""
    exponents = range(math.floor(math.log2(start)), math.floor(math.log2(high)) + 2)
    edges = [2.0**exponent for exponent in exponents]
    halves = [1.5 * edge for edge in edges[:-1]]
    has_room = 2 * len(edges) < most and edges[0] >= 2
    return sorted([*edges, *halves]) if has_room else edges


def log_edges(start: float, high: float, digits: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Return edges whose widths grow: these digits times powers of ten."""
    decades = range(math.floor(math.log10(start)), math.floor(math.log10(high)) + 2)
    edges = [round(digit * 10.0**decade, 12) for decade in decades for digit in digits]
    first = max(place for place, edge in enumerate(edges) if edge <= start)
    last = min(place for place, edge in enumerate(edges) if edge > high)
    return edges[first : last + 1]

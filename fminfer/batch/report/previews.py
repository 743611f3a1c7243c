"""Previews for a list of texts: a line of each, which tells it from those that begin like it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

MAX_SHOWN = 80  # characters
# Of them, those before the first that is not as in the most similar text.
MIN_SHARED, MAX_SHARED = 12, 60
# Where a preview begins best: with a line, else with a sentence, else with a word.
STARTS = (re.compile(r"\n\s*(?=\S)"), re.compile(r"[.?!]\s+(?=\S)"), re.compile(r"\s+(?=\S)"))


def make_previews(texts: Sequence[str]) -> list[str]:
    """Return a line for each text: its beginning, or what differs from all other texts."""
    shared = dict.fromkeys(texts, 0)
    for one, other in pairwise(sorted(shared)):  # the most similar ones are neighbours
        number = _count_shared(one, other)
        shared[one], shared[other] = max(shared[one], number), max(shared[other], number)
    return [_make_preview(text, shared[text]) for text in texts]


def make_line(text: str, most: int) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 8 * most].split())  # spaces may follow spaces
    return line if len(line) <= most and len(text) <= 8 * most else f"{line[:most]}…"


def _make_preview(text: str, num_shared: int) -> str:
    first = num_shared - MAX_SHARED
    if first <= 0:
        return make_line(text, MAX_SHOWN)
    last = num_shared - MIN_SHARED
    found = (each.search(text, first, last + 1) for each in STARTS)  # it looks at what follows
    start = next((match.end() for match in found if match), first)
    return "…" + make_line(text[start:], MAX_SHOWN)


def _count_shared(one: str, other: str) -> int:
    """Count the first characters that two texts share; slices are compared fast."""
    most = min(len(one), len(other))
    return bisect_left(range(1, most + 1), True, key=lambda end: one[:end] != other[:end])

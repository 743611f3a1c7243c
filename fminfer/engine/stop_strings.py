"""Find stop strings: where a sequence ends, and where its text is cut."""

from __future__ import annotations


def find_stop(text: str, stops: tuple[str, ...], num_new: int) -> tuple[int, str] | None:
    """Return where the earliest stop string begins in `text`, and which it is, or None.

    If several begin at one place, the one listed first counts.

    Args:
        num_new: how many of the text's last characters were not searched before. A stop string may
            begin before them, but not end there.
    """
    found = []
    for stop in stops:
        at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if at >= 0:
            found.append((at, stop))
    return min(found, key=lambda place: place[0], default=None)


def len_of_possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return how many characters at a text's end may be the beginning of a stop string.

    A complete stop string in the text was skipped under `min_tokens`, and stays so.
    """
    longest = max(map(len, stops), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        length = len(text) - start
        if any(len(stop) > length and stop.startswith(text[start:]) for stop in stops):
            return length
    return 0

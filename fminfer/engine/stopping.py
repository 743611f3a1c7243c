"""When a sequence ends, and where its text is cut. It knows no tokenizer and no model."""

from __future__ import annotations


def find_stop(text: str, stops: tuple[str, ...], num_new: int) -> int | None:
    """Return where the earliest stop string begins in `text`, or None.

    Args:
        num_new: how many of the text's last characters were not searched before. A stop string may
            begin before them.
    """
    if not stops:
        return None
    longest = max(len(stop) for stop in stops)
    start = max(0, len(text) - num_new - longest + 1)
    found = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found, default=None)

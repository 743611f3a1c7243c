"""Words of messages that more than one file needs."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `1,234 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

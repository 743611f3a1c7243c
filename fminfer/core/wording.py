"""Words of messages that more than one file needs."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 row`, `1,234 rows`.

    Args:
        plural: of the noun, if it is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

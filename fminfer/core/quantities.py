"""Quantities as people read them: numbers with their nouns, bytes, seconds, dtypes."""

from __future__ import annotations

from collections.abc import Sequence


def with_noun(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 row`, `1,234 rows`.

    `plural` is for nouns whose plural is not made by an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def list_few(names: Sequence[object], most: int, noun: str = "") -> str:
    """Name the first few of some things: `a, b and 3 more`, or `a, b and 3 more folders`."""
    named = ", ".join(map(str, names[:most]))
    rest = len(names) - most
    if rest <= 0:
        return named
    return (
        f"{named} and {with_noun(rest, f'more {noun}') if noun else f'{rest:,} more'}"
    )


def describe_share(share: float) -> str:
    """Write 0.931 as 93%, and 0.000013 as 0.0013%."""
    percent = 100 * share
    if percent < 0.0001:
        return "less than 0.0001%"
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def describe_bytes(count: int) -> str:
    """Write 1610612736 as 1.50 GiB."""
    return (
        f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
    )


def describe_dtypes(dtype: str, of_weights: str) -> str:
    """Name the dtype of the arithmetic, and that of weights where it is another one."""
    return (
        f"{dtype} with {of_weights} weights" if of_weights not in ("", dtype) else dtype
    )


def describe_seconds(seconds: float) -> str:
    """Write 3725.0 as 1:02:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def describe_short_time(seconds: float) -> str:
    """Write 1.25 as 1.2 s, and 3725.0 as 1:02:05."""
    return describe_seconds(seconds) if seconds >= 60 else f"{seconds:.1f} s"

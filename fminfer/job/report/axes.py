"""Round numbers for the axes of charts."""

from __future__ import annotations

import math

from fminfer.core.quantities import show_seconds

UNIT = "\u00a0s"  # a line does not break before it
TIME_STEPS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 14400, 21600, 43200, 86400),
)


def find_ticks(most: float, number: int = 4) -> list[float]:
    """Return round numbers from 0 to at least `most`, about so many; whole ones up to a whole."""
    if most <= 0:
        return [0.0, 1.0]
    is_whole = most == int(most)  # as counts are
    least = max(most / number, float(is_whole))
    unit = 10 ** math.floor(math.log10(least))
    steps = [unit * times for times in (1, 2, 2.5, 5, 10) if unit * times % 1 == 0 or not is_whole]
    step = next(step for step in steps if step >= least * (1 - 1e-9))
    return [step * place for place in range(math.ceil(most / step - 1e-9) + 1)]


def find_time_ticks(most_s: float, number: int = 6) -> list[float]:
    """Return round times from 0 up to `most_s`, at most about so many."""
    fitting = (step for step in TIME_STEPS if most_s / step <= number)
    step = next(fitting, 86400 * math.ceil(most_s / number / 86400))
    return [step * place for place in range(int(most_s / step + 1e-9) + 1)]


def show_number(value: float) -> str:
    """Write a number for an axis: `1,200`, `35k`, `1.2M`, `0.05`."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}" if size < 1e12 else f"{value:.1e}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show_time(seconds: float) -> str:
    """Write a time: `0.25 s`, `42 s`, `3:05`, `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.3g}{UNIT}"
    return show_seconds(seconds)


def show_share(share: float) -> str:
    """Write a share; one that is not all or nothing does not look like it."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"


def show_exactly(seconds: float) -> str:
    """Write a time with its digits: `0.254 s`, `41.3 s`, `3:05`."""
    if seconds >= 60:
        return show_seconds(seconds)
    return f"{seconds:.1f}{UNIT}" if seconds >= 10 else f"{seconds:.3f}{UNIT}"

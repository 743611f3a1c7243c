"""The picture of `fminfer bench --plot`: an SVG of figures by batch size, and memory by rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fminfer.core.messages import RankMemory
from fminfer.job.report.charts import find_ticks, show_number
from fminfer.job.report.plain_text import escape_html

COLOURS = ("#4f86b8", "#e8983e", "#5b9a5b", "#a05fa0")
FORECAST = "#333"
OOM = "#b03030"
GRID = "#ddd"
WIDTH = 840
LEFT = 70
PLOT = 740  # pixels: of the picture, left of the plots, of the plots
TOP = 76
HEIGHT = 220
ROW = 24
TOLD = 340  # to the right of the bars, for the numbers
MOST_TICKS = 9


# By name: batch sizes and their figures; None: out of memory.
Curves = Mapping[str, Sequence[tuple[int, float | None]]]


def draw_bench(
    title: str, y_name: str, curves: Curves, ranks: Sequence[RankMemory]
) -> str:
    """Return the picture, with a logarithmic axis and batch sizes at equal distances."""
    top = TOP + HEIGHT + 90
    bottom = top + ROW * len(ranks) + 40
    parts = [
        _make_text(LEFT, 26, title, 'font-weight="bold"'),
        *_draw_curves(y_name, curves),
        *_draw_ranks(ranks, top),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom}" '
        f'viewBox="0 0 {WIDTH} {bottom}" font-family="sans-serif" font-size="13">'
        '<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def find_log_ticks(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten around both numbers, or the powers alone."""
    powers = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 2)
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1,)):
        candidates = [
            round(digit * 10.0**power, 12) for power in powers for digit in digits
        ]
        first = max(place for place, tick in enumerate(candidates) if tick <= least)
        last = next(
            n for n, tick in enumerate(candidates) if tick >= most and n > first
        )
        ticks = candidates[first : last + 1]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def _draw_curves(y_name: str, curves: Curves) -> Iterator[str]:
    """Draw the figures by batch size, and `oom` where a size ran out of memory."""
    yield _make_text(LEFT, TOP - 24, f"{y_name}, by batch size")
    values = [value for points in curves.values() for _, value in points if value]
    ticks = find_log_ticks(min(values, default=1), max(values, default=1))
    sizes = sorted({size for points in curves.values() for size, _ in points})
    columns = {
        size: LEFT + PLOT * (i + 0.5) / len(sizes) for i, size in enumerate(sizes)
    }

    def height(value: float) -> float:
        share = math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
        return TOP + HEIGHT * (1 - share)

    for tick in ticks:
        yield _make_line(LEFT, height(tick), LEFT + PLOT, height(tick), GRID)
        yield _make_text(
            LEFT - 8, height(tick) + 4, show_number(tick), 'text-anchor="end"'
        )
    for size, x in columns.items():
        yield _make_text(x, TOP + HEIGHT + 20, f"{size:,}", 'text-anchor="middle"')
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        if len(curves) > 1:
            x = LEFT + PLOT - 110 * (len(curves) - number)
            yield f'<circle cx="{x}" cy="{TOP - 28}" r="5" fill="{colour}"/>'
            yield _make_text(x + 10, TOP - 24, name)
        places = [
            (columns[size], height(value), value) for size, value in points if value
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y, value in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
            if len(curves) == 1:
                yield _make_text(x + 7, y - 7, f"{value:.3g}")
        for size in (size for size, value in points if not value):
            fill = f'text-anchor="middle" fill="{OOM if len(curves) == 1 else colour}"'
            y = (
                TOP + 16
                if len(curves) == 1
                else TOP + HEIGHT - 8 - 16 * (len(curves) - 1 - number)
            )
            yield _make_text(columns[size], y, "oom", fill)


def _draw_ranks(ranks: Sequence[RankMemory], top: float) -> Iterator[str]:
    """Draw a bar for each rank's peak, and a line for its forecast."""
    yield _make_text(
        LEFT, top - 24, "Peak memory of each rank, GiB; the line is the forecast"
    )
    sizes = [size for each in ranks for size in (each.peak_bytes, each.foreseen_bytes)]
    ticks = find_ticks(max(sizes, default=0) / 2**30)
    scale = (PLOT - TOLD) / ticks[-1] / 2**30
    bottom = top + ROW * len(ranks)
    for tick in ticks:
        x = LEFT + tick * 2**30 * scale
        yield _make_line(x, top - 6, x, bottom, GRID)
        yield _make_text(x, bottom + 16, show_number(tick), 'text-anchor="middle"')
    for number, each in enumerate(ranks):
        y = top + ROW * number
        x = LEFT + each.foreseen_bytes * scale
        yield _make_text(LEFT - 8, y + 13, f"rank {each.rank}", 'text-anchor="end"')
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{each.peak_bytes * scale:.1f}" height="{ROW - 6}" '
            f'fill="{COLOURS[0]}"/>'
        )
        yield _make_line(x, y - 2, x, y + ROW - 4, FORECAST, 2.5)
        yield _make_text(
            LEFT + PLOT - TOLD + 20, y + 13, each.to_text(), 'font-size="12"'
        )


def _make_text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape_html(text)}</text>'


def _make_line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )

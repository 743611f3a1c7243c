"""Charts as inline SVG: positions in per cent of the width, so that letters keep their size."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fminfer.core.quantities import describe_seconds
from fminfer.job.report.plain_text import escape_html

TIME_STEPS = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    14400,
    21600,
    43200,
    86400,
)
TOP = 10
HEIGHT = 150
BOTTOM = 22  # pixels above the plot, of it, and for the labels below it
MAX_LABELS = 5  # on the x axis
MAX_BARS = 24
MAX_BAR = 20  # per cent of the plot that the bar of one number is wide


def find_ticks(most: float, number: int = 4) -> list[float]:
    """Return about so many round numbers, from 0 to at least `most`.

    They are whole if `most` is.
    """
    if most <= 0:
        return [0.0, 1.0]
    is_whole = most == int(most)  # as counts are
    least = max(most / number, float(is_whole))
    unit = 10 ** math.floor(math.log10(least))
    steps = [
        unit * times
        for times in (1, 2, 2.5, 5, 10)
        if unit * times % 1 == 0 or not is_whole
    ]
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
    is_plain = size >= 100 or value == int(value)
    return f"{value:,.0f}" if is_plain else f"{value:.3g}"


def show_time(seconds: float) -> str:
    """Write a time: `0.25 s`, `42 s`, `3:05`, `1:02:05`."""
    return f"{seconds:.3g}\u00a0s" if seconds < 60 else describe_seconds(seconds)


@dataclass(slots=True, frozen=True)
class Bar:
    """What came to from `first` up to below `end`: tokens, or seconds of a run."""

    first: float
    end: float
    heights: Sequence[float]  # one upon the other


def count_lengths(counts: Counter[int]) -> list[Bar]:
    """Return about `MAX_BARS` bars at most; their widths double where numbers spread far."""
    low, high = min(counts), max(counts)
    start = min((value for value in counts if value > 0), default=1)
    if low >= 0 and high > 50 * start:
        edges = [
            1 << power for power in range(start.bit_length() - 1, high.bit_length() + 1)
        ]
        if 2 * len(edges) < MAX_BARS and edges[0] >= 2:
            edges += [edge + edge // 2 for edge in edges[:-1]]
        edges = sorted(edges if low else [0, *edges])
    else:
        least = (high - low) / (MAX_BARS - 1)
        widths = (
            digit * 10**power for power in itertools.count() for digit in (1, 2, 5)
        )
        width = next(width for width in widths if width >= least)
        edges = [*range(low // width * width, high // width * width + width + 1, width)]
    numbers = [0] * (len(edges) - 1)
    for value, count in counts.items():
        numbers[bisect_right(edges, value) - 1] += count
    return [
        Bar(*span, [number])
        for span, number in zip(pairwise(edges), numbers, strict=True)
    ]


def make_histogram(title: str, counts: Counter[int]) -> str:
    """Return a chart of how often each number came; all bars look equally wide."""
    bars = count_lengths(counts)
    slot = 100 / len(bars)
    is_each = all(bar.end - bar.first == 1 for bar in bars)  # a bar for each number
    width = min(0.84 * slot, MAX_BAR) if is_each else 0.84 * slot
    ticks = find_ticks(max(bar.heights[0] for bar in bars))
    drawn = ""
    for place, bar in enumerate(bars):
        span = f"{bar.first:,}" if is_each else f"{bar.first:,} – {bar.end - 1:,}"
        x = (place + 0.5) * slot - width / 2
        drawn += _draw_bar(
            x, width, bar, ticks[-1], ("bar",), f"{span}: {bar.heights[0]:,}"
        )
    edges = [bar.first for bar in bars] + ([] if is_each else [bars[-1].end])
    shift = 0.5 if is_each else 0.0  # under the bar, or between two
    labels = [((i + shift) * slot, show_number(edge)) for i, edge in enumerate(edges)]
    note = _describe_lengths(counts)
    if len({bar.end - bar.first for bar in bars}) > 1:
        note += "; bars widen to the right"
    return _make_figure(title, note, ticks, drawn + _draw_labels(labels))


def _describe_lengths(counts: Counter[int]) -> str:
    total = counts.total()
    mean = sum(value * count for value, count in counts.items()) / total
    ordered = sorted(counts)
    ranks = [*accumulate(counts[value] for value in ordered)]
    median, tail = (
        ordered[bisect_right(ranks, share * (total - 1))] for share in (0.5, 0.99)
    )
    shown = [show_number(value) for value in (mean, median, tail, ordered[-1])]
    return "mean {}, median {}, 99 % up to {}, longest {}".format(*shown)


def make_time_line(
    title: str,
    note: str,
    bars: Sequence[Bar],
    names: dict[str, str],
    breaks: Sequence[float],
) -> str:
    """Return bars over time, without a space between them.

    Args:
        names: of each part of a bar, by its class.
        breaks: seconds at which another run begins.
    """
    scale = 100 / bars[-1].end
    ticks = find_ticks(max(sum(bar.heights) for bar in bars))
    inner = ""
    for bar in bars:
        span = f"{show_time(bar.first)} – {show_time(bar.end)}"
        named_heights = zip(bar.heights, names.values(), strict=True)
        numbers = ", ".join(
            f"{show_number(height)} {name}" for height, name in named_heights
        )
        x = bar.first * scale
        width = (bar.end - bar.first) * scale
        inner += _draw_bar(x, width, bar, ticks[-1], [*names], f"{span}: {numbers}")
    for at in breaks:
        x_text = f"{at * scale:.2f}%"
        inner += (
            f'<line class="break" x1="{x_text}" x2="{x_text}" y1="{TOP}" '
            f'y2="{TOP + HEIGHT}">'
        )
        inner += "<title>another run begins</title></line>"
    labels = [(at * scale, show_time(at)) for at in find_time_ticks(bars[-1].end)]
    keys = "".join(
        f'<li><svg aria-hidden="true"><rect class="{css}" width="100%" height="100%"/></svg>'
        f"{escape_html(name)}</li>"
        for css, name in names.items()
    )
    return _make_figure(title, note, ticks, inner + _draw_labels(labels), keys)


def _draw_bar(
    x: float, width: float, bar: Bar, top: float, classes: Sequence[str], title: str
) -> str:
    """Return a bar's parts, one upon the other; `x` and `width` are in per cent of the plot."""
    drawn = ""
    y = float(TOP + HEIGHT)
    for css, number in zip(classes, bar.heights, strict=True):
        if not number:
            continue
        # a single row among a million is seen, too
        height = max(HEIGHT * number / top, 1.5)
        y -= height
        drawn += (
            f'<rect class="{css}" x="{x:.3f}%" width="{width:.3f}%" y="{y:.1f}" '
            f'height="{height:.1f}"><title>{escape_html(title)}</title></rect>'
        )
    return drawn


def _make_figure(
    title: str, note: str, ticks: Sequence[float], inner: str, keys: str = ""
) -> str:
    """Return a chart: title, a line of figures, keys of colours, and a plot with its axis."""
    total = TOP + HEIGHT + BOTTOM
    numbers = grid = ""
    for tick in ticks:
        y = TOP + HEIGHT * (1 - tick / ticks[-1])
        numbers += f'<text x="100%" y="{y + 4:.1f}" text-anchor="end">{show_number(tick)}</text>'
        grid += f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
    listed = f'<ul class="keys">{keys}</ul>' if keys else ""
    return (
        f'<figure class="chart"><figcaption><h3>{escape_html(title)}</h3>'
        f"<p>{escape_html(note)}</p></figcaption>{listed}"
        '<div class="plot">'
        f'<svg class="axis" height="{total}" aria-hidden="true">{numbers}</svg>'
        f'<svg class="area" height="{total}" role="img" '
        f'aria-label="{escape_html(f"{title}. {note}")}">'
        f"{grid}{inner}</svg></div></figure>"
    )


def _draw_labels(labels: Sequence[tuple[float, str]]) -> str:
    """Return some of the labels of the x axis: the first, and others in equal distances."""
    step = max(1, -(-(len(labels) - 1) // MAX_LABELS))
    texts = []
    for x, text in labels[::step]:
        anchor = "start" if x < 4 else "end" if x > 96 else "middle"
        texts.append(
            f'<line class="tick" x1="{x:.2f}%" x2="{x:.2f}%" y1="{TOP + HEIGHT}" '
            f'y2="{TOP + HEIGHT + 4}"/><text x="{x:.2f}%" y="{TOP + HEIGHT + 17}" '
            f'text-anchor="{anchor}">{escape_html(text)}</text>'
        )
    return "".join(texts)

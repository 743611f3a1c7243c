"""Charts as inline SVG: positions in per cent of the width, so that letters keep their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fminfer.core.quantities import show_seconds
from fminfer.job.report.histogram import Bin
from fminfer.job.report.plain_text import escape

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


TOP, HEIGHT, BOTTOM = 10, 150, 22  # pixels above the plot, of it, and for the labels below it
MAX_LABELS = 5  # on the x axis
MAX_TOLD = 24  # rows of a chart's table of numbers
MAX_BAR = 20  # per cent of the plot that the bar of one number is wide


@dataclass(slots=True, frozen=True)
class Series:
    """A curve over time: heights of steps. Their widths are given apart."""

    name: str
    css: str
    heights: Sequence[float]


def make_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, css: str = "") -> str:
    """Return an HTML table; all columns but the first are numbers. `Markup` stays as it is."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll {css}" tabindex="0" role="group" aria-label="Table">{table}</div>'


def make_figure(title: str, note: str, plot: str, numbers: str = "", *, css: str = "") -> str:
    """Return a chart with its title, a line of figures, and a table of numbers if it has any."""
    details = f"<details><summary>Numbers</summary>{numbers}</details>" * bool(numbers)
    return (
        f'<figure class="chart {css}"><figcaption><h3>{escape(title)}</h3>'
        f"{f'<p>{escape(note)}</p>' * bool(note)}</figcaption>{plot}{details}</figure>"
    )


def make_histogram(
    title: str, note: str, bins: list[Bin], show: Callable[[float], str], *, is_int: bool
) -> str:
    """Return a chart with a bar for each bin; all bars are equally wide, also on a log scale."""
    ticks = find_ticks(max(each.count for each in bins))
    top, slot = ticks[-1], 100 / len(bins)
    is_each = is_int and all(each.end - each.first == 1 for each in bins)  # a bar for each number
    width = min(0.84 * slot, MAX_BAR) if is_each else 0.84 * slot
    bars = []
    for place, each in enumerate(bins):
        height = HEIGHT * each.count / top
        if each.count:
            height = max(height, 1.5)  # a single row among a million is seen, too
        told = f"{_show_range(each, show, is_int)}: {each.count:,}"
        bars.append(
            f'<rect class="bar" x="{(place + 0.5) * slot - width / 2:.3f}%" width="{width:.3f}%" '
            f'y="{TOP + HEIGHT - height:.1f}" height="{height:.1f}">'
            f"<title>{escape(told)}</title></rect>"
        )
    edges = [each.first for each in bins] + ([] if is_each else [bins[-1].end])
    shift = 0.5 if is_each else 0.0  # under the bar, or between two
    labels = _place_labels([((i + shift) * slot, show(edge)) for i, edge in enumerate(edges)])
    plot = _make_plot(ticks, "".join(bars) + labels, f"{title}. {note}")
    rows = [(_show_range(each, show, is_int), f"{each.count:,}") for each in bins if each.count]
    return make_figure(title, note, plot, make_table(("from – to", "number"), rows))


def _show_range(each: Bin, show: Callable[[float], str], is_int: bool) -> str:
    if not is_int:
        return f"{show(each.first)} – {show(each.end)}"
    last = each.end - 1
    return f"{each.first:,.0f}" if last <= each.first else f"{each.first:,.0f} – {last:,.0f}"


def make_shares(title: str, note: str, counts: Sequence[tuple[str, int]]) -> str:
    """Return bars from left to right, one for each name, with its number and share."""
    total = max(1, sum(count for _, count in counts))
    most = max((count for _, count in counts), default=1)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="wide"><svg class="share" '
        f'aria-hidden="true"><rect class="bar" width="{100 * count / most:.2f}%" height="100%" '
        f'rx="2"/></svg></td><td>{count:,}</td><td>{show_share(count / total)}</td></tr>'
        for name, count in counts
    )
    return make_figure(title, note, f'<table class="shares"><tbody>{rows}</tbody></table>')


def make_curves(
    title: str,
    note: str,
    widths: Sequence[float],
    series: Sequence[Series],
    breaks: Sequence[float],
) -> str:
    """Return curves over time, one upon the other.

    Args:
        widths: seconds of each step.
        breaks: seconds at which another run begins.
    """
    total_s = sum(widths)
    sums = [sum(heights) for heights in zip(*(each.heights for each in series), strict=True)]
    ticks = find_ticks(max(sums))
    areas, below = [], [0.0] * len(widths)
    for each in series:
        above = [low + height for low, height in zip(below, each.heights, strict=True)]
        areas.append(
            f'<path class="{each.css}" d="{_path(widths, below, above, ticks[-1], total_s)}"/>'
        )
        below = above
    inner = (
        f'<svg x="0" y="{TOP}" width="100%" height="{HEIGHT}" viewBox="0 0 1000 {HEIGHT}" '
        f'preserveAspectRatio="none">{"".join(areas)}</svg>'
    )
    lines = "".join(
        f'<line class="break" x1="{100 * at / total_s:.2f}%" x2="{100 * at / total_s:.2f}%" '
        f'y1="{TOP}" y2="{TOP + HEIGHT}"><title>another run begins</title></line>'
        for at in breaks
    )
    labels = _place_labels([(100 * at / total_s, show_time(at)) for at in find_time_ticks(total_s)])
    plot = _make_plot(ticks, inner + lines + labels, f"{title}. {note}")
    if len(series) > 1:
        keys = "".join(
            f'<li><svg aria-hidden="true"><rect class="{each.css}" width="100%" height="100%"/>'
            f"</svg>{escape(each.name)}</li>"
            for each in series
        )
        plot = f'<ul class="keys">{keys}</ul>{plot}'
    return make_figure(title, note, plot, _tell_curves(widths, series))


def _path(
    widths: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    top: float,
    total_s: float,
) -> str:
    """Return the outline of an area: steps there above, and back below."""

    def place(at_s: float, value: float) -> str:
        return f"{1000 * at_s / total_s:.1f} {HEIGHT * (1 - value / top):.1f}"

    ends = [*pairwise(accumulate(widths, initial=0.0))]
    there = [place(at, height) for span, height in zip(ends, above, strict=True) for at in span]
    back = [place(at, height) for span, height in zip(ends, below, strict=True) for at in span]
    return f"M{' '.join(there)} {' '.join(reversed(back))}Z"


def _tell_curves(widths: Sequence[float], series: Sequence[Series]) -> str:
    """Return the table of a curve's numbers, with few rows: means of neighbours."""
    step = -(-len(widths) // MAX_TOLD)
    rows, at_s = [], 0.0
    for first in range(0, len(widths), step):
        part = slice(first, first + step)
        span_s = sum(widths[part])
        means = [
            sum(w * h for w, h in zip(widths[part], each.heights[part], strict=True)) / span_s
            for each in series
        ]
        rows.append((f"{show_time(at_s)} – {show_time(at_s + span_s)}", *map(show_number, means)))
        at_s += span_s
    return make_table(("time", *(each.name for each in series)), rows)


def _make_plot(ticks: Sequence[float], inner: str, told: str) -> str:
    """Return a plot beside its y axis."""
    total = TOP + HEIGHT + BOTTOM
    heights = [TOP + HEIGHT * (1 - tick / ticks[-1]) for tick in ticks]
    numbers = "".join(
        f'<text x="100%" y="{y + 4:.1f}" text-anchor="end">{show_number(tick)}</text>'
        for tick, y in zip(ticks, heights, strict=True)
    )
    grid = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights
    )
    return (
        f'<div class="plot"><svg class="axis" height="{total}" aria-hidden="true">{numbers}</svg>'
        f'<svg class="area" height="{total}" role="img" aria-label="{escape(told)}">'
        f"{grid}{inner}</svg></div>"
    )


def _place_labels(labels: Sequence[tuple[float, str]]) -> str:
    """Return some of the labels of the x axis: the first, and others in equal distances."""
    step = max(1, -(-(len(labels) - 1) // MAX_LABELS))
    texts = []
    for x, text in labels[::step]:
        anchor = "start" if x < 4 else "end" if x > 96 else "middle"
        texts.append(
            f'<line class="tick" x1="{x:.2f}%" x2="{x:.2f}%" y1="{TOP + HEIGHT}" '
            f'y2="{TOP + HEIGHT + 4}"/><text x="{x:.2f}%" y="{TOP + HEIGHT + 17}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )
    return "".join(texts)

#!/usr/bin/env python
"""Draws traces of `fminfer run --trace` as one SVG picture, a row a rank, colours by phase.

scripts/plot_trace.py trace.json --from 4 --to 8 --title "3 in flight" -o picture.svg
scripts/plot_trace.py a.json b.json --title "3 in flight" --title "1 in flight" -o picture.svg
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import click

COLOURS = {"prefill": "#e8983e", "mixed": "#c9b458", "decode": "#4f86b8"}
OF_LAYERS = {"wait": "#d05f5f", "compute": "#7fb77e"}  # streamed (--offload)
WIDTH = 980
LEFT = 110
ROW = 26
GAP = 46


def read_spans(path: Path, first_s: float, last_s: float) -> dict[str, list[Any]]:
    """Return the spans of each rank that lie within the seconds asked for, cut to them."""
    spans: dict[int, list[Any]] = {}
    names: dict[int, str] = {}
    for event in json.loads(path.read_text()):
        if event.get("ph") == "M":
            names[event["tid"]] = event["args"]["name"].partition(":")[0]
        if event.get("ph") != "X":
            continue
        start_s = event["ts"] / 1e6
        end_s = (event["ts"] + event["dur"]) / 1e6
        rank = spans.setdefault(event["tid"], [])
        if end_s > first_s and start_s < last_s:
            rank.append((max(start_s, first_s), min(end_s, last_s), event))
    layers = {
        tid: " layers" * (own[0][2]["name"] in OF_LAYERS)
        for tid, own in spans.items()
        if own
    }
    return {f"{names[tid]}{layers.get(tid, '')}": spans[tid] for tid in sorted(spans)}


def draw(
    title: str, spans: dict[str, list[Any]], top: int, first_s: float, last_s: float
) -> str:
    """Return the SVG elements of one trace."""
    scale = (WIDTH - LEFT - 70) / (last_s - first_s)
    out = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>']
    for row, (rank, own) in enumerate(spans.items()):
        y = top + row * (ROW + 4)
        out.append(f'<text x="8" y="{y + 18}">{rank}</text>')
        width = (last_s - first_s) * scale
        out.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW}" fill="#eee"/>'
        )
        for start_s, end_s, event in own:
            x = LEFT + (start_s - first_s) * scale
            wide = (end_s - start_s) * scale
            step = "" if event["name"] in OF_LAYERS else event["args"]["step"]
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" stroke="white" '
                f'stroke-width="0.6" fill="{(COLOURS | OF_LAYERS)[event["name"]]}"/>'
            )
            if wide > 26:
                out.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 17}" fill="white" font-size="11" '
                    f'text-anchor="middle">{step}</text>'
                )
        worked = (end - start for start, end, event in own if event["name"] != "wait")
        busy = sum(worked) / (last_s - first_s)
        out.append(f'<text x="{WIDTH - 62}" y="{y + 18}">{busy:.0%} busy</text>')
    return "\n".join(out)


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--title", "titles", multiple=True, help="Of each trace, in order.")
@click.option("--from", "first_s", default=0.0, help="Seconds from the first step.")
@click.option("--to", "last_s", default=5.0)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(
    traces: tuple[Path, ...],
    titles: tuple[str, ...],
    first_s: float,
    last_s: float,
    output: Path,
) -> None:
    parts = []
    top = GAP - 14
    seen = set[str]()
    for index, path in enumerate(traces):
        spans = read_spans(path, first_s, last_s)
        seen |= {event["name"] for own in spans.values() for *_, event in own}
        title = titles[index] if index < len(titles) else path.name
        parts.append(draw(title, spans, top, first_s, last_s))
        top += len(spans) * (ROW + 4) + GAP - 10
    legend = LEFT
    shown = COLOURS | {name: OF_LAYERS[name] for name in OF_LAYERS if name in seen}
    for phase, colour in shown.items():
        parts.append(
            f'<rect x="{legend}" y="{top - 14}" width="14" height="14" fill="{colour}"/>'
        )
        parts.append(f'<text x="{legend + 20}" y="{top - 2}">{phase}</text>')
        legend += 90
    parts.append(
        f'<text x="{legend}" y="{top - 2}">numbers: steps; second {first_s:g} to '
        f"{last_s:g}</text>"
    )
    output.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 8}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" '
        'fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()

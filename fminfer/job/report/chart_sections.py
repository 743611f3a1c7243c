"""The sections of a report that are drawn: lengths, ends, probabilities, and the run's time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from fminfer.core.quantities import counted
from fminfer.files.time_line import Point
from fminfer.job.report.charts import (
    Series,
    make_curves,
    make_figure,
    make_histogram,
    make_shares,
    make_table,
    show_exactly,
    show_number,
    show_share,
    show_time,
)
from fminfer.job.report.histogram import Histogram, make_bins
from fminfer.job.report.plain_text import Markup, escape
from fminfer.job.report.row_choice import RowChoice
from fminfer.job.report.scanning import Scan
from fminfer.job.report.shown_rows import ShownRow
from fminfer.job.report.tally import AnswerTally
from fminfer.job.report.told_outputs import ToldRun, name_files, sum_stats

NUM_SLOW = 10
MAX_DONE_STEPS = 50
NONE_DRAWN = "No token was drawn, as with max_tokens 0."
# Why a choice ended, beside the names that OpenAI gives it.
ENDS = {
    "stop": "stop: complete",
    "length": "length: max_tokens",
    "tool_calls": "tool_calls: calls a tool",
}


def make_distributions(whole: AnswerTally) -> str:
    """Return the charts of all answered rows."""
    if not whole.num_answers:
        return "<p>No row is answered.</p>"
    charts = []
    for title, histogram in (
        ("Prompt tokens of a row", whole.prompt_lengths),
        ("Answer tokens of a row, all choices", whole.completion_lengths),
    ):
        if histogram.counts:
            note, bins = _describe(histogram, show_number), make_bins(histogram)[0]
            charts.append(make_histogram(title, note, bins, show_number, is_int=True))
    ends = [(ENDS.get(name, name), count) for name, count in whole.finish_reasons.most_common(12)]
    charts.append(make_shares("Why choices ended", counted(whole.num_choices, "choice"), ends))
    charts.append(_make_logprobs(whole))
    charts.append(_make_seconds(whole))
    return f'<div class="charts answers">{"".join(charts)}</div>'


def _describe(histogram: Histogram, show: Callable[[float], str]) -> str:
    median, most = show(histogram.quantile(0.5)), show(histogram.most)
    tail = show(histogram.quantile(0.99))
    text = f"mean {show(histogram.mean)}, median {median}, 99 % up to {tail}, longest {most}"
    bins, is_log = make_bins(histogram)
    return f"{text}; bars widen to the right" if is_log and len(bins) > 1 else text


def _make_logprobs(whole: AnswerTally) -> str:
    title, histogram = "Mean logprob of a row's tokens", whole.mean_logprobs
    if not histogram.counts:
        is_drawn = whole.completion_tokens > 0
        why = "No drawn token has logprobs; requests ask for them." if is_drawn else NONE_DRAWN
        return _make_unknown(title, why)
    note = (
        f"{counted(whole.num_with_logprobs, 'row')}; mean {histogram.mean:.3f}, a probability of "
        f"{show_share(math.exp(min(0.0, histogram.mean)))} a token; the end token is not counted"
    )
    if 0 in whole.completion_lengths.counts:
        note += "; a row that drew none counts with its echoed prompt"
    floor = max(histogram.least, -20.0)  # a few rows far below would flatten all others
    kept = Histogram(histogram.scale)
    for value, count in histogram.values():
        kept.counts[round(max(value, floor) * histogram.scale)] += count
    kept.least, kept.most = floor, max(floor, histogram.most)
    if floor > histogram.least:
        note += "; the first bar holds all below -20"
    return make_histogram(title, note, make_bins(kept)[0], lambda v: f"{v:.3g}", is_int=False)


def _make_seconds(whole: AnswerTally) -> str:
    title, histogram = "Time of a row, from its admission to its end", whole.seconds
    if not histogram.counts:
        return _make_unknown(title, "Not known: Batch lines hold no times.")
    note = _describe(histogram, show_time)
    if whole.num_without_times:
        note += f"; {counted(whole.num_without_times, 'Batch line')} without times"
    return make_histogram(title, note, make_bins(histogram)[0], show_time, is_int=False)


def _make_unknown(title: str, why: str) -> str:
    return make_figure(title, "", f"<p>{escape(why)}</p>", css="unknown")


def make_run_section(runs: Sequence[ToldRun], whole: AnswerTally) -> str:
    """Return the time line of the runs, and what the prefix cache saved."""
    if not runs:
        return "<p>The run's times are not known; see the notes above.</p>"
    drawn = [run for run in runs if run.time_line is not None and run.time_line.points]
    charts = _make_time_lines(drawn) if drawn else []
    charts += [_make_prefix(runs, whole)]
    return f'<div class="charts">{"".join(charts)}</div>'


def _make_time_lines(runs: Sequence[ToldRun]) -> list[str]:
    widths = [width for run in runs for width in run.widths()]
    points = [p for run in runs if run.time_line is not None for p in run.time_line.points]
    breaks = [*accumulate(sum(run.widths()) for run in runs[:-1])]

    def rates(counts: Sequence[int]) -> list[float]:
        return [count / width for count, width in zip(counts, widths, strict=True)]

    fed = Series("prompt tokens/s computed", "fed", rates([p.num_fed for p in points]))
    num_drawn = Series("answer tokens/s drawn", "drawn", rates([p.num_drawn for p in points]))
    running = Series("sequences in flight", "running", [float(p.most_running) for p in points])
    note = f"{counted(len(runs), 'run')}, {show_exactly(sum(widths))} of answering"
    most = max((p.most_running for p in points), default=0)
    num_done = sum(p.num_done for p in points)
    return [
        make_curves("Tokens/s", note, widths, [num_drawn, fed], breaks),
        make_curves("Sequences in flight", f"at most {most:,}", widths, [running], breaks),
        make_curves(
            "Rows finished/s", counted(num_done, "row"), *_make_done(widths, points), breaks
        ),
    ]


def _make_done(
    widths: Sequence[float], points: Sequence[Point]
) -> tuple[list[float], list[Series]]:
    """Return wider steps of the rows that ended: few may end in a step."""
    step = -(-len(points) // MAX_DONE_STEPS)
    parts = [slice(first, first + step) for first in range(0, len(points), step)]
    wide = [sum(widths[part]) for part in parts]
    counts = [sum(point.num_done for point in points[part]) for part in parts]
    rates = [count / width for count, width in zip(counts, wide, strict=True)]
    return wide, [Series("rows/s", "done", rates)]


def _make_prefix(runs: Sequence[ToldRun], whole: AnswerTally) -> str:
    """Say what the prefix cache saved, and what the best possible one would have saved."""
    stats, title = sum_stats(runs), "Prompt tokens that were shared"
    cached = stats["num_cached_tokens"]
    total = stats["num_prompt_tokens"] - stats["num_again_tokens"] + cached
    if not total:
        return _make_unknown(title, "No prompt token was computed.")
    note = f"of {total:,} prompt tokens that the engine met"
    num_missed = stats["num_counted_shareable"] - stats["num_counted_cached"]
    parts = [("found in the prefix cache", cached), ("computed", total - cached)]
    if shareable := stats["num_counted_shareable"]:
        share = stats["num_counted_cached"] / shareable
        note += f"; {show_share(share)} of what a trie over the prompts allows, "
        note += f"{shareable:,} tokens"
        if stats["num_counted_tokens"] != total:
            note += f" of the first {stats['num_counted_tokens']:,}"
        elif num_missed > 0:
            parts[1:] = [("shared, but computed again", num_missed)]
            parts.append(("found in one prompt only", total - cached - num_missed))
    elif stats["num_counted_tokens"]:
        note += "; the prompts share no prefix"
    if stats["num_copied_requests"]:
        copied = counted(stats["num_copied_requests"], "row")
        note += f"; {copied} took the whole answer of an equal one"
    return make_shares(title, note, parts)


def make_slowest(scan: Scan, shown: Sequence[ShownRow]) -> str:
    """Return a table of the rows that took longest."""
    choice: RowChoice = scan.choice
    places = {row.place: number for number, row in enumerate(shown)}
    slow = [(s, place) for s, place in choice.slow.in_order() if place in places][:NUM_SLOW]
    if not slow:
        why = "Batch lines hold no times." if scan.whole.num_without_times else ""
        return f"<p>The slowest rows are not known. {why}</p>"
    names = name_files([source.path for source in scan.sources])
    rows = []
    for seconds, place in slow:
        row = shown[places[place]]
        usage, times = row.answer.usage, row.answer.times
        name = f"{escape(names[place.file])}:{place.number}"
        shown_times = (seconds, times.get("queue_time", 0.0), times.get("prefill_time", 0.0))
        counts = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        link = Markup(f'<a href="#row-{places[place]}">{name}</a>')
        rows.append((link, *map(show_exactly, shown_times), *(f"{each:,}" for each in counts)))
    head = ("row", "time", "waited before", "to first token", "prompt tokens", "answer tokens")
    note = ""
    if unknown := scan.whole.num_without_times:
        beside = f"{counted(unknown, 'Batch line')} beside these: they hold no times."
        note = f'<p class="dim">{beside}</p>'
    return f"<h3>The slowest rows</h3>{make_table(head, rows, css='slowest')}{note}"

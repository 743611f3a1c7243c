"""The sections of a report that tell in words and tables: what was asked, and of what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from fminfer.core.quantities import counted, name_few, show_seconds
from fminfer.files.run_facts import runs_in
from fminfer.job.report.charts import make_table, show_exactly, show_number
from fminfer.job.report.plain_text import escape, shorten
from fminfer.job.report.scanning import Scan
from fminfer.job.report.tally import AnswerTally, Values
from fminfer.job.report.told_outputs import ToldOutput, ToldRun, name_files, sum_stats

MAX_FILES = 200  # rows of the table of outputs
MAX_VALUES_TOLD = 6  # of a sampling parameter
# Terms of a fingerprint that people look for; the others are there for machines.
TERMS = {"the dtype": "Number type", "--kv-dtype": "KV cache", "fminfer's version": "Version"}
DEFAULTS = {
    "--seed": "1",
    "--on-too-long": "error",
    "--token-format": "auto",
    "--max-layers": "None",
}


def make_tiles(whole: AnswerTally, runs: Sequence[ToldRun]) -> str:
    """Return the large numbers on top."""
    seconds, stats = sum(run.seconds for run in runs), sum_stats(runs)
    num_tokens = stats["num_prompt_tokens"] + stats["num_generated_tokens"]
    tiles = [
        ("Rows answered", f"{whole.num_answers:,}", ""),
        ("Rows in error", f"{whole.num_errors:,}", "bad" if whole.num_errors else ""),
        ("Prompt tokens", f"{whole.prompt_tokens:,}", ""),
        ("Answer tokens", f"{whole.completion_tokens:,}", ""),
        ("Time of answering", show_exactly(seconds) if runs else "not known", ""),
        ("Tokens/s computed", show_number(num_tokens / seconds) if seconds else "not known", ""),
    ]
    cells = "".join(
        f'<div class="{css}"><dt>{name}</dt><dd>{escape(value)}</dd></div>'
        for name, value, css in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def make_notes(notes: Iterable[str]) -> str:
    """Return what a reader should know before he trusts the numbers."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>' if items else ""


def find_notes(outputs: Sequence[ToldOutput], scan: Scan, runs: Sequence[ToldRun]) -> list[str]:
    """Say what is missing, or not as it should be."""
    notes = []
    for output in outputs:
        name, status = output.path.name, output.status or {}
        if output.is_unfinished:
            state = status.get("status", "not known")
            notes.append(
                f"{name} is not complete (status: {state}). Shown is what its journal has so far; "
                "the same command of fminfer run goes on from there."
            )
        elif not output.path.exists():
            notes.append(f"{name} is not there; only its errors file is.")
        if (edit := output.edit) is not None:
            edited = edit.path.name
            notes.append(
                f"{edited} was edited since the run wrote it; its numbers are those of now."
            )
    without = [each.path.name for each in outputs if each.status is None]
    if without:
        notes.append(
            f"{name_few(without, 5)}: there is no status file, as after a download. So the model, "
            "the input, the settings and the speed are not known."
        )
    if not runs and len(without) < len(outputs):
        notes.append(
            "No run has left its times in a status file: an older version wrote it, the output was "
            "merged, or its rows were taken from elsewhere. So speed, time line and device are not "
            "known."
        )
    untimed = [each.path.name for each in outputs if not runs_in(each.status)]
    if runs and untimed:
        notes.append(f"{name_few(untimed, 5)}: no run has left its times in a status file.")
    num_before = sum(run.num_before for run in runs)
    if num_before:
        notes.append(f"{counted(num_before, 'earlier run')} took part, whose times are not kept.")
    if scan.whole.num_unread:
        notes.append(
            f"{counted(scan.whole.num_unread, 'line')} could not be read as records, and are left "
            "out of all numbers."
        )
    if scan.whole.num_truncated:
        notes.append(
            f"{counted(scan.whole.num_truncated, 'prompt')} were cut to fit the context "
            "(--on-too-long)."
        )
    return notes


def make_asked(outputs: Sequence[ToldOutput], scan: Scan, runs: Sequence[ToldRun]) -> str:
    """Return what was asked: model, settings, inputs, parameters."""
    statuses = [each.status for each in outputs if each.status is not None]
    terms = [dict(status.get("metadata") or {}) for status in statuses]
    whole = scan.whole
    models = [str(s["model"]) for s in statuses if s.get("model")] or list(whole.models)
    facts: list[tuple[str, str]] = [("Model", _join(models) or "not known")]
    for name, title in TERMS.items():
        if found := _join(term[name] for term in terms if name in term):
            facts.append((title, found))
    if devices := _join(_place(run) for run in runs if run.device):
        facts.append(("Device", devices))
    for run in runs[-5:]:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_at))
        facts.append(("Run", f"{began}, {tell_times(run)}"))
    sources = [str(each.source) for each in outputs if each.source is not None]
    if sources:
        facts.append(("Inputs" if len(sources) > 1 else "Input", name_few(sources, 5)))
    facts.append(("Requests", _describe_requests(whole)))
    settings = _settings(terms, runs)
    if settings:
        facts.append(("Settings", ", ".join(f"{k} {v}" for k, v in settings.items())))
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(shorten(v, 1000))}</dd>" for k, v in facts)
    return f'<dl class="facts">{rows}</dl>{_make_params(whole)}'


def _place(run: ToldRun) -> str:
    threads = f", {counted(run.num_threads, 'thread')}" if run.num_threads else ""
    return f"{run.device}{threads}"


def tell_times(run: ToldRun) -> str:
    """Say how long a run took; both times have one form."""
    show = show_seconds if max(run.seconds, run.ready_s) >= 60 else show_exactly
    ready = f"; ready after {show(run.ready_s)}" if run.ready_s else ""
    return f"answered for {show(run.seconds)}{ready}"


def _join(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _describe_requests(whole: AnswerTally) -> str:
    kinds = [f"{count:,} {kind}" for kind, count in whole.kinds.most_common()]
    names = {"bare": "bare", "wrapped": "wrapped", "batch": "OpenAI Batch"}
    shapes = [f"{count:,} {names[shape]}" for shape, count in whole.shapes.most_common()]
    parts = [f"answered: {', '.join(kinds) or 'none'}", f"lines: {', '.join(shapes) or 'none'}"]
    if whole.num_choices != whole.num_answers:
        parts.append(counted(whole.num_choices, "choice"))
    return "; ".join(parts)


def _settings(terms: list[dict[str, Any]], runs: Sequence[ToldRun]) -> dict[str, str]:
    """Return the options that are not the defaults, of the runs and of the fingerprint."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for name, value in run.settings.items():
            found.setdefault(name, []).append(value)
    for term in terms:
        for name in DEFAULTS.keys() & term.keys():
            if str(term[name]) != DEFAULTS[name]:
                found.setdefault(name, []).append(str(term[name]))
    return {name: _join(values) for name, values in sorted(found.items())}


def _make_params(whole: AnswerTally) -> str:
    if not whole.params:
        return ""
    rows = [
        (name, _show_values(values), f"{values.counts.total() + values.num_others:,}")
        for name, values in sorted(whole.params.items())
    ]
    head = ("field of a request", "values, the most frequent first", "rows")
    return make_table(head, rows, css="params")


def _show_values(values: Values) -> str:
    """Return the most frequent values; of many numbers, their range."""
    numbers = [each for each in values.counts if isinstance(each, int | float)]
    number = len(values.counts)
    if number > MAX_VALUES_TOLD and len(numbers) == number:
        more = "more than " if values.num_others else ""
        least, most = show_number(min(numbers)), show_number(max(numbers))
        beyond = ", and beyond" if values.num_others else ""
        return f"{more}{number:,} different ones, {least} … {most}{beyond}"
    shown = [
        f"{shorten(value if isinstance(value, str) else json.dumps(value), 60)} ({count:,})"
        for value, count in values.counts.most_common(MAX_VALUES_TOLD)
    ]
    num_more = number - len(shown)
    return ", ".join(shown) + (f", … ({num_more:,} more)" if num_more else "")


def make_files(outputs: Sequence[ToldOutput], scan: Scan) -> str:
    """Return a table of the outputs."""
    if len(outputs) < 2:
        return ""
    names = name_files([output.path for output in outputs])
    rows = [
        (
            name,
            (output.status or {}).get("status", "not known"),
            f"{tally.num_answers:,}",
            f"{tally.num_errors:,}",
            f"{tally.prompt_tokens:,}",
            f"{tally.completion_tokens:,}",
        )
        for name, output, tally in zip(names, outputs, scan.tallies, strict=True)
    ]
    head = ("output", "status", "answered", "in error", "prompt tokens", "answer tokens")
    more = len(rows) - MAX_FILES
    note = f"<p>{more:,} more outputs are counted in all numbers.</p>" if more > 0 else ""
    table = make_table(head, rows[:MAX_FILES], css="files")
    return f'<section aria-labelledby="files"><h2 id="files">Outputs</h2>{table}{note}</section>'

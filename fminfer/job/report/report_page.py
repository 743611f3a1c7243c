"""Puts a report's sections, styles, script and rows together into one HTML page."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

import orjson

from fminfer.core.errors import RETRYABLE
from fminfer.core.quantities import list_few, with_noun
from fminfer.files.run_facts import parse_runs
from fminfer.job.report.answer_tally import AnswerTally
from fminfer.job.report.charts import (
    Bar,
    make_histogram,
    make_time_line,
    show_number,
    show_time,
)
from fminfer.job.report.label_section import make_label_data, make_label_section
from fminfer.job.report.page_parts import make_notes, make_tiles
from fminfer.job.report.plain_text import escape_html, make_visible, shorten_text
from fminfer.job.report.reported_outputs import ReportedOutput, ReportedRun, name_files
from fminfer.job.report.scanning import Scan
from fminfer.job.report.shown_rows import ShownRow, dump_rows

MAX_EXAMPLES = 6  # of each code
MAX_CHARS = 300  # of a message
MAX_NAMED = 5
# Terms of a fingerprint that people look for; the others are there for machines.
TERMS = {
    "the dtype": "Number type",
    "--kv-dtype": "KV cache",
    "fminfer's version": "Version",
}
# By whether they have the same bytes whatever rows are beside them; None: not known.
ANSWERS = {
    None: "",
    False: "may depend on other rows",
    True: "the same whatever rows were beside them",
}
# Nothing is loaded, and only the page's own script and styles count, by their digests.
# The script makes no markup of any text, and with this the browser would not let it.
POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
    "img-src data:; "
    "form-action 'none'; base-uri 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
# What may end a script element, or a line of an old script.
UNSAFE = {b"<": b"\\u003c", b">": b"\\u003e", b"&": b"\\u0026"}
UNSAFE |= {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def make_page(
    outputs: Sequence[ReportedOutput],
    scan: Scan,
    runs: Sequence[ReportedRun],
    shown: Sequence[ShownRow],
    notes: Sequence[str],
) -> bytes:
    """Return the report's HTML."""
    folder = files("fminfer.job.report") / "page"
    style, script = (
        (folder / name).read_text("utf-8") for name in ("report.css", "report.js")
    )
    rows, cut = dump_rows(shown)
    names = orjson.dumps(
        [make_visible(name) for name in name_files([s.path for s in scan.sources])]
    )
    labels = orjson.dumps(make_label_data(scan.labels))
    parts = {
        "policy": escape_html(
            POLICY.format(script=_make_digest(script), style=_make_digest(style))
        ),
        "title": escape_html(list_few([output.path.name for output in outputs], 1)),
        "made": escape_html(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
        "style": style,
        "tiles": _make_tiles(scan.tally, runs),
        "notes": make_notes([*_find_notes(outputs, scan.tally, runs), *notes]),
        "facts": _make_facts(outputs, scan.tally, runs),
        "errors": _make_errors(scan, shown),
        "labels": make_label_section(scan.labels, scan.tally.num_errors),
        "charts": _make_charts(scan.tally, runs),
        "unsure": ", least sure" if scan.labels.bins else "",
        "shown": f"{len(shown):,} of {scan.tally.num_rows:,}",
        "cut": escape_html(
            f"Texts longer than {cut.num_chars:,} characters are cut in the middle, and at most "
            f"{cut.num_tokens:,} tokens of an answer have their colours. The output has all."
        ),
        "rows": make_safe(
            b'{"files":' + names + b',"rows":' + rows + b',"labels":' + labels + b"}"
        ).decode(),
        "script": script,
    }
    page = (folder / "report.html").read_text("utf-8")
    # At once from left to right, so that no text is taken for a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page).encode()


def make_safe(text: bytes) -> bytes:
    """Return JSON that can stand in a script element: it means the same, and cannot end it."""
    for unsafe, safe in UNSAFE.items():
        text = text.replace(unsafe, safe)
    return text


def _make_digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _make_tiles(tally: AnswerTally, runs: Sequence[ReportedRun]) -> str:
    """Return the large numbers on top."""
    seconds = sum(run.seconds for run in runs)
    num_tokens = sum(run.num_tokens for run in runs)
    num_prompt, num_drawn = (
        sum(length * count for length, count in lengths.items())
        for lengths in (tally.prompt_lengths, tally.completion_lengths)
    )
    tiles = [
        ("Rows answered", f"{tally.num_answers:,}", ""),
        ("Rows in error", f"{tally.num_errors:,}", "bad" if tally.num_errors else ""),
        ("Prompt tokens", f"{num_prompt:,}", ""),
        ("Answer tokens", f"{num_drawn:,}", ""),
        ("Time of answering", show_time(seconds) if runs else "not known", ""),
        (
            "Tokens/s computed",
            show_number(num_tokens / seconds) if seconds else "not known",
            "",
        ),
    ]
    return make_tiles(tiles)


def _find_notes(
    outputs: Sequence[ReportedOutput], tally: AnswerTally, runs: Sequence[ReportedRun]
) -> Iterator[str]:
    """Say what is missing, or not as it should be."""
    for output in outputs:
        name = output.path.name
        status = output.status or {}
        if output.is_unfinished:
            state = status.get("status", "not known")
            yield (
                f"{name} is not complete (status: {state}). Shown is what its journal "
                "has so far; the same command of fminfer run goes on from there."
            )
        elif not output.path.exists():
            yield f"{name} is not there; only its errors file is."
        if (edit := output.edit) is not None:
            edited = edit.path.name
            yield f"{edited} was edited since the run wrote it; its numbers are those of now."
    without = [each.path.name for each in outputs if each.status is None]
    if without:
        yield (
            f"{list_few(without, MAX_NAMED)}: there is no status file, as after a "
            "download. So the model, the input, the settings and the speed are not "
            "known."
        )
    untimed = [
        each.path.name
        for each in outputs
        if each.status and not parse_runs(each.status)
    ]
    if untimed:
        yield (
            f"{list_few(untimed, MAX_NAMED)}: no run has left its times in a status "
            "file: an older version wrote it, the output was merged, or its rows were "
            "taken from elsewhere. So speed, time line and device are not known."
        )
    if num_before := sum(run.num_before for run in runs):
        yield f"{with_noun(num_before, 'earlier run')} took part, whose times are not kept."
    if tally.num_unread:
        yield (
            f"{with_noun(tally.num_unread, 'line')} could not be read as records, and "
            "are left out of all numbers."
        )
    if tally.num_truncated:
        yield (
            f"{with_noun(tally.num_truncated, 'prompt')} were cut to fit the context "
            "(--on-too-long)."
        )


def _make_facts(
    outputs: Sequence[ReportedOutput], tally: AnswerTally, runs: Sequence[ReportedRun]
) -> str:
    """Return a list of facts: model, device, runs, inputs, settings, ends of answers."""
    statuses = [each.status for each in outputs if each.status is not None]
    terms = [dict(status.get("metadata") or {}) for status in statuses]
    models = [str(s["model"]) for s in statuses if s.get("model")] or list(tally.models)
    sources = [str(each.source) for each in outputs if each.source is not None]
    ends = [
        f"{count:,} {name}"
        for name, count in tally.finish_reasons.most_common(MAX_NAMED)
    ]
    facts = [
        ("Model", _join_unique(models) or "not known"),
        *(
            (title, _join_unique(t[name] for t in terms if name in t))
            for name, title in TERMS.items()
        ),
        ("Device", _join_unique(_describe_device(run) for run in runs if run.device)),
        (
            "Answers",
            _join_unique(filter(None, (ANSWERS[run.same_answers] for run in runs))),
        ),
        *(("Run", _describe_times(run)) for run in runs[-MAX_NAMED:]),
        *(("Allowed", run.allowed) for run in runs[-MAX_NAMED:]),
        ("Input", list_few(sources, MAX_NAMED)),
        (
            "Settings",
            _join_unique(f"{k} {v}" for run in runs for k, v in run.settings.items()),
        ),
        ("Ends of answers", ", ".join(ends)),
    ]
    rows = "".join(
        f"<dt>{name}</dt><dd>{escape_html(shorten_text(text, 1000))}</dd>"
        for name, text in facts
        if text
    )
    return f'<dl class="facts">{rows}</dl>'


def _join_unique(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _describe_device(run: ReportedRun) -> str:
    return run.device + (
        f", {with_noun(run.num_threads, 'thread')}" if run.num_threads else ""
    )


def _describe_times(run: ReportedRun) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_at))
    ready = f"; ready after {show_time(run.ready_s)}" if run.ready_s else ""
    return f"{began}, answered for {show_time(run.seconds)}{ready}"


def _make_errors(scan: Scan, shown: Sequence[ShownRow]) -> str:
    """Return a table of errors by code, with an example of each kind of message."""
    tally = scan.tally
    if not tally.error_codes:
        return ""
    numbers = {row.place: number for number, row in enumerate(shown)}
    rows = []
    for code, count in tally.error_codes.most_common():
        kinds = [
            (n, kind) for kind, n in tally.error_kinds.most_common() if kind[0] == code
        ]
        texts: list[str] = []
        for number, kind in kinds:
            examples = [
                numbers[p] for p in scan.choice.errors.get(kind, ()) if p in numbers
            ]
            if examples and len(texts) < MAX_EXAMPLES:
                texts.append(
                    _make_example(shown[examples[0]], examples[0], number, count)
                )
        if len(kinds) > len(texts):
            texts.append(
                f"<li>… and {with_noun(len(kinds) - len(texts), 'more kind')} of message</li>"
            )
        if code in RETRYABLE:
            texts.append(
                "<li>The same command of fminfer run tries these rows again.</li>"
            )
        rows.append(
            f'<tr><th scope="row"><code>{escape_html(code).replace("_", "_<wbr>")}</code></th>'
            f"<td>{count:,}</td>"
            f'<td class="wide"><ul>{"".join(texts)}</ul></td></tr>'
        )
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("code", "rows", "examples")
    )
    return (
        '<section aria-labelledby="errors"><h2 id="errors">Rows in error</h2>'
        '<div class="scroll errors" tabindex="0" role="group" aria-label="Table">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</div></section>"
    )


def _make_example(row: ShownRow, place: int, number: int, of_all: int) -> str:
    message = escape_html(
        shorten_text(str((row.answer.error or {}).get("message")), MAX_CHARS)
    )
    times = "" if number == of_all else f" ({number:,})"
    return f'<li>{message}{times} <a href="#row-{place}">show</a></li>'


def _make_charts(tally: AnswerTally, runs: Sequence[ReportedRun]) -> str:
    """Return how long prompts and answers are, and the runs' tokens/s over their time."""
    if not tally.num_answers:
        return "<p>No row is answered.</p>"
    charts = [
        make_histogram(title, lengths)
        for title, lengths in (
            ("Prompt tokens of a row", tally.prompt_lengths),
            ("Answer tokens of a row, all choices", tally.completion_lengths),
        )
        if lengths
    ]
    drawn = [run for run in runs if run.time_line.points]
    if drawn:
        charts.append(_draw_time_line(drawn))
    return f'<div class="charts">{"".join(charts)}</div>'


def _draw_time_line(runs: Sequence[ReportedRun]) -> str:
    bars: list[Bar] = []
    breaks: list[float] = []
    at_s = 0.0
    for run in runs:
        breaks.append(at_s)
        for point, width_s in zip(run.time_line.points, run.list_widths(), strict=True):
            rates = [point.num_drawn / width_s, point.num_fed / width_s]
            bars.append(Bar(at_s, at_s + width_s, rates))
            at_s += width_s
    return make_time_line(
        title="Tokens/s",
        note=f"{with_noun(len(runs), 'run')}, {show_time(at_s)} of answering",
        bars=bars,
        names={"drawn": "answer tokens/s drawn", "fed": "prompt tokens/s computed"},
        breaks=breaks[1:],
    )

"""Puts a report's sections, styles, script and rows together into one HTML page."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from importlib.resources import files

import orjson

from fminfer.core.errors import RETRYABLE
from fminfer.core.quantities import counted
from fminfer.job.report.chart_sections import (
    make_distributions,
    make_run_section,
    make_slowest,
)
from fminfer.job.report.plain_text import escape, shorten, show
from fminfer.job.report.scanning import Scan
from fminfer.job.report.shown_rows import ShownRow, dump_rows
from fminfer.job.report.summary_sections import (
    find_notes,
    make_asked,
    make_files,
    make_notes,
    make_tiles,
)
from fminfer.job.report.told_outputs import ToldOutput, ToldRun, name_files

MAX_EXAMPLES = 6  # of each code
MAX_CHARS = 300  # of a message


def make_errors(scan: Scan, shown: Sequence[ShownRow]) -> str:
    """Return a table of errors by code, with an example of each kind of message."""
    whole = scan.whole
    if not whole.error_codes:
        return ""
    numbers = {row.place: number for number, row in enumerate(shown)}
    rows = []
    for code, count in whole.error_codes.most_common():
        kinds = [(n, kind) for kind, n in whole.error_kinds.most_common() if kind[0] == code]
        texts: list[str] = []
        for number, kind in kinds:
            examples = [numbers[p] for p in scan.choice.errors.get(kind, ()) if p in numbers]
            if examples and len(texts) < MAX_EXAMPLES:
                texts.append(_make_example(shown[examples[0]], examples[0], number, count))
        if len(kinds) > len(texts):
            texts.append(
                f"<li>… and {counted(len(kinds) - len(texts), 'more kind')} of message</li>"
            )
        if code in RETRYABLE:
            texts.append("<li>The same command of fminfer run tries these rows again.</li>")
        rows.append(
            f'<tr><th scope="row"><code>{escape(code).replace("_", "_<wbr>")}</code></th>'
            f"<td>{count:,}</td>"
            f'<td class="wide"><ul>{"".join(texts)}</ul></td></tr>'
        )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("code", "rows", "examples"))
    return (
        '<section aria-labelledby="errors"><h2 id="errors">Rows in error</h2>'
        f'<div class="scroll errors"><table><thead><tr>{heads}</tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div></section>"
    )


def _make_example(row: ShownRow, place: int, number: int, of_all: int) -> str:
    message = escape(shorten(str((row.answer.error or {}).get("message")), MAX_CHARS))
    times = "" if number == of_all else f" ({number:,})"
    return f'<li>{message}{times} <a href="#row-{place}">show</a></li>'


# Nothing is loaded, and only the page's own script and styles count, by their digests. The script
# makes no markup of any text, and with this the browser would not let it.
POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; "
    "form-action 'none'; base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# What may end a script element, or a line of an old script.
UNSAFE = {b"<": b"\\u003c", b">": b"\\u003e", b"&": b"\\u0026"}
UNSAFE |= {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def make_page(
    outputs: Sequence[ToldOutput],
    scan: Scan,
    runs: Sequence[ToldRun],
    shown: Sequence[ShownRow],
    notes: Sequence[str],
) -> bytes:
    """Return the report's HTML."""
    own = files("fminfer.job.report") / "page"
    style, script = ((own / name).read_text("utf-8") for name in ("report.css", "report.js"))
    rows, cut = dump_rows(list(shown))
    names = orjson.dumps([show(name) for name in name_files([s.path for s in scan.sources])])
    num_rows = scan.whole.num_answers + scan.whole.num_errors
    cut_note = (
        f"Texts longer than {cut.num_chars:,} characters are cut in the middle, and at most "
        f"{cut.num_tokens:,} tokens of an answer have their colours. The output has all."
    )
    parts = {
        "policy": escape(POLICY.format(script=_digest(script), style=_digest(style))),
        "title": escape(_title(outputs)),
        "made": escape(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
        "style": style,
        "tiles": make_tiles(scan.whole, runs),
        "notes": make_notes([*find_notes(outputs, scan, runs), *notes]),
        "asked": make_asked(outputs, scan, runs),
        "files": make_files(outputs, scan),
        "errors": make_errors(scan, shown),
        "distributions": make_distributions(scan.whole),
        "run": make_run_section(runs, scan.whole),
        "slowest": make_slowest(scan, shown),
        "shown": f"{len(shown):,} of {num_rows:,}",
        "cut": escape(cut_note),
        "rows": make_safe(b'{"files":' + names + b',"rows":' + rows + b"}").decode(),
        "script": script,
    }
    page = (own / "report.html").read_text("utf-8")
    pieces = page.split("{{")
    made = [pieces[0]]
    for piece in pieces[1:]:  # once from left to right, so that no text is taken for a name
        name, _, rest = piece.partition("}}")
        made += [parts[name], rest]
    return "".join(made).encode()


def make_safe(text: bytes) -> bytes:
    """Return JSON that can stand in a script element: it means the same, and cannot end it."""
    for found, safe in UNSAFE.items():
        text = text.replace(found, safe)
    return text


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _title(outputs: Sequence[ToldOutput]) -> str:
    first = outputs[0].path.name
    return first if len(outputs) == 1 else f"{first} and {len(outputs) - 1:,} more"

"""The section of a report about rows in error: how many of each code, with examples."""

from __future__ import annotations

from collections.abc import Sequence

from fminfer.batch.report.plain_text import escape, shorten
from fminfer.batch.report.scanning import Scan
from fminfer.batch.report.shown_rows import ShownRow
from fminfer.core.errors import RETRYABLE
from fminfer.core.quantities import counted

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

#!/usr/bin/env python
"""Writes the tables of request fields and error codes in docs/contract.md from the code.

scripts/field_tables.py            # after a change of the table
scripts/field_tables.py --check    # ends with 1 if the docs say something else
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field
from fminfer.contract.request import DEFAULTS
from fminfer.core.errors import ERROR_CODES, RETRYABLE

# Whose table has the fields that an endpoint shares.
SHOWN: dict[Endpoint, Endpoint] = {
    "chat": "completions",
    "responses": "chat",
    "classify": "embeddings",
    "score": "embeddings",
    "rerank": "embeddings",
}
ACTED_ON: tuple[Endpoint, ...] = (
    "completions",
    "chat",
    "responses",
    "embeddings",
    "score",
    "rerank",
)
CONTRACT = Path(__file__).parents[1] / "docs" / "contract.md"


def own_fields(endpoint: Endpoint) -> list[Field]:
    """Return the fields of completions and of both, or those that are chat's alone."""
    rows = FIELDS[endpoint].items()
    shown = FIELDS[SHOWN[endpoint]] if endpoint in SHOWN else {}
    return [each for name, each in rows if shown.get(name) != each]


def default_of(each: Field) -> str:
    """Return what a field's absence means, as Markdown."""
    if each.is_required:
        return "required"
    value = each.default
    if value is None and "Default:" not in each.help:
        value = getattr(DEFAULTS, each.name, None)
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value in (None, ()) else json.dumps(value)


def values_of(each: Field) -> str:
    """Return the values of a field, as Markdown."""
    values_text = each.kind.values_text
    return (
        values_text.replace("≥ 0", "0 … `--max-logprobs`")
        if each.limit == "logprobs"
        else values_text
    )


def acted_on(endpoint: Endpoint) -> str:
    """Return the table of fields that are acted on."""
    lines = ["| name | default | values | meaning |", "|---|---|---|---|"]
    for each in own_fields(endpoint):
        if each.fate in ("acted on", "served"):
            cells = (f"`{each.name}`", default_of(each), values_of(each), each.help)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def refused(endpoint: Endpoint) -> str:
    """Return the table of fields that are accepted at values that change nothing."""
    rows: dict[str, list[str]] = {}
    for each in own_fields(endpoint):
        if each.fate == "refused":
            passes = ", ".join(f"`{json.dumps(value)}`" for value in each.neutral)
            name = f"`{each.name}` ({passes})" if passes else f"`{each.name}`"
            rows.setdefault(f"`{each.ours}`" if each.ours else each.help, []).append(
                name
            )
    table = [f"| {', '.join(names)} | {instead} |" for instead, names in rows.items()]
    return "\n".join(
        ["| name (what passes, beside null) | instead |", "|---|---|", *table]
    )


def recorded() -> str:
    """Return the names of fields that change no answer."""
    names = [each.name for each in FIELDS["chat"].values() if each.fate == "recorded"]
    return ", ".join(f"`{name}`" for name in names)


def codes() -> str:
    """Return the table of error codes."""
    lines = ["| code | meaning | tried again |", "|---|---|---|"]
    for code, meaning in ERROR_CODES.items():
        lines.append(f"| `{code}` | {meaning} | {'yes' if code in RETRYABLE else ''} |")
    return "\n".join(lines)


def fill(text: str) -> str:
    """Return a page with what stands between its marks replaced by the tables."""
    parts = {
        "codes": codes(),
        "fields: refused": refused("completions"),
        "fields: recorded": recorded(),
        "fields: refused in chat": refused("chat"),
        "fields: refused in responses": refused("responses"),
        "fields: refused for vectors": refused("embeddings"),
        "fields: refused for scores": refused("score"),
        "fields: refused for rankings": refused("rerank"),
        "fields: refused for classes": refused("classify"),
        **{f"fields: {name}": acted_on(name) for name in ACTED_ON},
    }
    for name, table in parts.items():
        start = f"<!-- {name} -->\n"
        end = "<!-- end -->"
        before, found, rest = text.partition(start)
        assert found, f"the page has the mark {start.strip()}"
        text = before + start + f"{table}\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    text = CONTRACT.read_text()
    if "--check" not in sys.argv:
        CONTRACT.write_text(fill(text))
    elif text != fill(text):
        sys.exit(f"{CONTRACT} differs from the table of fields; run {__file__}")

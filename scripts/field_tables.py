#!/usr/bin/env python
"""Writes tables of the docs from the code: of request fields and error codes in
docs/contract.md, of what servers call the fields in docs/remote_engine.md, and of what vLLM's
arguments do in docs/other_names.md.

scripts/field_tables.py            # after a change of the table
scripts/field_tables.py --check    # ends with 1 if the docs say something else
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fminfer.client.dialects import DIALECTS, KNOWN_FIELDS, Dialect
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field
from fminfer.contract.request import DEFAULTS
from fminfer.core.config import Constraint
from fminfer.core.errors import ERROR_CODES, RETRYABLE
from fminfer.interfaces.vllm_arguments import ARGUMENTS

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
DOCS = Path(__file__).parents[1] / "docs"
# One of each way to say what an answer must be, where both endpoints have it.
HELD = {
    "choices": Constraint("choice", '["a"]'),
    "regex": Constraint("regex", "a"),
    "JSON schema": Constraint("json", '{"type":"integer"}'),
    "grammar in GBNF": Constraint("grammar", 'root ::= "a"'),
    "label probabilities": Constraint("labels", '[["a"], 1]'),
}


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


def servers() -> str:
    """Return the table of what servers call the fields; fminfer serve has all of them."""
    others = [each for each in DIALECTS.values() if each.name != "fminfer"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for endpoint, fields in KNOWN_FIELDS.items():
        for name in fields:
            is_shared = (
                name in KNOWN_FIELDS["completions"] and name in KNOWN_FIELDS["chat"]
            )
            if endpoint == "chat" and is_shared:
                continue
            is_of_both = endpoint == "completions" and is_shared
            label = "completions, chat" if is_of_both else endpoint
            cells = (label, *(name_cell(each, endpoint, name) for each in others))
            rows.setdefault(cells, []).append(f"`{name}`")
    for title, constraint in HELD.items():
        cells = ("completions, chat", *(held_cell(each, constraint) for each in others))
        rows.setdefault(cells, []).append(title)
    head = ["of", "field", *(each.title for each in others)]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (first, *others_cells), names in rows.items():
        table.append(f"| {' | '.join([first, ', '.join(names), *others_cells])} |")
    return "\n".join(table)


def name_cell(dialect: Dialect, endpoint: Endpoint, name: str) -> str:
    """Return what a server calls a field, as Markdown; "": it has no name."""
    theirs = dialect.find_name(endpoint, name)
    if endpoint == "completions" and name in KNOWN_FIELDS["chat"]:
        in_chat = dialect.find_name("chat", name)
        if in_chat != theirs:
            return f"yes; in chat `{in_chat}`"
    if theirs is None:
        return ""
    return "yes" if theirs == name else f"`{theirs}`"


def held_cell(dialect: Dialect, constraint: Constraint) -> str:
    """Return by which field a server is asked for a constraint; "": it has none."""
    ways = {
        endpoint: dialect.write_constraint(constraint, endpoint)
        for endpoint in ("completions", "chat")
    }
    names = {endpoint: ", ".join(way) for endpoint, way in ways.items() if way}
    if len(set(names.values())) == 1 and len(names) == 2:
        return f"`{names['chat']}`"
    return "; ".join(f"in {where} `{name}`" for where, name in names.items())


def arguments() -> str:
    """Return what the arguments of vLLM's names do."""
    rows = ["| of | arguments | here |", "|---|---|---|"]
    for call, table in ARGUMENTS.items():
        names_of: dict[str, list[str]] = {}
        for name, argument in table.items():
            text = argument.text
            if argument.effect != "acted on":
                text = f"**{argument.effect}**: {text}"
            names_of.setdefault(text, []).append(f"`{name}`")
        rows += [
            f"| `{call}` | {', '.join(names)} | {text} |"
            for text, names in names_of.items()
        ]
    return "\n".join(rows)


def contract_parts() -> dict[str, str]:
    """Return the tables of docs/contract.md, by their marks."""
    return {
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


def fill(text: str, parts: dict[str, str]) -> str:
    """Return a page with what stands between its marks replaced by the tables."""
    for name, table in parts.items():
        start = f"<!-- {name} -->\n"
        end = "<!-- end -->"
        before, found, rest = text.partition(start)
        assert found, f"the page has the mark {start.strip()}"
        text = before + start + f"{table}\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    pages = {
        "contract": contract_parts(),
        "remote_engine": {"fields: servers": servers()},
        "other_names": {"arguments": arguments()},
    }
    for page, parts in pages.items():
        path = DOCS / f"{page}.md"
        text = path.read_text()
        if "--check" not in sys.argv:
            path.write_text(fill(text, parts))
        elif text != fill(text, parts):
            sys.exit(f"{path} differs from the table of fields; run {__file__}")

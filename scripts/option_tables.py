#!/usr/bin/env python
"""Writes the tables of flags in docs/running.md from the table of options, through the commands.

scripts/option_tables.py            # after a change of an option
scripts/option_tables.py --check    # ends with 1 if the docs say something else
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from fminfer.cli.app import main
from fminfer.cli.options.flags import GroupedOption
from fminfer.core.option import GROUPS

RUNNING = Path(__file__).parents[1] / "docs" / "running.md"
START, END = "<!-- flags -->\n", "<!-- end -->"
OTHERS = "Other commands"  # which have few flags, in no groups


def find_flags() -> dict[str, dict[tuple[str, str], list[str]]]:
    """Return the commands that have each flag, by its group and by what their help says of it."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {name: {} for name in (*GROUPS, OTHERS)}
    for name in ("run", "serve", "check", "bench", *main.commands):
        command = main.commands[name]
        for option in [] if command.hidden else command.params:
            if isinstance(option, click.Option) and not option.hidden:
                record = option.get_help_record(click.Context(command))
                assert record is not None, "an option that is not hidden is in the help"
                group = option.group if isinstance(option, GroupedOption) else OTHERS
                commands = found[group].setdefault(record, [])
                commands += [] if name in commands else [name]
    return found


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", r"\<")


def tables() -> str:
    """Return the tables, one a group."""
    lines = []
    for group, rows in find_flags().items():
        if rows:
            lines += [f"\n### {group}" if lines else f"### {group}"]
            lines += ["| flag | what it does | commands |", "|---|---|---|"]
        for (flag, text), commands in rows.items():
            flag = flag.replace("|", r"\|")
            lines.append(f"| `{flag}` | {cell(text)} | {', '.join(commands)} |")
    return "\n".join(lines)


def fill(text: str) -> str:
    """Return the page with what stands between its marks replaced by the tables."""
    before, found, rest = text.partition(START)
    assert found, f"the page has the mark {START.strip()}"
    return before + START + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    text = RUNNING.read_text()
    if "--check" not in sys.argv:
        RUNNING.write_text(fill(text))
    elif text != fill(text):
        sys.exit(f"{RUNNING} differs from the table of options; run {__file__}")

#!/usr/bin/env python
"""Writes the table of flags of run and serve in docs/running.md, from the help of the commands.

scripts/option_tables.py            # after a change of an option
scripts/option_tables.py --check    # ends with 1 if the docs say something else
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import click

from fminfer.cli.app import main
from fminfer.cli.flags import GroupedOption
from fminfer.core.option import GROUPS

RUNNING = Path(__file__).parents[1] / "docs" / "running.md"
START = "<!-- flags -->\n"
END = "<!-- end -->"
OLD = "Old command lines"  # docs/coming_from.md has these


def find_flags() -> dict[str, dict[tuple[str, str], list[str]]]:
    """Return the commands that have each flag, by its group and by its flags and text
    in the help.

    A flag that commands show in different groups, such as --grace, stands in the first of them.
    """
    found: dict[str, dict[tuple[str, str], list[str]]] = {name: {} for name in GROUPS}
    for name in ("run", "serve"):
        for option in main.commands[name].params:
            if isinstance(option, GroupedOption) and not option.hidden:
                record = option.get_help_record(click.Context(main.commands[name]))
                assert record is not None, "an option that is not hidden is in the help"
                known = next(
                    (rows[record] for rows in found.values() if record in rows), None
                )
                commands = (
                    found[option.group].setdefault(record, [])
                    if known is None
                    else known
                )
                commands.append(name)
    return found


def split_default(text: str) -> tuple[str, str]:
    """Return a help's first sentence, and the default that brackets at its end name.

    A help that has a sentence for each value is left whole.
    """
    text, *notes = re.split(r"\s+\[(?=default:|required|x>=)", text)
    default = "; ".join(note.rstrip("]").removeprefix("default: ") for note in notes)
    if not re.match(r"\w+: .*\.\s+\w+: ", text, re.DOTALL):
        text = re.split(r"(?<=[^.]\.)\s+", text)[0]
    return text, re.sub(r"(; |^)x>=\d+$", "", default)


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", r"\<")


def table() -> str:
    """Return the table; below a group's name, a row names its commands if they are others."""
    lines = ["| flag | what it does | default |", "|---|---|---|"]
    for group, rows in find_flags().items():
        if not rows or group == OLD:
            continue
        usual, _ = Counter(map(tuple, rows.values())).most_common(1)[0]
        lines.append(f"| **{group}**, of {', '.join(usual)} | | |")
        for (flag, text), commands in rows.items():
            flag = re.sub(r" (INTEGER|FLOAT)( RANGE)?$", " N", flag).replace("|", r"\|")
            help_text, default = map(cell, split_default(text))
            of = "" if tuple(commands) == usual else f"{', '.join(commands)}: "
            lines.append(f"| `{flag}` | {of}{help_text} | {default} |")
    return "\n".join(lines)


def fill(text: str) -> str:
    """Return the page with what stands between its marks replaced by the table."""
    before, found, rest = text.partition(START)
    assert found, f"the page has the mark {START.strip()}"
    return before + START + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    text = RUNNING.read_text()
    if "--check" not in sys.argv:
        RUNNING.write_text(fill(text))
    elif text != fill(text):
        sys.exit(f"{RUNNING} differs from the table of options; run {__file__}")

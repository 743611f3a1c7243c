"""Help in groups: every option has a group, and a command shows its options under their groups.

_option = in_group(MODEL)
MODEL_OPTIONS = [_option("--model-name", help="…"), …]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

INPUT_OUTPUT = "Input and output"
SERVER = "Server"
REQUESTS = "Requests"
MODEL = "Model"
SPEED = "Speed and memory"
KEPT = "Kept answers"
RANKS = "Ranks"
MADE_UP = "Made-up requests and --prompt"
CHECK, BENCH = "Check", "Bench"  # what these commands have beside the options of a run
JOBS, QUEUE = "Jobs", "Queue"  # of `fminfer submit`
OLD = "Old command lines"
CONFIG, HELP = "Configuration", "Help"
IN_ORDER = (
    *(INPUT_OUTPUT, SERVER, JOBS, QUEUE, CHECK, BENCH),
    *(REQUESTS, MODEL, SPEED, KEPT, RANKS, MADE_UP, CONFIG, OLD, HELP),
)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class GroupedOption(click.Option):
    """An option with the name of its group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups; the usage line has the arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section a group; click's own --help stands in the last one."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in IN_ORDER}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                rows[param.group if isinstance(param, GroupedOption) else HELP].append(record)
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def in_group(group: str) -> Callable[..., Decorator]:
    """Return `click.option` for the options of a group."""
    return partial(click.option, cls=GroupedOption, group=group)


def with_options(options: list[Decorator]) -> Decorator:
    """Return a decorator that gives a command these options, in this order."""

    def add_all(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add_all

"""Makes click's options from the table: their types, defaults, groups and old flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

import click

from fminfer.cli.options.option_table import options_for
from fminfer.cli.options.value_types import NUMBERS, TYPES, Read
from fminfer.core.config import DType, ModelDType
from fminfer.core.option import GROUPS, OF_ENGINE, Command, Least, Option, marks_of, plain_hint


class GroupedOption(click.Option):
    """An option with the name of its group, and its old flags."""

    def __init__(
        self,
        *args: Any,
        group: str,
        old: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group, self._old = group, old or {}

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Take the value of an old flag if that alone is given.

        Raises:
            click.UsageError: both are given, and contradict each other.
        """
        for flag, values in self._old.items():
            typed = opts.get(f"old_{flag[2:]}")
            meant = values.get(str(typed).lower()) if values else typed
            if typed is None or meant is None:  # click itself refuses a word that means nothing
                continue
            assert self.name is not None, "every option has a name"
            opts = {self.name: meant, **opts}
            if self.type(opts[self.name], self, ctx) != self.type(meant, self, ctx):
                old, new = flag if typed is True else f"{flag} {typed}", self.opts[0]
                raise click.UsageError(
                    f"{old} and {new} {opts[self.name]} contradict each other: {old} is the old "
                    f"name of {new} {meant}. Give {new} alone",
                    ctx,
                )
        return super().handle_parse_result(ctx, opts, args)


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups; the usage line has the arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group; click's own --help stands in the last one."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                rows[param.group if isinstance(param, GroupedOption) else "Help"].append(record)
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


CONFIG_OPTION = GroupedOption(
    ["--config"],
    group="Configuration",
    metavar="FILE",
    expose_value=False,  # `ConfiguredCommand` reads it
    help="A TOML file of flags by their names, as in: port = 8000. Table [run] is for run, check "
    "and bench, [serve] for serve. Variables such as FMINFER_PORT override the file; the command "
    "line overrides both. Paths in it are relative to the working directory.",
)


def flags_of(command: Command) -> list[click.Parameter]:
    """Return the options of a command, in their order."""
    options = options_for(command)
    made = [e for each in options for e in (_make(each, command), *_old(each, command))]
    return [*made, CONFIG_OPTION] if command in OF_ENGINE else [*made]


def _make(option: Option, command: Command) -> GroupedOption:
    kind = plain_hint(option.hint)
    flags, help_text = option.all_flags, option.help
    if kind is bool and option.default:
        flags = tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags)
    is_told = "[default:" in help_text or option.default in (None, ()) or option.default is False
    value_type = type_of(option)
    if not is_told and isinstance(value_type, Read):
        help_text += f"  [default: {value_type.write(option.default)}]"
        is_told = True
    group = option.group if isinstance(option.group, str) else option.group[command]
    return GroupedOption(
        [*flags, option.name],
        group=group,
        old=option.old if command == "serve" else option.old_flags,
        type=value_type,
        is_flag=kind is bool,
        multiple=get_origin(kind) is tuple and value_type is not NUMBERS,
        default=option.default,
        show_default=not is_told,
        metavar=option.metavar,
        help=help_text,
    )


def type_of(option: Option) -> click.ParamType[Any]:
    """Return the type by which click reads an option's values."""
    kind = plain_hint(option.hint)
    if get_origin(kind) is Literal and kind not in (DType, ModelDType):
        return click.Choice(get_args(kind), case_sensitive=False)
    for mark in marks_of(option.hint):
        if isinstance(mark, Least) and mark.is_shown:
            return click.IntRange(min=mark.number)
        if isinstance(mark, str):
            return TYPES[mark]
    return TYPES[kind]


def _old(option: Option, command: Command) -> Iterable[GroupedOption]:
    """Yield an option's old flags; help does not show those of EnergonAI's servers."""
    new = option.all_flags[0]
    for flag, values in option.old.items():
        if not flag.startswith("--") or not (values or command == "serve"):
            continue
        *first, last = values.values() or [""]
        meant = f"{', '.join(first)} or {last}" if first else last
        kind = click.Choice([*values]) if values else type_of(option)
        yield GroupedOption(
            [flag, f"old_{flag[2:]}"],
            group="Old command lines",
            is_flag="true" in values or None,  # False would let its value be left out
            type=click.BOOL if "true" in values else kind,
            hidden=not values,
            expose_value=False,  # the new option reads it
            help=f"The same as {f'{new} {meant}'.strip()}.",
        )

"""Makes click's options of the table's: their types, defaults, groups and old names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click

from fminfer.cli.options.option_table import options_for
from fminfer.cli.options.value_types import (
    ByteSize,
    DTypeName,
    Duration,
    Numbers,
    PathOrUrl,
    WholeText,
    Words,
)
from fminfer.core.config import DType
from fminfer.core.options import GROUPS, OF_ENGINE, Command, Group, Option, plain_hint

OLD_PREFIX = "old_"  # of the names of old flags' parameters
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Table = TypeVar("Table")
# Of a type, or of what says how a value is written.
TYPES: Mapping[Any, Callable[[], click.ParamType[Any]]] = {
    **{str: lambda: click.STRING, int: lambda: click.INT, float: lambda: click.FLOAT},
    **{bool: lambda: click.BOOL, DType: DTypeName, tuple[int, ...]: Numbers},
    **{Path: lambda: click.Path(path_type=Path), Path | str: lambda: PathOrUrl(path_type=Path)},
    **{"duration": Duration, "size": ByteSize, tuple[str, ...]: Words, "whole": WholeText},
    "folder": lambda: click.Path(file_okay=False, path_type=Path),
}


class GroupedOption(click.Option):
    """An option with the name of its group, and the flags that it had before."""

    def __init__(
        self,
        *args: Any,
        group: Group,
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
            typed = opts.get(old_name(flag))
            meant = values.get(str(typed).lower()) if values else typed
            if typed is None or meant is None:  # click itself refuses a word that means nothing
                continue
            assert self.name is not None, "every option has a name"
            opts = {self.name: meant, **opts}
            if self.type(opts[self.name], self, ctx) != self.type(meant, self, ctx):
                old, new = flag if typed is True else f"{flag} {typed}", self.opts[0]
                raise click.UsageError(
                    f"{new} {opts[self.name]} and {old} contradict each other: {old} is the old "
                    f"name of {new} {meant}. Give {new} alone",
                    ctx,
                )
        return super().handle_parse_result(ctx, opts, args)


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups; the usage line has the arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section a group; click's own --help stands in the last one."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                rows[param.group if isinstance(param, GroupedOption) else "Help"].append(record)
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


CONFIG_OPTION = click.option(
    "--config",
    cls=GroupedOption,
    group="Configuration",
    metavar="FILE",
    expose_value=False,  # `ConfiguredCommand` reads it
    help="A TOML file of flags by their names, as in: port = 8000. Tables [run] and [serve] are of "
    "one command; check and bench take those of run. FMINFER_PORT and so on go before the file, "
    "and the command line goes before both. Paths in it are relative to the working directory.",
)


def old_name(flag: str) -> str:
    """Return the name of an old flag's parameter."""
    return OLD_PREFIX + flag.removeprefix("--")


def flags_of(command: Command) -> Decorator:
    """Return a decorator that gives a command its options."""
    more = [CONFIG_OPTION] if command in OF_ENGINE else []
    return with_options(options_for(command), command, more)


def with_options(
    options: Iterable[Option], command: Command, more: Iterable[Decorator] = ()
) -> Decorator:
    """Return a decorator that gives a command these options, in their order, and more of click."""
    made = [each for option in options for each in (_make(option, command), *_old(option, command))]
    made += more

    def add_all(body: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(made):
            body = each(body)
        return body

    return add_all


def take(table: type[Table], params: dict[str, Any]) -> Table:
    """Take a dataclass's options out of a command's parameters.

    Raises:
        UsageError: values that cannot be.
    """
    return table(**{name: params.pop(name) for name in _names(table) if name in params})


def _names(table: type) -> list[str]:
    return [*table.__dataclass_fields__]  # type: ignore[attr-defined]


def _make(option: Option, command: Command) -> Decorator:
    """Return a decorator that gives a command an option."""
    kind = plain_hint(option.hint)
    flags, help_text = option.all_flags, option.help
    if kind is bool and option.default:
        flags = tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags)
    has_default = "[default:" not in help_text and not any(
        option.default is nothing for nothing in (None, (), False)
    )
    value_type = type_of(option)
    if has_default and isinstance(value_type, Numbers | ByteSize | Duration):
        help_text += f"  [default: {value_type.written(option.default)}]"
        has_default = False
    group = option.group if isinstance(option.group, str) else option.group[command]
    return click.option(
        *(*flags, option.name),
        cls=GroupedOption,
        group=group,
        old=option.old if command == "serve" else option.old_flags,
        type=value_type,
        is_flag=kind is bool,
        multiple=isinstance(value_type, Words) or _is_of_paths(kind),
        default=option.default,
        show_default=has_default,
        metavar=option.metavar,
        help=help_text,
    )


def type_of(option: Option) -> click.ParamType[Any]:
    """Return the type by which click reads an option's values."""
    kind, written = plain_hint(option.hint), _written(option.hint)
    if option.is_range:
        return click.IntRange(min=option.least)
    if get_origin(kind) is Literal and kind != DType:
        return click.Choice(get_args(kind), case_sensitive=False)
    if _is_of_paths(kind):
        kind = get_args(kind)[0]
    return TYPES[written or kind]()


def _written(hint: Any) -> str:
    """Return what a type says of how its values are written; "": nothing."""
    if get_origin(hint) is Annotated:
        return str(hint.__metadata__[0])
    return next((word for each in get_args(hint) if (word := _written(each))), "")


def _is_of_paths(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[0] in (Path, Path | str)


def _old(option: Option, command: Command) -> Iterable[Decorator]:
    """Yield the flags that an option had before: those of EnergonAI's servers are not shown."""
    new = option.all_flags[0]
    for flag, values in option.old.items():
        if not flag.startswith("--") or not (values or command == "serve"):
            continue
        *first, last = values.values() or [""]
        meant = f"{', '.join(first)} or {last}" if first else last
        yield click.option(
            *(flag, old_name(flag)),
            cls=GroupedOption,
            group="Old command lines",
            is_flag="true" in values,
            type=click.Choice([*values]) if values and "true" not in values else None,
            hidden=not values,
            expose_value=False,  # the option of today reads it
            help=f"The same as {f'{new} {meant}'.strip()}.",
        )

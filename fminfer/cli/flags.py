"""Makes click's options from the table: their types, defaults, groups and old flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

import click

from fminfer.cli.option_table import COMMON, options_for
from fminfer.core.config import DType, ModelDType
from fminfer.core.option import (
    EMPTY,
    GROUPS,
    OF_ENGINE,
    Command,
    Least,
    Option,
    find_annotations,
    unwrap_hint,
)
from fminfer.machine.stopper import parse_duration


class ParsedType(click.ParamType):  # type: ignore[type-arg]
    """Values that one function parses, and another one formats for help."""

    def __init__(
        self,
        name: str,
        parse: Callable[[str], Any],
        format_value: Callable[[Any], str],
        kind: type,
    ) -> None:
        self.name = name
        self._parse = parse
        self.format_value = format_value
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            return value if isinstance(value, self._kind) else self._parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(
            f"{text!r} is not whole numbers with commas between them"
        ) from None


def _parse_pipe_name(text: str) -> str:
    if not text.startswith("pipe_"):
        raise ValueError(f"{text!r} does not begin with pipe_")
    return text


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text, re.IGNORECASE)
    size = 0
    if match:
        power = 1 + "KMGT".index(match[2].upper())
        size = int(float(match[1]) * 1024**power)
    if size == 0:
        raise ValueError(
            f"{text!r} is no size; give a number and K, M, G or T, as in 80G"
        )
    return size


def _parse_rate(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GT])(?:B?/s)?", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(
            f"{text!r} is no rate; give 10⁹ or 10¹² a second, as in 300G or 1.5T"
        )
    return float(match[1]) * (1e9 if match[2].upper() == "G" else 1e12)


def _format_size(size: int) -> str:
    power = max(n for n in range(5) if size % 1024**n == 0)
    return f"{size // 1024**power}{['', *'KMGT'][power]}"


NUMBERS = ParsedType(
    "N,N,…", _parse_numbers, lambda value: ",".join(map(str, value)), tuple
)
DURATION = ParsedType("H:MM:SS", parse_duration, "{:g} s".format, float)
PIPE = ParsedType("pipe_…", _parse_pipe_name, str, bytes)
BYTE_SIZE = ParsedType("SIZE", _parse_size, _format_size, int)
RATE = ParsedType("RATE", _parse_rate, "{:g}".format, float)


class DTypeName(click.Choice):  # type: ignore[type-arg]
    """A dtype, also in the short names that others give them."""

    SHORT: ClassVar = {
        "fp32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
    }

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        return super().convert(self.SHORT.get(str(value).lower(), value), param, ctx)


class NamedPath(click.Path):
    """A path; an empty one is refused, as it would be the current folder."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if value == "":
            self.fail(EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class PathOrUrl(NamedPath):
    """A path, or a URL as it stands: a path would lose one of its slashes."""

    envvar_list_splitter = ","  # a URL has the colon that stands between paths

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        is_url = isinstance(value, str) and "://" in value
        return value if is_url else super().convert(value, param, ctx)


class CommaSeparated(click.types.StringParamType):
    """A text of an option that may be repeated; a variable holds several with commas between."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [word for part in rv.split(",") if (word := part.strip())]


class WholeText(CommaSeparated):
    """A text of an option that may be repeated; a variable holds one, with all its spaces."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


PATH = NamedPath(path_type=Path)
LOCATION = PathOrUrl(path_type=Path)
TYPES: Mapping[Any, click.ParamType[Any]] = {  # of Python's types, and of annotations
    **{str: click.STRING, int: click.INT, float: click.FLOAT, bool: click.BOOL},
    **{
        Path: PATH,
        tuple[Path, ...]: PATH,
        tuple[int, ...]: NUMBERS,
        tuple[str, ...]: CommaSeparated(),
    },
    **{Path | str: LOCATION, tuple[Path | str, ...]: LOCATION},
    **{
        kind: DTypeName(get_args(kind), case_sensitive=False)
        for kind in (DType, ModelDType)
    },
    **{
        "duration": DURATION,
        "size": BYTE_SIZE,
        "rate": RATE,
        "whole": WholeText(),
        "pipe": PIPE,
    },
    "folder": NamedPath(file_okay=False, path_type=Path),
}


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
        self.group = group
        self._old = old or {}

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Use the value of an old flag; raise if it contradicts the new flag."""
        for flag, values in self._old.items():
            typed = opts.get(f"old_{flag[2:]}")
            meant = values.get(str(typed).lower()) if values else typed
            # click itself refuses a word that means nothing
            if typed is None or meant is None:
                continue
            name = str(self.name)
            new = self.opts[0]
            opts = {name: meant, **opts}
            if self.type(opts[name], self, ctx) != self.type(meant, self, ctx):
                old = flag if typed is True else f"{flag} {typed}"
                raise click.UsageError(
                    f"{old} and {new} {opts[name]} contradict each other: {old} is the old "
                    f"name of {new} {meant}. Give {new} alone",
                    ctx,
                )
        return super().handle_parse_result(ctx, opts, args)


SHOWS_ALL = "fminfer.shows_all_flags"  # in a context's meta


def _print_whole_help(
    ctx: click.Context, param: click.Parameter, is_wanted: bool
) -> None:
    if is_wanted and not ctx.resilient_parsing:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups; the usage line has the arguments.

    --help shows those of `COMMON`, and of the text what stands before a form feed. --help-all
    shows all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.name in COMMON:
            whole_help = GroupedOption(
                ["--help-all"],
                group="Help",
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_whole_help,
                help="Show every flag, and the whole text.",
            )
            self.params.append(whole_help)

    def format_help_text(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the text, or what of it stands before a form feed."""
        text = self.help
        if ctx.meta.get(SHOWS_ALL):
            self.help = (text or "").replace("\f", "")
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = text

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write one section for each group, or one of common flags."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        params = self.get_params(ctx)
        common = COMMON.get(self.name or "", ())
        if common and not ctx.meta.get(SHOWS_ALL):
            by_name = {param.name: param for param in params}
            records = [_describe_briefly(by_name[name], ctx) for name in common]
            with formatter.section("Common flags"):
                formatter.write_dl(records)
            formatter.write_paragraph()
            num_flags = sum(
                isinstance(param, GroupedOption) and not param.hidden
                for param in params
            )
            formatter.write_text(
                f"All {num_flags} flags: {ctx.command_path} --help-all"
            )
            return
        for param in params:
            record = (
                param.get_help_record(ctx) if isinstance(param, click.Option) else None
            )
            if record is not None:
                rows[
                    param.group if isinstance(param, GroupedOption) else "Help"
                ].append(record)
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def _describe_briefly(param: click.Parameter, ctx: click.Context) -> tuple[str, str]:
    """Return an option's first flag, and the first sentence of its help."""
    assert isinstance(param, click.Option), "arguments have no flags"
    _, text = param.get_help_record(ctx) or ("", "")
    metavar = "" if param.is_flag else param.make_metavar(ctx)
    sentence = re.split(r"(?<=[.:]) |  \[", text, maxsplit=1)[0]
    return f"{param.opts[0]} {metavar}".rstrip(), sentence.rstrip(":")


CONFIG_OPTION = GroupedOption(
    ["--config"],
    group="Configuration",
    metavar="FILE",
    expose_value=False,  # `ConfiguredCommand` reads it
    help="A TOML file of flags by their names, as in: port = 8000. Table [run] is for "
    "run, check "
    "and bench, [serve] for serve. Variables such as FMINFER_PORT override the file; "
    "the command "
    "line overrides both. Paths in it are relative to the working directory.",
)


def make_flags(command: Command) -> list[click.Parameter]:
    """Return the options of a command, in their order."""
    options = options_for(command)
    params: list[click.Parameter] = []
    for option in options:
        params.append(_make_option(option, command))
        params.extend(_make_old_options(option, command))
    if command in OF_ENGINE:
        params.append(CONFIG_OPTION)
    return params


def _make_option(option: Option, command: Command) -> GroupedOption:
    kind = unwrap_hint(option.hint)
    flags = option.all_flags
    help_text = option.help
    if kind is bool and option.default:
        flags = tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags)
    has_default_in_help = (
        "[default:" in help_text
        or option.default in (None, ())
        or option.default is False
    )
    value_type = param_type_of(option)
    if not has_default_in_help and isinstance(value_type, ParsedType):
        help_text += f"  [default: {value_type.format_value(option.default)}]"
        has_default_in_help = True
    return GroupedOption(
        [*flags, option.name],
        group=option.group if isinstance(option.group, str) else option.group[command],
        old=option.old if command == "serve" else option.old_flags,
        type=value_type,
        is_flag=kind is bool,
        multiple=get_origin(kind) is tuple and value_type is not NUMBERS,
        default=option.default,
        show_default=not has_default_in_help,
        metavar=option.metavar,
        help=help_text,
    )


def param_type_of(option: Option) -> click.ParamType[Any]:
    """Return the type by which click reads an option's values."""
    kind = unwrap_hint(option.hint)
    if get_origin(kind) is Literal and kind not in (DType, ModelDType):
        return click.Choice(get_args(kind), case_sensitive=False)
    for mark in find_annotations(option.hint):
        if isinstance(mark, Least) and mark.is_shown:
            return click.IntRange(min=mark.number)
        if isinstance(mark, str):
            return TYPES[mark]
    return TYPES[kind]


def _make_old_options(option: Option, command: Command) -> Iterable[GroupedOption]:
    """Yield an option's old flags; help does not show those of EnergonAI's servers."""
    new = option.all_flags[0]
    for flag, values in option.old.items():
        if not flag.startswith("--") or not (values or command == "serve"):
            continue
        *first, last = values.values() or [""]
        meant = f"{', '.join(first)} or {last}" if first else last
        kind = click.Choice([*values]) if values else param_type_of(option)
        yield GroupedOption(
            [flag, f"old_{flag[2:]}"],
            group="Old command lines",
            is_flag="true" in values or None,  # False would let its value be left out
            type=click.BOOL if "true" in values else kind,
            hidden=not values,
            expose_value=False,  # the new option reads it
            help=f"The same as {f'{new} {meant}'.strip()}.",
        )

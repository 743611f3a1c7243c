"""Reads a configuration file, and FMINFER_ variables, as settings of a command's parameters."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fminfer.cli.config_keys import (
    ALIASES,
    RIVALS,
    TABLES,
    Entry,
    Setting,
    flags_by_key,
    key_of,
    list_file_keys,
    list_flag_keys,
    make_setting,
    translate_keys,
)
from fminfer.cli.flags import GroupedCommand
from fminfer.cli.old_command_lines import FLAGS, describe_python_config
from fminfer.client.remote_options import KEY_VARIABLE
from fminfer.core.errors import UsageError
from fminfer.core.option import Command

PREFIX = "FMINFER_"
FILE_VARIABLE = "FMINFER_CONFIG"
# Variables of ours that are no flags, and the beginning of those of the tests.
OTHER_VARIABLES = (FILE_VARIABLE, "FMINFER_CPU", "FMINFER_SECRET", KEY_VARIABLE)
TEST_PREFIX = "FMINFER_TEST_"
# an empty one is no key, and would open a server to all: it is refused
SECRET = "api_key"


def variable_of(key: str) -> str:
    """Return the variable that sets a flag."""
    return PREFIX + key.upper()


@dataclass(slots=True)
class Settings:
    """What files and variables say of a command's parameters."""

    by_parameter: dict[str, Setting] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)  # to tell the user

    def override_with(self, layer: Mapping[str, Setting]) -> None:
        """Put settings of a higher priority over those that are here."""
        for name in layer:
            self.by_parameter.pop(RIVALS.get(name, ""), None)
        self.by_parameter.update(layer)


def read_settings(
    command: Command, file: str | None, environ: Mapping[str, str]
) -> Settings:
    """Return what is set for `run` or `serve` beside its command line.

    Args:
        file: of --config; None: FMINFER_CONFIG names it, if there is one.
    """
    settings = Settings()
    path = file or environ.get(FILE_VARIABLE)
    if path:
        _read_config_file(
            settings, command, Path(path), "--config" if file else FILE_VARIABLE
        )
    _read_variables(settings, command, environ)
    return settings


def _read_config_file(
    settings: Settings, command: Command, path: Path, source: str
) -> None:
    top_level = _read_toml(path, source)
    tables = {
        name: top_level.pop(name)
        for name in [*top_level]
        if isinstance(top_level[name], dict)
    }
    if unknown := [name for name in tables if name not in TABLES]:
        allowed = " and ".join(f"[{name}]" for name in TABLES)
        raise UsageError(
            f"[{unknown[0]}] in {path} is no table of ours; there are {allowed}"
        )
    _apply_table(settings, command, top_level, f" in {path}", allowed=list_file_keys())
    for name, table in tables.items():
        keys = flags_by_key(name).keys() | ALIASES.keys()
        if name == command:
            _apply_table(
                settings, command, table, f" in [{name}] of {path}", allowed=keys
            )
        else:
            _check_keys(table, f" in [{name}] of {path}", keys)


def _apply_table(
    settings: Settings,
    command: Command,
    table: Mapping[str, Any],
    where: str,
    allowed: Iterable[str],
) -> None:
    _check_keys(table, where, allowed)
    names: dict[str, str] = {}
    for key in table:
        if other := names.get(key_of(key)):
            raise UsageError(f"{other} and {key}{where} are one flag; give one of them")
        names[key_of(key)] = key
    values = {key_of(key): value for key, value in table.items()}
    settings.override_with(
        _make_settings(command, translate_keys(values, lambda key: names[key] + where))
    )


def _check_keys(table: Mapping[str, Any], where: str, allowed: Iterable[str]) -> None:
    for key in table:
        if key_of(key) in allowed:
            continue
        if key_of(key) in list_file_keys():
            raise UsageError(
                f"{key}{where} is a flag of the other command; put it into that one's table, or "
                "above all tables"
            )
        commands = " or ".join(TABLES)
        hint = _suggest_flag(key_of(key), lambda flag: flag.replace("_", "-"))
        raise UsageError(f"{key}{where} is no flag of fminfer {commands}{hint}")


def _suggest_flag(key: str, spell: Callable[[str], str]) -> str:
    """Return what to do for another tool's flag, or the likeliest flag, or an empty text."""
    if text := FLAGS.get(key.replace("_", "-")):
        return f". {text}"
    matches = difflib.get_close_matches(key, sorted(list_flag_keys()), 1)
    return f"; did you mean {spell(matches[0])}?" if matches else ""


def _make_settings(
    command: Command, entries: Iterable[Entry], *, are_variables: bool = False
) -> dict[str, Setting]:
    """Return one layer's settings by parameter, without keys of the other command."""
    flags = flags_by_key(command)
    layer = dict[str, Setting]()
    for entry in entries:
        if entry.key not in flags:
            continue
        name = str(flags[entry.key].option.name)
        setting = make_setting(
            flags[entry.key], entry.value, entry.name, is_variable=are_variables
        )
        if name in layer and layer[name].value != setting.value:
            raise UsageError(
                f"{layer[name].origin} and {entry.name} contradict each other; give one of them"
            )
        layer[name] = setting
    return layer


def _read_variables(
    settings: Settings, command: Command, environ: Mapping[str, str]
) -> None:
    known = list_flag_keys()
    values = dict[str, object]()
    for variable, value in environ.items():
        if (
            not variable.startswith(PREFIX)
            or variable in OTHER_VARIABLES
            or variable.startswith(TEST_PREFIX)
        ):
            continue
        key = variable.removeprefix(PREFIX).lower()
        if variable != variable_of(key) or key not in known:
            hint = _suggest_flag(key, variable_of)
            settings.notices.append(
                f"{variable} is no flag of fminfer, and is ignored{hint}"
            )
        elif value or key == SECRET:
            values[key] = value
    settings.override_with(
        _make_settings(command, translate_keys(values, variable_of), are_variables=True)
    )


def _read_toml(path: Path, source: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    if path.suffix == ".py":
        raise UsageError(describe_python_config(path))
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{source} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also of text that is no UTF-8
        raise UsageError(f"{source} {path} is no TOML: {error}") from error


NOTICES = "fminfer.notices"  # of a context's meta: what to tell the user


class ConfiguredCommand(GroupedCommand):
    """Overrides defaults by the file, that by variables, those by the command line.

    Args:
        settings_of: `run` or `serve`, whose settings count.
    """

    def __init__(self, *args: Any, settings_of: Command, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings_of = settings_of

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give click the settings as defaults, and name where a wrong one stands."""
        typed, _, _ = self.make_parser(ctx).parse_args(list(args))
        help_option = self.get_help_option(ctx)
        if ctx.resilient_parsing or (
            help_option is not None and typed.get(help_option.name)
        ):
            return super().parse_args(ctx, args)
        settings = read_settings(self._settings_of, typed.get("config"), os.environ)
        for name, value in typed.items():
            if isinstance(value, str | bool):  # an argument that is left out is neither
                settings.by_parameter.pop(RIVALS.get(name, ""), None)
        origins = {
            name: setting.origin for name, setting in settings.by_parameter.items()
        }
        ctx.default_map = {
            name: setting.value for name, setting in settings.by_parameter.items()
        }
        ctx.meta[NOTICES] = settings.notices
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = "" if error.param is None else error.param.name or ""
            if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                error.param_hint = origins[name]
            raise


def print_notices(*, is_quiet: bool) -> None:
    """Print what the user should know about files and variables."""
    if not is_quiet:
        for notice in click.get_current_context().meta.get(NOTICES, []):
            click.echo(notice if notice.endswith("?") else f"{notice}.", err=True)

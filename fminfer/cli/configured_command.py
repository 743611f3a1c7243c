"""A command whose flags may also stand in a file, or in variables."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from fminfer.cli.config_file import find_settings
from fminfer.cli.config_keys import RIVALS
from fminfer.cli.options.option_groups import GroupedCommand

NOTICES = "fminfer.notices"  # of a context's meta: what to tell the user


class ConfiguredCommand(GroupedCommand):
    """The command line goes before FMINFER_ variables, these before the file, that before defaults.

    Args:
        settings_of: `run` or `serve`, whose settings count. Those of flags that this command does
            not have are left.
    """

    def __init__(self, *args: Any, settings_of: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings_of = settings_of

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give click the settings as defaults, and name where a wrong one stands.

        Raises:
            UsageError: a file that cannot be read, a key that is no flag, a value of no flag.
        """
        typed, _, _ = self.make_parser(ctx).parse_args(list(args))
        help_option = self.get_help_option(ctx)
        if ctx.resilient_parsing or (help_option is not None and typed.get(help_option.name)):
            return super().parse_args(ctx, args)
        found = find_settings(self._settings_of, typed.get("config"), os.environ)
        for name, value in typed.items():
            if isinstance(value, str | bool):  # an argument that is left out is neither
                found.of.pop(RIVALS.get(name, ""), None)
        origins = {name: setting.origin for name, setting in found.of.items()}
        ctx.default_map = {name: setting.value for name, setting in found.of.items()}
        ctx.meta[NOTICES] = found.notices
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = "" if error.param is None else error.param.name or ""
            if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                error.param_hint = origins[name]
            raise


def tell_notices(*, is_quiet: bool) -> None:
    """Say what the user should know about files and variables."""
    if not is_quiet:
        for notice in click.get_current_context().meta.get(NOTICES, []):
            click.echo(notice if notice.endswith("?") else f"{notice}.", err=True)

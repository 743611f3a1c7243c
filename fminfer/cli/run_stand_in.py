"""A stand-in for `fminfer run`: its flags are checked before they wait in a queue."""

from __future__ import annotations

from typing import Any

import click

from fminfer.cli.configured_command import ConfiguredCommand
from fminfer.cli.run_options import run_options


@click.command("fminfer run", cls=ConfiguredCommand, settings_of="run")
@click.argument("paths", nargs=-1)
@run_options
def run_stand_in(**flags: Any) -> None:
    """Take the flags of `fminfer run`, and do nothing."""

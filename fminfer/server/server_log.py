"""What a server tells on stderr, by its log level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod
from typing import get_args

import click

from fminfer.core.errors import printable
from fminfer.server.settings import LogLevel

LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)  # each tells what those before it tell


@dataclass(slots=True, frozen=True)
class ServerLog:
    """Tells what its level lets through. Any thread may call it.

    Args:
        is_quiet: errors at most, whatever the level.
    """

    level: LogLevel
    is_quiet: bool = False

    def tells(self, level: LogLevel) -> bool:
        """Return whether what is of this level is told."""
        most = LEVELS.index(self.level)
        if self.is_quiet:
            most = min(most, LEVELS.index("error"))
        return LEVELS.index(level) <= most

    def _tell(self, level: LogLevel, text: str) -> None:
        if self.tells(level):
            click.echo(printable(text), err=True)

    error = partialmethod(_tell, "error")  # a fault of ours
    warning = partialmethod(_tell, "warning")  # what is strange about a request
    info = partialmethod(_tell, "info")  # what the server does
    debug = partialmethod(_tell, "debug")  # one response

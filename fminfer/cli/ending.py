"""How a process of the command ends: what it says then, and with which exit status."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from fminfer.cli.exit_status import status_of, status_of_kind
from fminfer.compute.kernels.kernel_build import abandon_build
from fminfer.core.errors import FminferError, StoppedError, printable
from fminfer.files.urls import hide_secrets
from fminfer.runtime.launch.processes import Processes


def tell(error: BaseException, *, is_verbose: bool = False) -> int:
    """Say what ended the process; return its exit status."""
    if isinstance(error, StoppedError):
        click.echo(str(error), err=True)
        return status_of(error)
    if isinstance(error, BrokenPipeError):
        error = FminferError("whoever read the answers stopped reading")
    if is_verbose or not isinstance(error, FminferError):
        click.echo(hide_secrets("".join(traceback.format_exception(error))), err=True, nl=False)
    click.echo(f"Error: {printable(hide_secrets(str(error)))}", err=True)
    return status_of(error)


class Ending:
    """Ends a process of a run, and before it those that it has started."""

    def __init__(self, *, is_verbose: bool = False) -> None:
        self.is_verbose = is_verbose
        self.is_alone = True  # otherwise its threads may wait for others that are gone
        self.children: Processes | None = None

    def at_once(self, kind: str) -> None:
        """End for an error of this kind, which is told already."""
        self._leave(status_of_kind(kind))

    def stop(self, reason: StoppedError) -> None:
        """End for a signal, which is told already."""
        self._leave(status_of(reason))

    def fail(self, error: BaseException, reason: StoppedError | None) -> NoReturn:
        """Say what is wrong and end.

        Args:
            reason: why the process was told to stop, if it was.
        """
        if isinstance(error, KeyboardInterrupt):  # told twice
            error = reason or StoppedError("Interrupted.")
        if isinstance(error, FminferError) and error.is_told and not self.is_verbose:
            status = status_of(error)
        else:
            status = tell(error, is_verbose=self.is_verbose)
        try:
            sys.stdout.flush()
        except OSError:  # told before; Python is not to try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not self.is_alone:
            self._leave(status)
        sys.exit(status)

    def _leave(self, status: int) -> NoReturn:
        if self.children is not None:
            self.children.kill()
        abandon_build()
        os._exit(status)

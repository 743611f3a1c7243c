"""How a process of the command ends: what it says then, and with which exit status."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from fminfer.compute.kernels.kernel_build import abandon_build
from fminfer.core.errors import (
    FminferError,
    StoppedError,
    StopReason,
    UsageError,
    error_of,
    printable,
)
from fminfer.files.remote_files import hide_secrets
from fminfer.machine.stopper import Stopper
from fminfer.runtime.launch.processes import Processes

EXIT_FAILED, EXIT_USAGE, EXIT_SOME_ERRORS = 1, 2, 3
EXIT_STOPPED: dict[StopReason, int] = {
    "out_of_time": 75,  # sysexits' EX_TEMPFAIL: run it again
    "hung_up": 129,  # 128 and the signal's number, as a shell has it
    "interrupted": 130,
    "terminated": 143,
}


def status_of(error: BaseException) -> int:
    """Return the exit status of a command that an error ends."""
    if isinstance(error, StoppedError):
        return EXIT_STOPPED[error.reason]
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


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
    """Ends a process of a run, and before it those that it has started.

    Args:
        grace_s, is_quiet: of its `stopper`, which hears that it is to end.
        is_verbose: show tracebacks.
    """

    def __init__(
        self, grace_s: float = 0.0, *, is_quiet: bool = True, is_verbose: bool = False
    ) -> None:
        self.is_verbose = is_verbose
        self.stopper = Stopper(grace_s, is_quiet=is_quiet, end=self.stop)
        self.is_alone = True  # otherwise its threads may wait for others that are gone
        self.children: Processes | None = None

    def at_once(self, kind: str) -> None:
        """End for an error of this kind, which is told already."""
        self._end(status_of(error_of(kind, "")))

    def stop(self, reason: StoppedError) -> None:
        """End for a signal, which is told already."""
        self._end(status_of(reason))

    def fail(self, error: BaseException) -> NoReturn:
        """Say what is wrong and end."""
        if isinstance(error, KeyboardInterrupt):  # told twice
            error = self.stopper.reason or StoppedError("Interrupted.")
        if isinstance(error, FminferError) and error.is_told and not self.is_verbose:
            status = status_of(error)
        else:
            status = tell(error, is_verbose=self.is_verbose)
        self.leave(status)

    def leave(self, status: int) -> NoReturn:
        """End with this status, once what was printed is written."""
        try:
            sys.stdout.flush()
        except OSError:  # told before; Python is not to try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not self.is_alone:
            self._end(status)
        sys.exit(status)

    def _end(self, status: int) -> NoReturn:
        if self.children is not None:
            self.children.kill()
        abandon_build()
        os._exit(status)

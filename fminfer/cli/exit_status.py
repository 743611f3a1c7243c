"""The exit statuses of the commands: the one place that knows them."""

from __future__ import annotations

from fminfer.core.errors import StoppedError, StopReason, UsageError, error_of

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


def status_of_kind(kind: str) -> int:
    """Return the same by the error's kind, which another process has told."""
    return status_of(error_of(kind, ""))

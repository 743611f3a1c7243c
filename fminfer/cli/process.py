"""How a process of the command starts, and how it ends: what it says, and its exit status."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import click

from fminfer.compute.kernels.kernel_build import abandon_build, start_build
from fminfer.core.config import ComputeOptions, EngineConfig
from fminfer.core.errors import (
    FminferError,
    MachineError,
    PipelineError,
    StoppedError,
    StopReason,
    UsageError,
    make_error,
    make_printable,
)
from fminfer.core.terminal import find_width, wrap_lines
from fminfer.files.remote_files import hide_secrets
from fminfer.machine.host_memory import reading_files, touching_memory
from fminfer.machine.library_imports import importing_libraries
from fminfer.machine.processor import hide_tiles
from fminfer.machine.stopper import Stopper
from fminfer.models.known_sizes import check_split
from fminfer.models.model_folder import find_weight_files
from fminfer.runtime.launch.processes import ProcessContext, Processes
from fminfer.runtime.launch.role import Role

STARTED_S = time.perf_counter()
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
Context = TypeVar("Context", bound=ProcessContext)
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SOME_ERRORS = 3
EXIT_STOPPED: dict[StopReason, int] = {
    "out_of_time": 75,  # sysexits' EX_TEMPFAIL: run it again
    "hung_up": 129,  # 128 and the signal's number, as a shell has it
    "interrupted": 130,
    "terminated": 143,
}


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a command that an error ends."""
    if isinstance(error, StoppedError):
        return EXIT_STOPPED[error.reason]
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def print_wrapped(text: str, *, err: bool = False) -> None:
    """Print a text, wrapped where a terminal is too narrow for it."""
    click.echo(wrap_lines(text, find_width(sys.stderr if err else sys.stdout)), err=err)


def print_error(error: BaseException, *, is_verbose: bool = False) -> int:
    """Print the error that ended the process; return its exit status."""
    if isinstance(error, StoppedError):
        click.echo(str(error), err=True)
        return exit_status_of(error)
    if isinstance(error, BrokenPipeError):
        error = FminferError("whoever read the answers stopped reading")
    if isinstance(error, OSError) and error.errno and not is_verbose:
        error = MachineError(
            f"{error.filename or 'a file'}: {error.strerror}. Finished rows are kept; see that "
            "the disk is there and sound, and run the same command again"
        )
    if is_verbose or not isinstance(error, FminferError):
        click.echo(
            hide_secrets("".join(traceback.format_exception(error))), err=True, nl=False
        )
    click.echo(f"Error: {make_printable(hide_secrets(str(error)))}", err=True)
    return exit_status_of(error)


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
        self.stopper = Stopper(grace_s, is_quiet=is_quiet, end=self.exit_for_signal)
        self.is_alone = True  # otherwise its threads may wait for others that are gone
        self.children: Processes | None = None

    def exit_at_once(self, kind: str) -> None:
        """Exit for an error of this kind, which is printed already."""
        self._kill_and_exit(exit_status_of(make_error(kind, "")))

    def exit_for_signal(self, reason: StoppedError) -> None:
        """Exit for a signal, which is printed already."""
        self._kill_and_exit(exit_status_of(reason))

    def fail(self, error: BaseException) -> NoReturn:
        """Print what is wrong and exit."""
        if isinstance(error, KeyboardInterrupt):  # a second signal
            error = self.stopper.reason or StoppedError("Interrupted.")
        # a thread may wait for a device that hangs
        if isinstance(error, PipelineError):
            self.is_alone = False
        if (
            isinstance(error, FminferError)
            and error.is_reported_elsewhere
            and not self.is_verbose
        ):
            status = exit_status_of(error)
        else:
            status = print_error(error, is_verbose=self.is_verbose)
        self.exit(status)

    def exit(self, status: int) -> NoReturn:
        """Exit with this status, once what was printed is written."""
        try:
            sys.stdout.flush()
        except OSError:  # printed before; Python is not to try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not self.is_alone:
            self._kill_and_exit(status)
        sys.exit(status)

    def _kill_and_exit(self, status: int) -> NoReturn:
        if self.children is not None:
            self.children.kill()
        abandon_build()
        os._exit(status)


def elapsed_s() -> float:
    """Return the seconds since the command started."""
    return time.perf_counter() - STARTED_S


@contextmanager
def starting_process(
    make_context: Callable[..., Context],
    config: EngineConfig,
    role: Role,
    ending: Ending,
    *,
    is_quiet: bool,
) -> Iterator[Context]:
    """Start the child processes, which import beside this one; end them at last.

    Args:
        make_context: makes the `ProcessContext` of this process.
    """
    if role.kind == "starter":
        check_split(config, role.spread.num_stages)
    ending.is_alone = role.kind == "alone"
    children = ending.children = Processes.of(role)
    ending.stopper.on_second = children.kill
    try:
        yield make_context(
            config,
            role,
            children,
            ending.stopper,
            ending.exit_at_once,
            elapsed_s,
            is_quiet=is_quiet,
            is_verbose=ending.is_verbose,
        )
    finally:
        children.end()


@contextmanager
def importing_engine(config: EngineConfig, role: Role) -> Iterator[None]:
    """Import the engine in the body, while kernels are built and weights are read."""
    # torch's own words on broken connections say less than ours
    if role.kind != "alone":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_kernel_build(config)
    files: dict[Path, int] = {}
    if role.kind == "alone" and config.model is not None and _is_for_cpu(config.device):
        files = find_weight_files(config.model)
    share = {"int8": 0.55, "int4": 0.35}.get(config.quantized_to[:4], 1.0)
    # packed, and as much for the KV cache
    num_bytes = int(2 * share * sum(files.values()))
    with reading_files(files), touching_memory(num_bytes), importing_libraries():
        yield


def start_kernel_build(options: ComputeOptions) -> None:
    """Build the CPU's kernels in the background, if a command is likely to use them."""
    if options.same_answers == "on":
        hide_tiles()
    if options.kernels != "off" and _is_for_cpu(options.device):
        start_build()


def _is_for_cpu(device: str) -> bool:
    """Predict, without torch, whether a command will compute on the CPU."""
    return device == "cpu" or (
        device == "auto" and not any(map(os.path.exists, GPU_DRIVERS))
    )

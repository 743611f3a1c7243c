"""`fminfer serve-part`: what an engine starts as its other processes; it is for nobody else."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TextIO

import click

from fminfer.cli.process import Ending, start_kernel_build
from fminfer.machine.library_imports import importing_libraries
from fminfer.runtime.launch.processes import (
    MEANT_FOR_FIRST,
    Processes,
    end_after,
    end_parent,
)
from fminfer.runtime.launch.role import Task, rank_names

END_S = 5.0  # for the process that started this one to end, once the run has failed


@click.command(hidden=True)
@click.argument("name")
@click.option("--ranks", "num_ranks", type=int, default=0)
def serve_part(name: str, num_ranks: int) -> None:
    """Be a process that an engine has started: it says on stdin what is to be done.

    NAME is what its words begin with; it starts so many --ranks of its own.
    """
    parent = os.getppid()
    end_after(parent)
    ending = Ending()
    ending.is_alone = False
    ending.stopper.defer_to_rank_0()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_FIRST)
    sys.stdout = sys.stderr = _PrefixedStream(sys.stderr, name)
    # they import beside this one
    ending.children = Processes(rank_names(num_ranks + 1))
    try:
        _run_task(ending, parent)
    except (Exception, KeyboardInterrupt) as error:
        ending.fail(error)
    sys.stderr.flush()
    ending.children.end(END_S)
    os._exit(0)


def _run_task(ending: Ending, parent: int) -> None:
    assert ending.children is not None
    with importing_libraries():
        from fminfer.runtime.process_roles import do_task

    line = sys.stdin.readline()
    if not line:  # there is nothing to do, or whoever would say it is gone
        return
    task = Task.from_json(line)
    options = task.child_options
    ending.stopper.grace_s = options.grace_s
    ending.is_verbose = options.is_verbose
    if not options.is_of_command:  # a program may hear SIGTERM and go on
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not options.is_verbose:
        import transformers

        transformers.logging.set_verbosity_error()
    start_kernel_build(task.config)

    def end_run(kind: str) -> None:
        sys.stderr.flush()
        if options.is_of_command:
            end_parent(parent, END_S)
        ending.exit_at_once(kind)

    do_task(task, ending.children, end_run)


class _PrefixedStream(io.TextIOBase):
    """A stream whose lines begin with the name of the process."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._prefix = f"[{name}] "
        self._is_inside = False  # of a line

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click asks so whether bytes are taken
            raise TypeError(f"{type(text).__name__} is not text")
        for line in text.splitlines(keepends=True):
            self._stream.write(line if self._is_inside else self._prefix + line)
            self._is_inside = not line.endswith("\n")
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

"""The command in a process that has torch and transformers already: a fork takes no imports.

Most tests of several ranks ask what ranks say to each other, not how the command starts, which
takes two seconds of a core. A forked command has its own variables, output and signals.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

_context: ForkServerContext | None = None


class Forked:
    """A run of the command; what tests need of subprocess.Popen."""

    def __init__(self, arguments: list[str], environ: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / name for name in ("out", "err")]
        given = (arguments, environ, os.getcwd(), *map(str, self._said))
        self._process = _server().Process(target=_command, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("fminfer", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._said)
        return out, err

    def said(self) -> str:
        """Return what stands on stderr so far."""
        return self._said[1].read_text() if self._said[1].exists() else ""

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()


def _server() -> ForkServerContext:
    """Return what forks, which has imported what the command imports."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["fminfer.cli", "fminfer.running"])
    return _context


def _command(
    arguments: list[str], environ: dict[str, str], folder: str, out: str, err: str
) -> None:
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = ["fminfer", *arguments]
    from fminfer.cli import main

    main()

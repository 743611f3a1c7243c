"""The command in a process that has torch and transformers already: a fork takes no imports.

Most tests ask what the command answers, and what ranks say to each other, not how a
process starts, which takes three seconds of a core. A forked command has its own
variables, files and signals. The ranks and pipelines that it starts are forked as well,
and so are the commands of a shell that has programs() in its PATH, and what an engine
of the tests' process starts within forked_ranks().
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import inspect
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import pytest

COMMAND = [sys.executable, "-m", "fminfer"]
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37  # of <linux/prctl.h>
libc = ctypes.CDLL(None)
_context: ForkServerContext | None = None
_adopts = threading.Lock()  # of what prctl says of this process
# of subprocess
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Forked:
    """A run of the command; what tests need of subprocess.Popen.

    Args:
        arguments: of fminfer.
        environ: its variables; default: those of this process.
        folder: where it runs; default: where this process does.
        files: its stdin, stdout and stderr; default: nothing to read, and what
        communicate() gives.
        network: its network namespace, a name of `ip netns`; default: that of this process.
        is_session: it has a session and a process group of its own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        files: Sequence[int | None] = (None, None, None),
        network: str | None = None,
        *,
        is_session: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / name for name in ("out", "err")]
        own = [os.open(os.devnull, os.O_RDONLY)]
        own += [os.open(path, os.O_WRONLY | os.O_CREAT) for path in self._said]
        taken = [
            mine if given is None else given
            for given, mine in zip(files, own, strict=True)
        ]
        variables = dict(os.environ if environ is None else environ)
        place = (str(folder or Path.cwd()), network, is_session)
        what = (list(arguments), variables, place, _Descriptors(taken))
        self._process = fork_server().Process(target=_command, args=what)
        try:
            self._process.start()
        finally:
            for descriptor in own:
                os.close(descriptor)
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
        return self._said[1].read_text()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()


def run_forked(
    arguments: Sequence[object], timeout: float = 120, **options: Any
) -> Any:
    """Run the command to its end, as subprocess.run does.

    Args:
        options: of Forked.
    """
    given = [*map(str, arguments)]
    run = Forked(given, **options)
    try:
        out, err = run.communicate(timeout)
        return subprocess.CompletedProcess(given, run.wait(), out, err)
    finally:
        run.kill()


class _Descriptors:
    """Descriptors that travel to the forked process."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ([reduction.DupFd(number) for number in self.numbers],)


def _received(descriptors: list[Any]) -> _Descriptors:
    return _Descriptors([each.detach() for each in descriptors])


def fork_server() -> ForkServerContext:
    """Return what forks, which has imported what the command imports."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["tests.preloaded"])
    return _context


def _command(
    arguments: list[str],
    environ: dict[str, str],
    place: tuple[str, str | None, bool],
    files: _Descriptors,
) -> NoReturn:
    for target, descriptor in enumerate(files.numbers):
        os.dup2(descriptor, target)
        os.close(descriptor)
    folder, network, is_session = place
    os.chdir(folder)
    if is_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    if network is not None:
        with open(f"/run/netns/{network}") as namespace:
            assert libc.setns(namespace.fileno(), 0) == 0
    _be_fminfer([*COMMAND, *arguments], environ)


def _be_fminfer(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Do in this process, just forked, what a new one does with `python -m fminfer …`."""
    os.environ.clear()
    os.environ.update(environ)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    sys.argv = ["fminfer", *command[len(COMMAND) :]]
    sys.orig_argv = command
    subprocess.Popen = _ForkingPopen  # type: ignore[misc]
    gc.enable()
    status = 1
    try:
        import tqdm

        # Not in the process of the tests, which may only use programs().
        from fminfer.cli import app, process

        # no thread for it, which a fork would leave behind
        tqdm.tqdm.monitor_interval = 0
        process.STARTED_S = time.perf_counter()
        for place in filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)):
            with contextlib.suppress(FileNotFoundError):
                runpy.run_path(f"{place}/sitecustomize.py")
        app.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


class _ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts ranks and pipelines by a fork, unless that would leave a thread behind."""

    def __init__(self, args: Any, **options: Any) -> None:
        if args[: len(COMMAND)] == COMMAND and len(os.listdir("/proc/self/task")) == 1:
            kept = {0, 1, 2, resource_tracker.getfd(), *options.get("pass_fds", ())}

            def run() -> NoReturn:  # in the child, where it would execute the program
                for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - kept:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                _be_fminfer(args, options["env"])

            options["preexec_fn"] = run
        super().__init__(args, **options)


@pytest.fixture(scope="package", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Fork what engines of this process start; a folder's conftest.py imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _AdoptingPopen)
        yield


class _AdoptingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Has the server fork ranks and pipelines, which then are children of this process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[: len(COMMAND)] != COMMAND:
            return super()._execute_child(args, *rest)  # type: ignore[misc]
        execute = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(args, *rest).arguments
        assert not any(
            given[name] for name in ("cwd", "preexec_fn", "start_new_session")
        )
        pipes = [given[name] for name in PIPES]
        pass_fds = given["pass_fds"]
        told, tell = os.pipe()
        targets = [0, 1, 2, *pass_fds]
        files = [pipes[0], pipes[3], pipes[5], *pass_fds, tell]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        place = (str(Path.cwd()), mask, targets)
        what = (args, given["env"], place, _Descriptors(files))
        before = ctypes.c_int()
        with _adopts:
            libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # its children's orphans are its own
            try:
                middle = fork_server().Process(target=_fork_again, args=what)
                middle.start()
                os.close(tell)
                self.pid = int(os.read(told, 20))
                middle.join()
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)
                os.close(told)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _fork_again(
    command: list[str],
    environ: dict[str, str],
    place: tuple[str, set[signal.Signals], list[int]],
    files: _Descriptors,
) -> None:
    """Be in between: the process that this forks is adopted once this one has ended."""
    own = os.getpid()
    if os.fork():
        os._exit(0)
    folder, mask, targets = place
    os.chdir(folder)
    # from here on nothing is in the way
    first = 1 + max(targets + files.numbers + [100])
    *given, tell = [fcntl.fcntl(each, fcntl.F_DUPFD, first) for each in files.numbers]
    tracker = resource_tracker._resource_tracker
    tracker._fd = fcntl.fcntl(resource_tracker.getfd(), fcntl.F_DUPFD, first)  # type: ignore[attr-defined]
    os.closerange(0, first)
    for descriptor, target in zip(given, targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    Path("/proc/self/comm").write_text(command[len(COMMAND)])
    while os.getppid() == own:
        time.sleep(0.001)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _be_fminfer(command, environ)


# Asks the process of the tests for a command, and ends as it does.
ASK = """
import json, os, signal, socket, sys
name, *words = sys.argv[1:]
if name == "python":
    if words[:2] != ["-m", "fminfer"]:
        os.execv({python!r}, [{python!r}, *words])
    del words[:2]
tests = socket.socket(socket.AF_UNIX)
tests.connect({place!r})
socket.send_fds(tests, [b" "], [0, 1, 2])
tests.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode())
tests.shutdown(socket.SHUT_WR)
told = tests.makefile()
pid = int(told.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(told.readline())
sys.exit(status) if status >= 0 else os.kill(os.getpid(), -status)
"""


def programs(folder: Path) -> str:
    """Write the programs `fminfer` and `python`, which fork; return a PATH that begins
    with them.

    Another program than fminfer is started by `python` as always.
    """
    folder.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux finds a name, without a file
    listener.listen(64)
    threading.Thread(target=_fork_for, args=(listener,), daemon=True).start()
    ask = ASK.format(python=sys.executable, place=listener.getsockname())
    (folder / "ask.py").write_text(ask)
    for name in ("fminfer", "python"):
        words = [sys.executable, "-I", "-S", str(folder / "ask.py"), name]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def _fork_for(listener: socket.socket) -> None:
    while True:
        asker = listener.accept()[0]
        threading.Thread(target=_fork_one, args=(asker,), daemon=True).start()


def _fork_one(asker: socket.socket) -> None:
    with asker, asker.makefile("rb") as what:
        files = socket.recv_fds(asker, 1, 3)[1]
        words, environ, folder = json.loads(what.read())
        run = Forked(words, environ, folder, files)
        for descriptor in files:
            os.close(descriptor)
        asker.sendall(f"{run.pid}\n".encode())
        asker.sendall(f"{run.wait()}\n".encode())

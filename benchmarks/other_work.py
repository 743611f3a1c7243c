"""Other work on the machine, beside which peers.py times its sides.

python other_work.py compute FOLDER    # a process that only computes, until its parent is gone
python other_work.py build FOLDER      # one that compiles the kernels into it, again and again
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE.parent))  # the package beside this file, installed or not

from fminfer.compute.kernels.kernel_build import FLAGS, SOURCES, find_compiler  # noqa: E402
from fminfer.machine import processor  # noqa: E402

BUILD = "build"
NUM_COMPILERS = 4
TURNS = 1_000_000  # of a loop, tens of milliseconds, between two looks at who is there


def describe(busy: str) -> str:
    """Say beside what the sides run."""
    if busy == BUILD:
        return f"beside a build of {NUM_COMPILERS} processes"
    return {"0": "alone", "1": "beside 1 busy process"}.get(
        busy, f"beside {busy} busy processes"
    )


@contextlib.contextmanager
def other_work(busy: str) -> Iterator[None]:
    """Keep the machine busy as long as the block runs.

    Args:
        busy: how many processes compute, as digits; or `build`.
    """
    kind, number = (BUILD, NUM_COMPILERS) if busy == BUILD else ("compute", int(busy))
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_started(kind, folder)) for _ in range(number)]
        for process in processes:
            if not (process.stdout and process.stdout.readline()):
                raise RuntimeError(
                    f"a process beside the sides ended: other_work.py {kind}"
                )
        yield


@contextlib.contextmanager
def _started(kind: str, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, in a session of its own so that its compiler ends with it."""
    own = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, __file__, kind, own]
    # what the compiler leaves goes with the folder
    environ = os.environ | {"TMPDIR": own}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environ, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _compute(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        for _ in range(TURNS):
            pass


def _build(parent: int, folder: str) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("there is no C++ compiler; install g++, or set CXX to one")
    flags = [
        *FLAGS,
        *processor.choose_compiler_flags(),
        "-fPIC",
        "-c",
        "-o",
        f"{folder}/kernel.o",
    ]
    for source in itertools.cycle(sorted(SOURCES.glob("*.cpp"))):
        if os.getppid() != parent:
            return
        subprocess.run([*compiler, *flags, str(source)], check=True)


if __name__ == "__main__":
    starter = os.getppid()
    print("ready", flush=True)
    {"compute": _compute, BUILD: _build}[sys.argv[1]](starter, sys.argv[2])

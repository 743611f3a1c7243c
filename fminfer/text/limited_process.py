"""Work on a client's text, in processes of their own that the kernel ends at a limit.

Compilers of grammars and renderers of templates have no limit of time: a number that must be a
multiple of 123,456,789 keeps llguidance busy for hours. In a process, the kernel sets the limit.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

SECONDS = 2.0  # of computing for one message
WAIT_SECONDS = 60  # in all, for work that waits and does not compute
MEMORY_BYTES = 2 << 30
# half of what our own threads have: what passes here passes there, too
STACK_BYTES = 4 << 20
ANSWER_BYTES = 16 << 20  # of an answer in JSON

Work = Callable[[Any], Any]


class LimitError(ValueError):
    """A message took more time or memory than a limited process has for it."""


class LimitedPool:
    """A few processes, each of which answers one message after another.

    A process starts when all others are busy, and is kept. Any thread may call a pool. Calls
    wait while all processes are busy.

    Args:
        build: a function of a module. A process imports the module and calls this once, without
            limits; what it returns answers messages. Messages and answers are JSON values.
        num_processes: at most so many run at once.
        seconds: of computing for one message.
    """

    def __init__(
        self,
        build: Callable[[], Work],
        num_processes: int = 2,
        seconds: float = SECONDS,
    ) -> None:
        self._seconds = seconds
        self._num_processes = num_processes
        self._build = build.__module__
        settings = [self._build, build.__qualname__, seconds, sys.path]
        self._command = [sys.executable, __file__, json.dumps(settings)]
        self._reset_processes()

    def ask(self, message: Any) -> Any:
        """Return the answer to a message.

        Raises:
            LimitError: it takes too long, or too much memory.
            ValueError: what the work itself raised, of any type; its text is the same.
            OSError: the process cannot run here.
        """
        # no process is used for what is no JSON
        answer = self.ask_all([json.dumps(message)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask_all(self, messages: Iterable[str]) -> list[Any]:
        """Return the answers to the first of some messages in JSON, at least to one.

        The process works on each message while the next one is made. An error of `ask` stands in
        place of an answer. A message that ends the process is the last one.
        """
        if self._owner_pid != os.getpid():  # a fork, which has its parent's pipes
            self._reset_processes()
        process = self._free.get()
        is_kept = False
        try:
            if process is None or process.poll() is not None:
                process = self._start_process()
            lines, num_sent = _exchange_lines(process, messages)
            is_kept = len(lines) == num_sent
            if not is_kept:
                process.wait()
        finally:
            # Ctrl-C: its answer is not the next one's
            if process is not None and not is_kept:
                process.kill()
                process.communicate()
            self._free.put(process if is_kept else None)

        answers = [_read_answer(line) for line in lines]
        if not is_kept and process.returncode >= 0:  # no signal ended it
            answers.append(
                OSError(
                    f"{sys.executable} cannot import {self._build}. Install what it needs"
                )
            )
        elif not is_kept:
            answers.append(
                LimitError(
                    f"it takes more than {self._seconds:g} s, or {MEMORY_BYTES >> 30} "
                    "GB of memory"
                )
            )
        return answers

    def _reset_processes(self) -> None:
        self._owner_pid = os.getpid()
        # The last that was put is taken first; None stands for a process that is not started.
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(self._num_processes):
            self._free.put(None)

    def _start_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )


def _exchange_lines(
    process: subprocess.Popen[bytes], messages: Iterable[str]
) -> tuple[list[bytes], int]:
    """Return the lines that answer messages, and how many were sent; fewer: the process ended.

    Messages that are sent together fit the pipe, whose pages may be half empty. So sending never
    waits for a process which waits until its answers are read.
    """
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    # a user of many has smaller ones
    most = fcntl.fcntl(process.stdin, fcntl.F_GETPIPE_SZ) // 2
    num_sent = 0
    num_bytes = 0
    with suppress(OSError):  # it has ended
        for message in messages:
            # with the end of its line
            if num_sent and num_bytes + len(message) >= most:
                break
            num_sent += 1
            num_bytes += len(message) + 1
            process.stdin.write(message.encode() + b"\n")
            process.stdin.flush()
    lines = [process.stdout.readline() for _ in range(num_sent)]
    return [line for line in lines if line.endswith(b"\n")], num_sent


def _read_answer(line: bytes) -> Any:
    answer, fault = json.loads(line)
    return ValueError(fault) if fault else answer


def _serve_lines(work: Work, seconds: float) -> None:
    """Answer each line of stdin. Signals of the two timers end the process."""
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    for number in (signal.SIGPROF, signal.SIGALRM):
        # a parent that ignores them passes that on
        signal.signal(number, signal.SIG_DFL)
    replies = sys.stdout.buffer
    sys.stdout = sys.stderr  # what the work prints is no answer
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        replies.write(_answer_line(work, line))
        signal.setitimer(signal.ITIMER_REAL, 0)  # the other stands still during waits
        replies.flush()


def _answer_line(work: Work, line: bytes) -> bytes:
    try:
        reply = json.dumps([work(json.loads(line)), ""])
        if len(reply) > ANSWER_BYTES:
            raise ValueError(
                f"it becomes {len(reply):,} bytes; {ANSWER_BYTES:,} are allowed"
            )
    except MemoryError:
        os.abort()
    except BaseException as error:  # such as a panic of Rust
        reply = json.dumps([None, str(error) or type(error).__name__])
    return reply.encode() + b"\n"


if __name__ == "__main__":
    module, name, seconds, sys.path = json.loads(sys.argv[1])
    _serve_lines(getattr(importlib.import_module(module), name)(), seconds)

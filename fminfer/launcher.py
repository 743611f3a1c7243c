"""Starts one process a rank on this machine, watches them, and ends them together.

Each is this very command with torchrun's variables set. It knows processes and needs no torch.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import IO

from fminfer.ranks import LISTEN_FD, PARENT, SECRET
from fminfer.stopping import is_repeat, signals_to_hear

GRACE_S = 4.0  # for ranks to end by themselves once one has failed
KILL_S = 1.0  # from SIGTERM to SIGKILL
POLL_S = 0.05
OUTLIVE_S = 5.0  # a rank that knows of its launcher's death has so long to end by itself


def launch(args: list[str], world_size: int, descriptors: tuple[int, ...] = ()) -> int:
    """Run `fminfer` with these arguments as so many ranks; return the exit status.

    Args:
        descriptors: files that are open here and are rank 0's as well.

    The status is rank 0's, which knows what became of the rows; 1 if a signal ended it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        place = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            SECRET: secrets.token_hex(32),
        }
        ranks = [_start(args, rank, place, listener, descriptors) for rank in range(world_size)]
    forwards = [
        threading.Thread(target=_forward, args=(process.stdout, rank), daemon=True)
        for rank, process in enumerate(ranks)
        if process.stdout is not None
    ]
    for thread in forwards:
        thread.start()
    try:
        return _Launcher(ranks).wait()
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()  # also one that is stopped
                rank.wait()
        for thread in forwards:
            thread.join(1)  # longer only if a rank's own child keeps the pipe open


def end_after(parent: int) -> None:
    """Have this rank end soon after the launcher that started it, whatever it is doing then.

    While rows run it notices by itself and says so; imports and a stuck file system do not.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(OUTLIVE_S)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _start(
    args: list[str],
    rank: int,
    place: dict[str, str],
    listener: socket.socket,
    descriptors: tuple[int, ...],
) -> subprocess.Popen[bytes]:
    """Start a rank. Rank 0 has this terminal; the others' words come with their names."""
    environ = os.environ | place
    environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        PARENT: str(os.getpid()),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if sys.path[0] not in ("", os.getcwd()):  # `python -m` must not look there if we did not
        environ["PYTHONSAFEPATH"] = "1"
    command = [sys.executable, "-m", "fminfer", *args]
    # A session of their own: Ctrl-C reaches the launcher alone, which tells rank 0.
    if rank == 0:
        environ[LISTEN_FD] = str(listener.fileno())
        descriptors = (*descriptors, listener.fileno())
        return subprocess.Popen(command, env=environ, pass_fds=descriptors, start_new_session=True)
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _forward(output: IO[bytes], rank: int) -> None:
    for line in output:
        sys.stderr.write(f"[rank {rank}] {line.decode(errors='replace')}")
        sys.stderr.flush()


class _Launcher:
    """Waits for the ranks."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self._ranks = ranks
        self._num_signals = 0
        self._told_s, self._told_status = 0.0, 1  # when, and what status that means
        self._term_at: float | None = None  # when those that are left are asked to end
        for number in signals_to_hear():
            signal.signal(number, self._pass_on)

    def wait(self) -> int:
        """Return the exit status once every rank has ended."""
        first_failed: int | None = None
        while True:
            statuses = [rank.poll() for rank in self._ranks]
            failed = [r for r, status in enumerate(statuses) if status]
            if failed and first_failed is None:
                # Who was killed died first; others may have ended since, on its account.
                first_failed = min(failed, key=lambda rank: statuses[rank] or 0)
            if None not in statuses:  # perhaps all since the last look
                return self._status(first_failed)
            if self._term_at is None and (failed or statuses[0] is not None):
                self._term_at = time.monotonic() + GRACE_S
            if statuses[0]:  # nothing is left to be saved
                self._term_at = min(self._term_at or time.monotonic(), time.monotonic())
            self._end_late_ones()
            time.sleep(POLL_S)

    def _end_late_ones(self) -> None:
        late_s = time.monotonic() - (self._term_at or time.monotonic())
        for rank in self._ranks if late_s > 0 else ():
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL if late_s > KILL_S else signal.SIGTERM)

    def _status(self, first_failed: int | None) -> int:
        statuses = [rank.returncode for rank in self._ranks]
        for rank, status in enumerate(statuses):
            if status < 0 and rank == first_failed and self._num_signals < 2:
                name = signal.Signals(-status).name
                why = " (the system does so when memory runs out)" if status == -9 else ""
                print(f"Error: rank {rank} was ended by {name}{why}", file=sys.stderr)
        if statuses[0] < 0 and self._num_signals > 1:  # ended at once, as told
            return self._told_status
        return statuses[0] if statuses[0] >= 0 else 1

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let rank 0 end the run in good order; a second signal ends all ranks at once."""
        now_s = time.monotonic()
        if self._num_signals and is_repeat(number, now_s - self._told_s):
            return
        self._num_signals += 1
        self._told_s, self._told_status = now_s, 128 + number
        for rank in self._ranks if self._num_signals > 1 else self._ranks[:1]:
            if rank.poll() is None:
                rank.send_signal(number if self._num_signals == 1 else signal.SIGKILL)

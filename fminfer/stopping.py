"""Ends a run in good order: Ctrl-C, SIGTERM, a scheduler's warning, a wall-time limit.

It knows signals and clocks, not rows.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fminfer.errors import StoppedError, UsageError

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
EXIT_OUT_OF_TIME = 75  # sysexits' EX_TEMPFAIL: run it again
# Slurm's --signal and LSF's -wa send one of the user's choice; LSF's run limit sends SIGUSR2.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SPARE_S = 5.0  # from the end of the grace to that of the processes
AGAIN = "Finished rows are kept; the same command, without --restart, goes on from there."
REPEAT_S = 1.0  # a signal to all processes of a job comes by the launcher once more


def parse_duration(text: str) -> float:
    """Return the seconds of 3:50:00, 45:00 (minutes), 90 (seconds), 2h, 30m or 15s.

    Raises:
        ValueError: it is none of that.
    """
    units = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if units is not None:
        return float(units[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[units[2]]
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)", text.strip())
    if parts is None or int(parts[4]) > 59:
        raise ValueError(f"{text!r} is no duration; write 3:50:00, 45:00, 2h, 30m or 90 (seconds)")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class Stopper:
    """Hears that a run is to stop, and tells it.

    Args:
        grace_s: how long rows that run may go on.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deadline_s: float | None = None
        self._stop: Callable[[float], None] | None = None  # the engine's, while it runs
        self._watchdog: threading.Timer | None = None
        self._is_reading = False
        self._heard_s = float("-inf")
        self.reason: StoppedError | None = None

    def set_deadline(self, deadline_s: float) -> None:
        """Have the run end by a moment, in time.monotonic()."""
        self._deadline_s = deadline_s

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear signals, and mind the deadline; in the main thread. Afterwards they are ignored."""
        numbers = (signal.SIGINT, signal.SIGTERM, *WARNINGS)
        for number in numbers:
            signal.signal(number, self._hear)
        timer: threading.Timer | None = None
        if self._deadline_s is not None:
            left_s = max(0.0, self._deadline_s - self._grace_s - time.monotonic())
            main = threading.main_thread().ident
            assert main is not None
            # A signal to itself is heard wherever the main thread waits.
            timer = threading.Timer(left_s, signal.pthread_kill, (main, signal.SIGXCPU))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if self._watchdog is not None:
                self._watchdog.cancel()
            for number in numbers:  # the process ends now, and with the status that it has
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def telling(self, stop: Callable[[float], None]) -> Iterator[None]:
        """Have a run's `stop` called with the grace, in seconds, when it is to stop."""
        self._stop = stop
        try:
            if self.reason is not None:
                raise self.reason
            yield
        finally:
            self._stop = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let a wait for input end at once when the run is to stop, by StoppedError."""
        if self.reason is not None:
            raise self.reason
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def leave_to_rank_0(self) -> None:
        """Signals reach every rank of a cluster's job; rank 0 ends the run in good order.

        One that is told to end, and is still there when rank 0 must have ended, ends by itself.
        """
        for number in (signal.SIGINT, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)
        timer = threading.Timer(self._grace_s + SPARE_S, os._exit, (EXIT_TERMINATED,))
        timer.daemon = True
        signal.signal(signal.SIGTERM, lambda number, frame: _start_once(timer))

    def _give_up(self) -> None:
        assert self.reason is not None
        print(f"{self.reason} (It did not end within --grace.)", file=sys.stderr, flush=True)
        os._exit(self.reason.exit_status)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.reason is not None:
            if number in WARNINGS or now_s - self._heard_s < REPEAT_S:
                return  # schedulers repeat them
            self.reason = _reason(signal.Signals(number))
            raise KeyboardInterrupt  # asked twice: at once
        self.reason, self._heard_s = _reason(signal.Signals(number)), now_s
        # Steps may be long, and ranks may hang: what is on disk is good in any case.
        self._watchdog = threading.Timer(self._grace_s + SPARE_S, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()
        if self._stop is None:  # nothing runs yet
            raise self.reason
        self._stop(self._grace_s)
        if self._is_reading:
            raise self.reason


def _start_once(timer: threading.Timer) -> None:
    if timer.ident is None:
        timer.start()


def _reason(number: signal.Signals) -> StoppedError:
    if number == signal.SIGINT:
        return StoppedError(f"Interrupted. {AGAIN}", "cancelled", EXIT_INTERRUPTED)
    if number == signal.SIGTERM:
        return StoppedError(f"Terminated. {AGAIN}", "cancelled", EXIT_TERMINATED)
    return StoppedError(f"Out of time ({number.name}). {AGAIN}", "expired", EXIT_OUT_OF_TIME)


def check_times(grace_s: float, deadline_s: float | None) -> None:
    """Refuse times that cannot be.

    Raises:
        UsageError: a negative grace, or a deadline that leaves no time beside it.
    """
    if grace_s < 0:
        raise UsageError(f"--grace is {grace_s:g} seconds; it must be 0 or more")
    if deadline_s is not None and deadline_s <= grace_s:
        raise UsageError(
            f"--deadline is {deadline_s:g} seconds, which --grace ({grace_s:g}) uses up; rows are "
            "taken in until so long before the deadline. Give more time, or a smaller --grace"
        )

"""Ends a run in good order: Ctrl-C, SIGTERM, a scheduler's warning, a wall-time limit."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType

from fminfer.core.errors import StoppedError, StopReason, UsageError
from fminfer.core.option import Options, Seconds, option

# Slurm's --signal and LSF's -wa send one of the user's choice; LSF's run limit sends SIGUSR2.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
LONG_S = 1e8  # for what may take as long as it does
SPARE_S = 5.0  # from the end of the grace to that of the processes
AGAIN = "The same command, without --restart, goes on from there."
DEADLINE = signal.SIGXCPU  # a run sends it to itself
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"\d+(?:\.\d+)?"
DURATIONS = (
    re.compile(rf"(?P<s>{_NUMBER})"),
    re.compile(
        "(?=.)" + "".join(rf"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in SECONDS)
    ),
    re.compile(r"(?P<m>\d+):(?P<s>[0-5]\d)"),
    # as Slurm's
    re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d)"),
)
REASONS: dict[signal.Signals, tuple[str, StopReason]] = {
    signal.SIGINT: ("Interrupted.", "interrupted"),
    signal.SIGTERM: ("Terminated.", "terminated"),
    signal.SIGHUP: ("Hung up.", "hung_up"),
}
REPEAT_S = 1.0  # a signal to all processes of a job comes by the launcher once more
REPEAT_CTRL_C_S = 0.3  # the same of Ctrl-C, which people press twice within a second


_option = partial(
    option,
    group={"run": "Input and output", "serve": "Server"},
    commands=("run", "serve"),
)


@dataclass(frozen=True)
class ProcessOptions(Options):
    """How a process of a command ends, and how much it prints."""

    grace_s: Seconds = _option(
        "Time for running requests to finish once the command is told to stop. A second Ctrl-C "
        "ends it at once.",
        default=10.0,
    )
    is_quiet: bool = _option(
        "Print only errors, and why a kernel is not used.", flags=("-q", "--quiet")
    )
    is_verbose: bool = _option(
        "Show tracebacks and library warnings.", flags=("-v", "--verbose")
    )


def parse_duration(text: str) -> float:
    """Return the seconds of 3:50:00, 45:00 (minutes), 90 (seconds), 1.5h, 1h30m or 15s."""
    for form in DURATIONS:
        if (parts := form.fullmatch(text.strip())) is not None:
            numbers = parts.groupdict(default="0")
            return sum(
                float(numbers.get(unit, 0)) * size for unit, size in SECONDS.items()
            )
    raise ValueError(
        f"{text!r} is no duration; write 3:50:00, 45:00, 2h, 1h30m, or 90 (seconds)"
    )


def is_repeated_signal(number: int, since_s: float) -> bool:
    """Tell whether a signal repeats the first one, as launchers and schedulers do."""
    least_s = REPEAT_CTRL_C_S if number == signal.SIGINT else REPEAT_S
    return number in WARNINGS or since_s < least_s


class Stopper:
    """Hears that a run is to stop, and stops it.

    Args:
        grace_s: how long rows that run may go on.
        is_quiet: say nothing when a signal is heard.
        end: ends this process at once, for a reason. The command gives it an exit status.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        is_quiet: bool = True,
        end: Callable[[StoppedError], None] = lambda reason: os._exit(1),
    ) -> None:
        self.grace_s = grace_s
        self._is_quiet = is_quiet
        self._end = end
        # when a second signal ends the run
        self.on_second: Callable[[], None] = lambda: None
        # when it must have ended, in time.monotonic()
        self.deadline_s: float | None = None
        self._stop: Callable[[float], None] | None = None  # the engine's, while it runs
        self._needed_s: Callable[[], float | None] = lambda: None
        # requests of a server; None: a run's rows
        self.num_open: Callable[[], int] | None = None
        self._watchdog: threading.Timer | None = None
        self._is_reading = False
        self._heard_s = float("-inf")
        self.reason: StoppedError | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear signals and the deadline, in the main thread; ignore them afterwards."""
        numbers = list_stop_signals()
        for number in numbers:
            signal.signal(number, self._handle_signal)
        timer: threading.Timer | None = None
        if self.deadline_s is not None:
            left_s = max(
                0.0, self._compute_last_call_s(self.deadline_s) - time.monotonic()
            )
            main = threading.main_thread().ident
            assert main is not None
            # A signal to itself is heard wherever the main thread waits.
            timer = _make_daemon_timer(
                left_s, partial(signal.pthread_kill, main, DEADLINE)
            )
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if self._watchdog is not None:
                self._watchdog.cancel()
            # the process ends now, and with the status that it has
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def forwarding_stop(
        self,
        stop: Callable[[float], None],
        needed_s: Callable[[], float | None] = lambda: None,
    ) -> Iterator[None]:
        """Have a run's `stop` called with the grace when it is to stop.

        `needed_s` estimates how long rows that run would take to end; None: it cannot.
        """
        self._stop = stop
        self._needed_s = needed_s
        try:
            if self.reason is not None:
                raise self.reason
            yield
        finally:
            self._stop = None

    def end_for(self, reason: StoppedError) -> None:
        """Let the run end for a reason of its own; all that it has begun may finish."""
        if self.reason is None:
            self.reason = reason
            if self._stop is not None:
                self._stop(LONG_S)

    @contextmanager
    def interrupting_reads(self) -> Iterator[None]:
        """Let a wait for input end at once when the run is to stop, by StoppedError."""
        if self.reason is not None:
            raise self.reason
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def defer_to_rank_0(self) -> None:
        """Ignore signals that rank 0 handles; end later than it if told to end."""
        for number in (signal.SIGINT, signal.SIGHUP, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)
        reason = self._make_reason(signal.SIGTERM)
        timer = _make_daemon_timer(self.grace_s + SPARE_S, partial(self._end, reason))
        signal.signal(signal.SIGTERM, lambda number, frame: _start_timer_once(timer))

    def _compute_last_call_s(self, deadline_s: float) -> float:
        """Return when rows are told to end, so that the processes end by the deadline, too."""
        return deadline_s - self.grace_s - SPARE_S

    def _make_reason(self, number: signal.Signals) -> StoppedError:
        if number in REASONS:
            return StoppedError(*REASONS[number])
        last_call_s = (
            math.inf
            if self.deadline_s is None
            else self._compute_last_call_s(self.deadline_s)
        )
        is_deadline = number == DEADLINE and time.monotonic() >= last_call_s
        name = "--deadline" if is_deadline else number.name
        return StoppedError(f"Out of time ({name}).", "out_of_time")

    def _end_after_grace(self) -> None:
        assert self.reason is not None
        print(
            f"{self.reason} (It did not end within --grace.)",
            file=sys.stderr,
            flush=True,
        )
        self._end(self.reason)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.reason is not None:
            if is_repeated_signal(number, now_s - self._heard_s):
                return
            self.reason = self._make_reason(signal.Signals(number))
            self.on_second()
            raise KeyboardInterrupt  # asked twice: at once
        self.reason = self._make_reason(signal.Signals(number))
        self._heard_s = now_s
        # Steps may be long, and ranks may hang: what is on disk is good in any case.
        self._watchdog = _make_daemon_timer(
            self.grace_s + SPARE_S, self._end_after_grace
        )
        self._watchdog.start()
        if self._stop is None:  # nothing runs yet
            raise self.reason
        if not self._is_quiet:
            self._print_grace(is_ctrl_c=number == signal.SIGINT)
        self._stop(self.grace_s)
        if self._is_reading:
            raise self.reason

    def _print_grace(self, *, is_ctrl_c: bool) -> None:
        """Print why a signal does not end the run at once.

        A signal's handler may call what this calls.
        """
        needed_s = self._needed_s()
        num_open = self.num_open
        is_short = needed_s is None or needed_s <= self.grace_s
        needs = "" if is_short else f"; all of them may need {needed_s:.0f} s"
        what = (
            "rows that run" if num_open is None else f"open requests ({num_open():,})"
        )
        kept = " What is finished is kept." if num_open is None else ""
        again = " again" if is_ctrl_c else ""
        text = (
            f"\nEnding: {what} have {self.grace_s:g} s to finish (--grace){needs}.{kept} "
            f"Ctrl-C{again} ends at once.\n"
        )
        with suppress(OSError):
            os.write(2, text.encode())


def _make_daemon_timer(after_s: float, work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(after_s, work)
    timer.daemon = True
    return timer


def _start_timer_once(timer: threading.Timer) -> None:
    if timer.ident is None:
        timer.start()


def list_stop_signals() -> list[signal.Signals]:
    """List the signals that end a run; under nohup a closed terminal does not."""
    numbers = [signal.SIGINT, signal.SIGTERM, *WARNINGS]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def check_times(grace_s: float, deadline_s: float | None) -> None:
    """Refuse a negative grace, and a deadline that leaves no time beside it."""
    if grace_s < 0:
        raise UsageError(f"--grace is {grace_s:g} seconds; it must be 0 or more")
    if deadline_s is not None and deadline_s <= grace_s + SPARE_S:
        raise UsageError(
            f"--deadline is {deadline_s:g} seconds. It must be above "
            f"{grace_s + SPARE_S:g}: a run ends its rows --grace ({grace_s:g} s) and "
            f"{SPARE_S:g} s before its deadline. Give more time, or a smaller --grace"
        )

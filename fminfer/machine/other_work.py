"""Other work on the machine: how long it kept the threads of a run from computing.

Linux tells how long each thread stood in line for a core: also for threads of its own
process, and for a container's quota. So no more counts than the time that others
computed on the same cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fminfer.machine.control_groups import find_group_folders

PROC = Path("/proc")
# of the time of its cores, above which other work is worth a word
NOTABLE_SHARE = 1 / 16
LEAST_S = 2.0  # a shorter run shows nothing
MEASURE_INTERVAL_S = 2.0  # between two measurements, each of about 1 ms


@dataclass(slots=True, frozen=True)
class WorkCounts:
    """What Linux has counted up to a moment, in seconds; nothing where it does not count."""

    now_s: float
    own_s: float  # computed by this process, all of its threads together
    in_line_s: dict[int, float]  # that each of its threads waited for a core
    busy_s: dict[int, float]  # that each core computed, whoever it was for
    throttled_s: float = 0.0  # that quotas kept its control groups from computing


def compute_held_up_s(
    first: WorkCounts, last: WorkCounts, cores: Iterable[int]
) -> float:
    """Return how long threads stood in line for others' work, all of them together."""
    in_line_s = sum(
        s - first.in_line_s.get(thread, 0.0) for thread, s in last.in_line_s.items()
    )
    in_line_s -= last.throttled_s - first.throttled_s
    known = first.busy_s.keys() & last.busy_s.keys() & set(cores)
    busy_s = sum(last.busy_s[core] - first.busy_s[core] for core in known)
    return max(0.0, min(in_line_s, busy_s - (last.own_s - first.own_s)))


class OtherWork:
    """Tells whether other work slows this process's threads on the cores that are found."""

    def __init__(self, num_threads: int, find_cores: Callable[[], set[int]]) -> None:
        self._num_threads = num_threads
        self._find_cores = find_cores
        self._first = self._last = read_work_counts()
        self.held_up_s = 0.0  # as last measured
        self._num_used = 1  # cores, likewise

    def measure(self) -> None:
        """Take note of what was counted since the start."""
        cores = self._find_cores()
        self._last = read_work_counts()
        self.held_up_s = compute_held_up_s(self._first, self._last, cores)
        self._num_used = max(1, min(self._num_threads, len(cores)))

    @property
    def share(self) -> float:
        """The share of its cores' time for which threads waited for others' work."""
        elapsed_s = self._last.now_s - self._first.now_s
        return (
            self.held_up_s / (elapsed_s * self._num_used)
            if elapsed_s >= LEAST_S
            else 0.0
        )

    def is_notable(self) -> bool:
        """Tell whether other work slows this process; measure it now and then."""
        if time.monotonic() - self._last.now_s >= MEASURE_INTERVAL_S:
            self.measure()
        return self.share > NOTABLE_SHARE


def read_work_counts() -> WorkCounts:
    """Read what Linux has counted up to now."""
    in_line_s = {}
    with suppress(OSError):  # no /proc
        for thread in os.listdir(PROC / "self/task"):
            with suppress(OSError, ValueError, IndexError):  # it has just ended
                counts = (PROC / "self/task" / thread / "schedstat").read_text().split()
                in_line_s[int(thread)] = int(counts[1]) / 1e9
    return WorkCounts(
        time.monotonic(),
        time.process_time(),
        in_line_s,
        _read_busy_s(),
        _read_throttled_s(),
    )


def _read_busy_s() -> dict[int, float]:
    """Return how long each core has computed, by its number."""
    seconds_by_core = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (PROC / "stat").read_text().splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name != "cpu":
                user, nice, system, _idle, _disk, interrupts, soft = map(
                    int, counts[:7]
                )
                ticks = user + nice + system + interrupts + soft
                seconds_by_core[int(name[3:])] = ticks / os.sysconf("SC_CLK_TCK")
    return seconds_by_core


def _read_throttled_s() -> float:
    """Return how long the quotas of this process's control groups have kept them waiting."""
    waits_s = [0.0]
    for folder, _ in find_group_folders("cpu"):
        with suppress(OSError, ValueError):
            counts = dict(
                line.split() for line in (folder / "cpu.stat").read_text().splitlines()
            )
            waits_s.append(int(counts.get("throttled_usec", 0)) / 1e6)  # version 2
            waits_s.append(int(counts.get("throttled_time", 0)) / 1e9)
    return max(waits_s)

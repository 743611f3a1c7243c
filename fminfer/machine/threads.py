"""The processor's threads: how many a run may use, and how they wait.

This module is used before torch is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from fminfer.machine.control_groups import find_group_folders

# How often an idle thread of GNU's OpenMP looks for work before it sleeps;
# docs/performance.md has the figures. Its own default is 300,000 times, or for ever under
# OMP_WAIT_POLICY=active. While a thread spins, the one that it waits for may stand in
# line for the same core.
SPINS = 10_000
CHECK_INTERVAL_S = 0.5  # between two checks of the cores, each of some 0.1 ms
BINDS_THREADS = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}


def shorten_openmp_waits() -> None:
    """Make OpenMP's threads sleep soon when they wait, unless variables say otherwise.

    OpenMP is not loaded yet.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def count_cores() -> int:
    """Return how many cores affinity and quotas let this process use; a part counts as one."""
    return max(1, min([len(find_usable_cores()), *_read_quotas()]))


def find_usable_cores() -> set[int]:
    """Return the cores that any thread may run on; all where OpenMP binds threads to cores."""
    if not hasattr(os, "sched_getaffinity") or BINDS_THREADS & os.environ.keys():
        return set(range(os.cpu_count() or 1))
    cores = set(os.sched_getaffinity(0))
    with suppress(OSError):  # no /proc, or none that may be read
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has just ended
                cores |= os.sched_getaffinity(int(thread))
    return cores


def _read_quotas() -> Iterator[int]:
    """Yield the cores that each control group with a quota allows, rounded up."""
    for folder, version in find_group_folders("cpu"):
        with suppress(OSError, ValueError):  # "max": no limit
            if version == 2:
                texts = (folder / "cpu.max").read_text().split()
            else:
                texts = [
                    (folder / f"cpu.cfs_{n}_us").read_text()
                    for n in ("quota", "period")
                ]
            quota_us, period_us = map(int, texts)
            if quota_us > 0:  # -1 is no limit in version 1
                yield -(-quota_us // period_us)


def choose_num_threads(configured: int | None, current: int, num_processes: int) -> int:
    """Return how many threads are to compute in this process.

    Args:
        configured: by --threads.
        current: what torch would use; OMP_NUM_THREADS or a call of torch's may have said so.
        num_processes: of this run on this machine; they share the cores.
    """
    if configured is not None or "OMP_NUM_THREADS" in os.environ:
        return configured or current
    return min(current, max(1, count_cores() // num_processes))


class ThreadCount:
    """How many threads compute, as cores come and go: at most as many as at the start.

    Args:
        configured, current, num_processes: as of `choose_num_threads`.
        use: has the calling thread compute with so many threads.
    """

    def __init__(
        self,
        configured: int | None,
        current: int,
        num_processes: int,
        use: Callable[[int], None],
    ) -> None:
        self._is_fixed = configured is not None or "OMP_NUM_THREADS" in os.environ
        self._num_processes = num_processes
        self._use = use
        self._most = self._now = choose_num_threads(configured, current, num_processes)
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
        use(self._now)

    def follow_cores(self) -> None:
        """Use fewer threads or more, as cores come and go. The computing thread calls it."""
        now_s = time.monotonic()
        if self._is_fixed or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        number = choose_num_threads(None, self._most, self._num_processes)
        if number != self._now:
            self._now = number
            self._use(number)

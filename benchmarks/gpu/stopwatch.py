"""How long work takes on a device: the median of some turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_s(
    work: Callable[[], object], device: torch.device, turns: int, warmups: int = 3
) -> float:
    """Return the seconds that work takes on the device; on a GPU by its own events."""
    for _ in range(warmups):
        work()
    if device.type != "cuda":
        return statistics.median(_wall_s(work) for _ in range(turns))
    events = [(_event(), _event()) for _ in range(turns)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    took_ms: list[float] = [start.elapsed_time(end) for start, end in events]
    return statistics.median(took_ms) / 1000


def call_s(work: Callable[[], object], device: torch.device, turns: int) -> float:
    """Return the host's seconds a call, of calls that do not wait for the device."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(turns):
        work()
    took = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return took / turns


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wall_s(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started

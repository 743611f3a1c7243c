"""Measures in about a second what this machine can do: memory, products, copies, its disk."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fminfer.machine.host_memory import measure_free_host_bytes
from fminfer.machine.threads import count_cores
from fminfer.models.model_folder import find_weight_files
from fminfer.models.stored.direct_reads import (
    UNIT,
    DirectReads,
    LentBuffer,
    Span,
    buffer_size_of,
    wait_for_reads,
)
from fminfer.plan.roofs import ASSUMED_DISK_RATE, Roofs
from fminfer.plan.run_plan import RunPlan

SIZE = 1 << 28  # bytes that are read: more than processors' caches
WIDTH = 2048  # of the product


def measure_roofs(plan: RunPlan) -> Roofs:
    """Measure this machine's roofs, on the plan's device and in the dtype that it multiplies in.

    Ranks on a CPU send through memory. Other nodes, and a disk without the model's
    files, have the figures that are assumed of any node.
    """
    device = plan.device
    memory = torch.zeros(SIZE // 4, device=device)
    # A CPU without units for 16 bits widens them; torch's own such product takes half a minute.
    is_fast = plan.machine.is_fast_in_bfloat16 and plan.dtype == torch.bfloat16
    dtype = plan.dtype if is_fast or device.type == "cuda" else torch.float32
    factor = torch.ones(WIDTH, WIDTH, dtype=dtype, device=device)
    memory_rate = SIZE / _best_of(memory.max, device)
    host_rate = memory_rate
    if device.type == "cuda":
        there = torch.zeros(SIZE // 4, pin_memory=True)
        host_rate = SIZE / _best_of(
            lambda: memory.copy_(there, non_blocking=True), device
        )
    return Roofs(
        device_bytes=plan.room_bytes,
        memory_rate=memory_rate,
        arithmetic_rate=2 * WIDTH**3 / _best_of(lambda: factor @ factor, device),
        link_rate=host_rate,
        host_rate=host_rate,
        host_bytes=plan.machine.host_free or measure_free_host_bytes(),
        disk_rate=_measure_disk(plan) or ASSUMED_DISK_RATE,
        num_cores=count_cores(),
        num_devices=max(1, plan.machine.num_gpus),
    )


def _best_of(work: Callable[[], object], device: torch.device, count: int = 3) -> float:
    """Return the shortest time of some calls, the first one left out."""
    seconds = []
    for _ in range(count + 1):
        started_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    return max(1e-9, min(seconds[1:]))


def _measure_disk(plan: RunPlan) -> float:
    """Return how fast the model's largest file is read past the system's cache; 0: none
    is here."""
    folder = plan.checkpoint.folder
    files = {} if folder is None else find_weight_files(str(folder))
    if not files:
        return 0.0
    largest = max(files, key=files.__getitem__)
    spans = [Span(largest, 0, min(SIZE, files[largest]))]
    reads = DirectReads({largest: None})
    try:
        buffer = torch.empty(buffer_size_of(spans) + UNIT, dtype=torch.uint8)
        wait_for_reads(
            reads.start(LentBuffer(spans, buffer[-buffer.data_ptr() % UNIT :]), spans)
        )
    finally:
        reads.close()
    return reads.bytes_per_s

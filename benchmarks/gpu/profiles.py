"""What a profile shows: how long the GPU was busy, launches, waits and copies."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import Figures

NUM_KERNELS_TOLD = 4


def start_profiler(device: str) -> profile:
    """Begin to profile the GPU, and the operations of all threads: a stage has its own."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        # CUDA's profiler has crashed where it was taken down and came back with graphs there.
        os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
        activities.append(ProfilerActivity.CUDA)
    all_threads: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=activities, experimental_config=all_threads)
    profiler.start()
    return profiler


def count_work(profiler: profile, wall_s: float, num_steps: int) -> Figures:
    """Return the GPU's share of the time and counts a step, and what takes longest."""
    launches = waits = copies = operations = 0
    spans: list[tuple[float, float]] = []
    took: dict[str, float] = {}
    shown: Any = profiler
    for event in shown.events():
        name = event.name
        start = event.time_range.start
        end = event.time_range.end
        if event.device_type == DeviceType.CUDA:
            spans.append((start, end))
            took[name] = took.get(name, 0.0) + end - start
            continue
        launches += name.startswith(
            ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
        )
        waits += "Synchronize" in name
        copies += name.startswith("cudaMemcpy")
        operations += name.startswith("aten::")
    figures: Figures = {
        "GPU busy": _covered(spans) / 1e6 / wall_s if spans else None,
        "launches": launches / num_steps,
        "waits": waits / num_steps,
        "copies": copies / num_steps,
        "operations": operations / num_steps,
    }
    longest = sorted(took.items(), key=lambda pair: -pair[1])[:NUM_KERNELS_TOLD]
    for name, micros in longest:
        figures[f"ms of {name[:48]}"] = micros / 1000 / num_steps
    return figures


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of a union of intervals: streams run beside each other."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

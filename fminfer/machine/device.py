"""What a device is and has, and how a thread uses it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

import numpy as np
import torch

from fminfer.core.messages import MemoryPeak
from fminfer.machine.host_memory import (
    measure_free_host_bytes,
    measure_peak_host_bytes,
    trim_host_memory,
)
from fminfer.machine.processor import VARIABLE, has_unit, hides_unit, read_chosen_name
from fminfer.machine.threads import BINDS_THREADS

LEAST_SHARE = 1 << 15  # numbers: as many threads fill an array as it has of them
CPU = torch.device("cpu")
BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16")


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Tell whether the device has bfloat16 matrix units that a run may use.

    A device `cuda` without an index is a planned GPU, which is assumed to have them.
    """
    if device.type == "cuda":  # this very one: others of the machine may be older
        if torch.version.hip is not None or device.index is None:
            return True
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return any(map(has_unit, BFLOAT16_UNITS))


def describe_slow_dtype(dtype: torch.dtype, device: torch.device) -> str:
    """Return why a dtype takes longer than float32 would; empty: it does not."""
    is_fast = dtype == torch.bfloat16 and is_fast_in_bfloat16(device)
    if device.type != "cpu" or dtype == torch.float32 or is_fast:
        return ""
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bfloat16 and any(map(hides_unit, BFLOAT16_UNITS)):
        return (
            f"{VARIABLE}={read_chosen_name()} hides this CPU's fast products of {name}; "
            "unset it, or use --dtype float32, which is faster then"
        )
    return f"this CPU has no fast products of {name}; --dtype float32 is faster"


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's device, and keep float32 sums in matrix products.

    By torch's defaults, sums of 16-bit products may be split into parts that are rounded.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch's old and new switches of TF32
        torch.set_float32_matmul_precision("highest")
        matmul = torch.backends.cuda.matmul
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False


def send_columns(
    columns: Sequence[np.ndarray], device: torch.device
) -> list[torch.Tensor]:
    """Return arrays as tensors of a device; they go to a GPU in one copy, and nobody waits.

    Args:
        columns: of one dimension; those of 8 bytes a number come first, so that all are aligned.
    """
    on_host = [torch.from_numpy(column) for column in columns]
    if device.type == "cpu":
        return on_host
    moved = pin_columns(columns, device).to(device, non_blocking=True)
    parts = torch.split(moved, [column.nbytes for column in columns])
    return [  # a part without bytes cannot be viewed as another type
        part.view(like.dtype) if len(part) else part.new_empty(0, dtype=like.dtype)
        for part, like in zip(parts, on_host, strict=True)
    ]


def pin_columns(columns: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Return the bytes of arrays, one behind the other, from where a device can copy them.

    For a GPU it is pinned memory, which torch uses again only once copies of it are done.
    """
    together = torch.from_numpy(
        np.concatenate([column.view(np.uint8) for column in columns])
    )
    return together.pin_memory() if device.type == "cuda" else together


def start_openmp_threads() -> None:
    """Start torch's threads if OpenMP binds them to cores: the kernels then use all of these."""
    if BINDS_THREADS & os.environ.keys():
        torch.empty(LEAST_SHARE * torch.get_num_threads()).fill_(0.0)


def end_openmp_threads() -> None:
    """End torch's threads of the calling thread; GNU's OpenMP only.

    They would count as busy when another thread computes. Its helpers then sleep between any two
    products: 15 to 20 % of a decode step on two cores.
    """
    if torch.get_num_threads() == 1:
        return  # there are none, and a forked child would wait for those of its parent
    with contextlib.suppress(OSError, AttributeError):
        runtime = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        runtime.omp_pause_resource_all(1)  # "soft": its settings stay


def trim_memory(device: torch.device) -> None:
    """Return freed memory to the system, or to other programs on the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_host_memory()


def measure_free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return measure_free_host_bytes()


def measure_peak_memory(device: torch.device = CPU) -> MemoryPeak:
    """Return this process's peak memory so far, of the host and of its device."""
    if device.type != "cuda":
        return MemoryPeak(measure_peak_host_bytes())
    return MemoryPeak(
        measure_peak_host_bytes(),
        gpu_bytes=torch.cuda.max_memory_allocated(device),
        gpu_reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def make_memory_name(device: torch.device, host: str) -> str:
    """Name the memory of a device, so that ranks know with whom they share it."""
    if device.type == "cuda":
        return f"{host}/{torch.cuda.get_device_properties(device).uuid}"
    return f"{host}/cpu"

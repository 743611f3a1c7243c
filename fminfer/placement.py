"""Where a model runs, in which dtype, and how much KV cache fits beside it."""

from __future__ import annotations

import os

import torch

from fminfer.config import DType
from fminfer.errors import UsageError

KV_SHARE = 0.5  # of the memory that is free once the weights are loaded


def choose_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is the first GPU, or else the CPU.

    Raises:
        UsageError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is unknown; give auto, cpu or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"device {name!r} is not one that fminfer runs on; give auto, cpu or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name} is not here; torch sees {torch.cuda.device_count()} GPUs. "
            "Use --device cpu or auto"
        )
    return device


def choose_dtype(
    name: DType, checkpoint_dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """Return the dtype of a name.

    `auto` is bfloat16 where the machine is fast in it; otherwise the checkpoint's own, but float32
    on a CPU without bfloat16 units, on which 16-bit types are both slower and coarser.
    """
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if is_fast_in_bfloat16(device):
        return torch.bfloat16
    own = checkpoint_dtype or torch.float32
    return torch.float32 if device.type == "cpu" else own


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Tell whether the device has bfloat16 matrix units."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def auto_budget(kv_bytes_per_token: int, most_useful: int, device: torch.device) -> int:
    """Return the tokens of KV cache that half of the free memory holds, at most `most_useful`."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        free_bytes = _free_host_bytes()
    return max(1, min(most_useful, int(free_bytes * KV_SHARE) // kv_bytes_per_token))


def _free_host_bytes() -> int:
    """Return the bytes that can be used without swapping, by the system or its control group."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            available = min(available, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass  # no Linux, or no limit ("max")
    return available

"""The facts of a machine that a run is planned from, and which of its devices each rank
takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fminfer.compute.formats.dense import Dense
from fminfer.compute.kernels.kernel_build import may_have_library
from fminfer.compute.layers.products import can_torch_pack, is_kernel_faster
from fminfer.core.config import ComputeOptions
from fminfer.core.errors import UsageError
from fminfer.machine.device import is_fast_in_bfloat16, measure_free_bytes
from fminfer.machine.host_memory import (
    measure_free_host_bytes,
    measure_free_swap_bytes,
    measure_process_bytes,
)
from fminfer.machine.processor import hide_tiles

# by MKL and by oneDNN, where these are there
PACKED_BY_TORCH = (torch.float32, torch.bfloat16)


@dataclass(slots=True, frozen=True)
class Machine:
    """What a machine has, which place in it a process takes, and how the run is spread
    over it."""

    num_gpus: int = 0  # that torch sees
    is_fast_in_bfloat16: bool = False  # this process's device
    has_library: bool = False  # the CPU's kernels are built, or can be
    # where the kernels pack nothing
    packed_by_torch: tuple[str, ...] = ()  # types
    free: int | None = None  # bytes of this process's device; None: nobody has looked
    host_free: int | None = None  # free bytes of a GPU's host; None: as `free`
    swap: int = 0  # free bytes of it
    process_bytes: int = 0  # bytes of the host's memory that this process has
    # of each process's device on another, planned machine
    device_bytes: int | None = None
    num_stages: int = 1  # of a pipeline, which share the model's layers
    num_shards: int = 1  # processes of a stage, which share each layer
    num_pipelines: int = 1
    rank: int = 0
    local_rank: int = 0  # of so many ranks that the pipeline has on this machine
    local_size: int = 1
    num_engines: int = 1  # on this machine, which share its cores, memory and GPUs
    engine_number: int = 0  # of this one among them


ALONE = Machine()  # one process
MOVING = ("free", "host_free", "swap", "process_bytes")  # fields of bytes
# Free memory that differs by less is the same: a 256th of it, or 16 MiB.
MOVED_SHARE = 256
MOVED_BYTES = 16 << 20


def find_machine(
    config: ComputeOptions, known: Machine = ALONE, *, is_computing: bool = True
) -> Machine:
    """Look up what this machine has for a run that is spread as `known` says.

    To ask for a GPU's free memory takes some of it, so that only a process that computes does.
    With --same-answers on this process uses no tiles (AMX) from here on.
    """
    if config.same_answers == "on":
        hide_tiles()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine = replace(known, num_gpus=num_gpus)
    device = choose_device(config, machine, known.rank)
    is_fast = is_fast_in_bfloat16(device)
    machine = replace(machine, is_fast_in_bfloat16=is_fast)
    if known.device_bytes is None:
        machine = replace(
            machine, host_free=known.host_free or measure_free_host_bytes()
        )
        if is_computing or device.type == "cpu":
            machine = replace(machine, free=measure_free_bytes(device))
    if device.type != "cpu":
        return machine
    has_library = may_have_library()
    has_kernels = has_library and config.kernels != "off"
    left = [
        t
        for t in PACKED_BY_TORCH
        if not (has_kernels and is_kernel_faster(Dense(t), t))
    ]
    # it takes a trial
    packed = [t for t in left if can_torch_pack(Dense(t), t, is_fast=is_fast)]
    return replace(
        machine,
        has_library=has_library,
        packed_by_torch=tuple(str(dtype).removeprefix("torch.") for dtype in packed),
        swap=measure_free_swap_bytes(),
        process_bytes=measure_process_bytes(),
    )


def has_moved(planned: Machine, now: Machine) -> bool:
    """Tell whether a machine, or what this process takes of it, has changed since a plan."""
    sizes = {name: getattr(now, name) for name in MOVING}
    return replace(planned, **sizes) != now or any(
        _differs(getattr(planned, name), size) for name, size in sizes.items()
    )


def _differs(before: int | None, after: int | None) -> bool:
    if before is None or after is None:
        return before != after
    return abs(before - after) > max(MOVED_BYTES, before // MOVED_SHARE)


def choose_device(
    config: ComputeOptions,
    machine: Machine,
    rank: int,
    engine_number: int | None = None,
) -> torch.device:
    """Return the device of a rank. The ranks of all engines on a machine take its GPUs in turn.

    `auto` is the CPU where there is no GPU; `cuda` is an error there. A planned GPU has
    no number. A rank that is elsewhere has the device that it would have here.
    """
    name = config.device
    is_planned = machine.device_bytes is not None
    if config.cuda_ids and name not in ("auto", "cuda"):
        raise UsageError(
            f"--device {name} and --cuda-id contradict each other; give one of them"
        )
    if name == "auto":
        name = "cuda" if machine.num_gpus or is_planned else "cpu"
    if name == "cuda" and machine.num_gpus and not is_planned:
        engine = machine.engine_number if engine_number is None else engine_number
        local_rank = (machine.local_rank + rank - machine.rank) % machine.local_size
        ids = config.cuda_ids or range(machine.num_gpus)
        name = f"cuda:{ids[(engine * machine.local_size + local_rank) % len(ids)]}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"device {name!r} is unknown; give auto, cpu or cuda:N"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"device {name!r} is not one that fminfer runs on; give auto, cpu or cuda:N"
        )
    if device.type == "cuda" and is_planned:
        return torch.device("cuda")
    if device.type == "cuda" and (device.index or 0) >= machine.num_gpus:
        raise UsageError(
            f"device {name} is not here; torch sees {machine.num_gpus} GPUs. "
            "Use --device cpu or auto"
        )
    return device


def find_sharers(config: ComputeOptions, machine: Machine) -> list[int]:
    """Return, for each rank on this machine that shares this process's device, its engine."""
    device = choose_device(config, machine, machine.rank)
    first = machine.rank - machine.local_rank
    ranks = range(first, first + machine.local_size)
    return [
        engine
        for engine in range(machine.num_engines)
        for rank in ranks
        if choose_device(config, machine, rank, engine) == device
    ]


def count_sharers(config: ComputeOptions, machine: Machine) -> int:
    """Return how many engines of this machine share this process's device."""
    return len({*find_sharers(config, machine)})

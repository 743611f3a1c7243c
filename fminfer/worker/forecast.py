"""Whether a run fits the memory it has: one forecast, for `fminfer check` and for the run itself.

It is made from the model's config, before any weight is read.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.quantities import show_bytes as show_bytes
from fminfer.machine.device import choose_dtype, free_bytes, memory_name, own_device
from fminfer.machine.host_memory import free_swap_bytes
from fminfer.models.checkpoint import Checkpoint
from fminfer.pipeline.group import Group
from fminfer.worker.footprint import (
    GPU_CONTEXT,
    Footprint,
    held_dtype,
    measure_footprint,
    measure_footprints,
    own_bytes,
)
from fminfer.worker.kv_size import most_kv_tokens, require_cache
from fminfer.worker.opening import split_model
from fminfer.worker.step_memory import auto_budget

END_S = 3.0  # time for rank 0 to report a shortage and end the others


@dataclass(slots=True, frozen=True)
class Layout:
    """How a run is spread over processes, and the memory that they have."""

    num_stages: int = 1  # processes of a pipeline, which share the model's layers
    num_pipelines: int = 1
    device_bytes: int | None = None  # of each process's own device; None: this machine's memory


@dataclass(slots=True, frozen=True)
class Forecast:
    """What the processes of a run take, and whether it fits."""

    layout: Layout
    device: torch.device
    dtype: torch.dtype  # type of the arithmetic
    held_in: torch.dtype  # type of most weights in memory
    footprints: list[Footprint]  # one for each process of a pipeline
    room_bytes: int  # free before the run: on each device, or in the memory that all share
    num_kv_tokens: int  # size of each pipeline's KV cache; 0: not one block fits
    shortage: str  # what does not fit, and what to do; "": it fits

    @property
    def shares_memory(self) -> bool:
        """Return whether all processes take from the same memory."""
        return shares_memory(self.layout, self.device.type)

    def used_kv_tokens(self, num_written: int) -> int:
        """Return the tokens of KV cache that take memory, of those written: a GPU's all do."""
        return num_written if self.device.type == "cpu" else self.num_kv_tokens


def make_forecast(config: EngineConfig, checkpoint: Checkpoint, layout: Layout) -> Forecast:
    """Predict the memory of a run on this machine, or on devices of a given memory.

    Raises:
        UsageError: layers that cannot be split so, or no such device.
    """
    if layout.device_bytes is not None and config.device != "cpu":  # there need not be one here
        device = torch.device("cuda")  # without a number: another machine's
    else:
        device = own_device(config)
    dtype = choose_dtype(config.dtype, checkpoint.config.dtype, device)
    footprints = measure_footprints(config, checkpoint, layout.num_stages, device, dtype)
    room = layout.device_bytes
    if room is None:  # what this process has is as much as one of the run's own will have
        room = free_bytes(device) + (own_bytes() if device.type == "cpu" else 0)
    num_tokens = _count_kv_tokens(config, checkpoint, footprints, layout, device, room)
    held_in = held_dtype(config, checkpoint, device, dtype)
    short = _find_shortage(config, checkpoint, footprints, layout, device.type, held_in, room)
    num_tokens = 0 if short else num_tokens
    return Forecast(layout, device, dtype, held_in, footprints, room, num_tokens, short)


def require_room(config: EngineConfig, checkpoint: Checkpoint, group: Group | None = None) -> str:
    """Refuse a run whose weights or --budget do not fit its memory, before weights are read.

    Args:
        group: the ranks of the pipeline; None: this process alone runs the model.

    Returns:
        Why the run will be slow: its weights are read from the disk at each step; "" if not.

    Raises:
        UsageError: there is no room.
    """
    if group is None:
        found = make_forecast(config, checkpoint, Layout())
        if found.shortage:
            raise UsageError(found.shortage)
        if found.device.type == "cpu":
            require_cache(config, checkpoint, split_model(config, checkpoint, 1)[0], found.dtype)
        return _why_slow(found.footprints[0], found.room_bytes)
    device = own_device(config, group.local_rank, group.local_size)
    dtype = choose_dtype(config.dtype, checkpoint.config.dtype, device)
    part = split_model(config, checkpoint, group.world_size)[group.rank]
    footprint = measure_footprint(config, checkpoint, part, device, dtype)
    held_in = held_dtype(config, checkpoint, device, dtype)
    free = free_bytes(device)
    mine = {
        "memory": memory_name(device, socket.gethostname()),
        "need": _least_bytes(config, footprint, device.type),
        "free": free + (free_swap_bytes() if device.type == "cpu" else 0),
    }
    ranks = group.gather("room", mine)  # none reads its weights before all have looked
    for name in {rank["memory"] for rank in ranks}:
        here = [number for number, rank in enumerate(ranks) if rank["memory"] == name]
        need = sum(ranks[number]["need"] for number in here)
        room = min(ranks[number]["free"] for number in here)
        if need <= room:
            continue
        if group.rank > 0:
            time.sleep(END_S)  # rank 0 says it, and ends the run
        who = f"rank {here[0]}" if len(here) == 1 else f"ranks {', '.join(map(str, here))} together"
        raise UsageError(
            f"{checkpoint.name} does not fit: {who} would take {show_bytes(need)} of {name} for "
            f"weights in {name_of(held_in)}, and {show_bytes(room)} are free. "
            f"{_remedy(held_in, device.type)}"
        )
    if device.type == "cpu":
        require_cache(config, checkpoint, part, dtype)
    return _why_slow(footprint, free)


def require_room_for_all(config: EngineConfig, checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuse pipelines that this machine's memory cannot hold together, before any is started.

    Of GPUs each process looks at its own.

    Raises:
        UsageError: there is no room.
    """
    if own_device(config).type == "cpu":
        found = make_forecast(config, checkpoint, layout)
        if found.shortage:
            raise UsageError(found.shortage)


def name_held_dtype(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """Name the dtype in which a run on this machine will hold most weights."""
    device = own_device(config)
    dtype = choose_dtype(config.dtype, checkpoint.config.dtype, device)
    return name_of(held_dtype(config, checkpoint, device, dtype))


def shares_memory(layout: Layout, device_type: str) -> bool:
    """Return whether a run's processes take from the same memory: all CPU ranks of a machine do."""
    return layout.device_bytes is None and device_type == "cpu"


def _count_kv_tokens(
    config: EngineConfig,
    checkpoint: Checkpoint,
    footprints: Sequence[Footprint],
    layout: Layout,
    device: torch.device,
    room: int,
) -> int:
    """Return the tokens of a pipeline's KV cache, in whole blocks.

    An automatic budget goes by the memory that is free, less what is to be loaded. The system
    counts mapped files as free.
    """
    size = config.block_size
    if config.budget is not None:
        return -(-config.budget // size) * size
    most = most_kv_tokens(config, checkpoint, device)
    if shares_memory(layout, device.type):
        taken = sum(f.weights - f.mapped + f.libraries for f in footprints)
        left = room // layout.num_pipelines - taken
        each, work = sum(f.kv_token for f in footprints), sum(f.work for f in footprints)
        tokens = [auto_budget(each, most, left, work, device.type)]
    else:
        is_planned = layout.device_bytes is not None
        free = room - GPU_CONTEXT * is_planned if device.type == "cuda" else room
        tokens = [
            auto_budget(
                f.kv_token,
                most,
                free - f.weights + f.mapped - f.libraries * (device.type == "cpu"),
                f.work,
                device.type,
            )
            for f in footprints
        ]
    return -(-min(tokens) // size) * size


def _find_shortage(
    config: EngineConfig,
    checkpoint: Checkpoint,
    footprints: Sequence[Footprint],
    layout: Layout,
    device_type: str,
    held_in: torch.dtype,
    room: int,
) -> str:
    """Say what does not fit; on this machine only what certainly does not."""
    weights = f"weights in {name_of(held_in)}"
    if shares_memory(layout, device_type):
        libraries = layout.num_pipelines * sum(f.libraries for f in footprints)
        each = sum(_least_bytes(config, f, device_type) + f.libraries for f in footprints)
        need = layout.num_pipelines * each
        room += free_swap_bytes()
        if need <= room:
            return ""
        who = "its run" if need == each else f"{layout.num_pipelines} pipelines of it"
        return (
            f"{checkpoint.name} does not fit: {who} would take {show_bytes(need)} "
            f"({show_bytes(libraries)} for Python and its libraries, the rest for {weights} and a "
            f"block of KV cache), and {show_bytes(room)} are free. {_remedy(held_in, device_type)}"
        )
    is_planned = layout.device_bytes is not None
    needs = [
        _least_bytes(config, f, device_type) + (f.libraries + f.work if is_planned else 0)
        for f in footprints
    ]
    if max(needs) <= room:
        return ""
    rank = needs.index(max(needs))
    cache = "KV cache" if config.budget is None else f"a KV cache of {config.budget:,} tokens"
    if is_planned:
        cache = f"libraries, a step and {cache}"
    remedy = _more_ranks(footprints, layout, room)
    of_budget = (config.budget or 0) * footprints[rank].kv_token
    if max(needs) - of_budget < room:
        remedy = "Use a smaller --budget, or leave it out to take what fits"
    return (
        f"{checkpoint.name} does not fit: rank {rank} would take {show_bytes(max(needs))} "
        f"({show_bytes(footprints[rank].held_weights)} for {weights}, the rest for {cache}), and "
        f"its device has {show_bytes(room)}. {remedy}"
    )


def _more_ranks(footprints: Sequence[Footprint], layout: Layout, room: int) -> str:
    """Return how many processes would be enough if layers could be cut at any place."""
    for_weights = room - max(f.libraries + f.work for f in footprints)
    total = sum(f.weights for f in footprints)
    if for_weights <= 0:
        return "Plan with more memory for each"
    num_stages = max(len(footprints) + 1, -(-total // for_weights))
    return (
        f"Spread it over more: --world-size {num_stages * layout.num_pipelines} or above"
        f"{f' with --data-group-size {layout.num_pipelines}' * (layout.num_pipelines > 1)}"
        "; or plan with more memory for each"
    )


def _least_bytes(config: EngineConfig, footprint: Footprint, device_type: str) -> int:
    """Return the least memory with which a process can answer a request.

    The CPU's KV cache takes memory block by block, as rows use it; a GPU's is taken whole.
    """
    is_whole = device_type == "cuda" and config.budget is not None
    num_kv_tokens = config.budget if is_whole and config.budget else config.block_size
    return footprint.held_weights + num_kv_tokens * footprint.kv_token


def _remedy(held_in: torch.dtype, device_type: str) -> str:
    smaller = "--dtype bfloat16, which takes half; " * (held_in == torch.float32)
    where = "a machine with more memory" if device_type == "cpu" else "a smaller --budget"
    return (
        f"Use {smaller}{where}; or spread its layers over machines with --world-size "
        "(fminfer check --world-size N --device-memory 80G foresees that)"
    )


def _why_slow(footprint: Footprint, free: int) -> str:
    """Explain a slow run: weights are used in their mapped files, and do not fit the memory."""
    if not footprint.reads_files or footprint.weights <= free:
        return ""
    return (
        f"its weights, {show_bytes(footprint.weights)}, are more than the {show_bytes(free)} of "
        "memory that are free, and are read from the disk again at each step"
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

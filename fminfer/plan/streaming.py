"""Chooses the layers that are streamed, and how many tokens a pass computes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Literal

from fminfer.compute.formats.dense import Dense
from fminfer.core.config import ON_CPU, STREAMED
from fminfer.core.errors import UsageError
from fminfer.core.quantities import describe_bytes, with_noun
from fminfer.plan.expected_bytes import expect_bytes, layer_bytes
from fminfer.plan.machine_facts import count_sharers
from fminfer.plan.run_plan import RankPlan, RunPlan, Streamed

# Shares of a rank's memory for the KV cache. `auto` streams layers where less than the first is
# left, and then enough of them to leave the second, so that a pass computes many tokens.
LEAST_CACHE = 0.05
STREAMED_CACHE = 0.3
WORK_SHARE = 0.15  # of a rank's memory, for a step's work
HOST_SHARE = 0.7  # of the host's free memory, for a GPU's streamed layers
HOST_BYTES = 128 << 30  # of a planned machine, if no flag says it


def plan_streams(plan: RunPlan) -> RunPlan:
    """Choose the layers of each rank that are streamed, if options ask for it, or
    refuse them."""
    offload = plan.config.offload
    on_cpu = plan.device.type == "cpu"
    if offload == "off":
        return plan
    if offload == "cpu" and on_cpu:
        raise UsageError(
            "--offload cpu keeps a GPU's layers in the host's memory, but here the CPU "
            "computes. Use --offload disk, or auto"
        )
    streamed = replace(plan, chunk_size=_choose_step_size(plan))
    chosen = [
        _spread_layers(rank.part.layer_numbers, _count_streamed(streamed, rank))
        for rank in plan.ranks
    ]
    if not any(chosen):
        return plan
    machine = plan.machine
    host = plan.machine.host_free or HOST_BYTES
    # Shards need parts of the same matrices: they share a copy, as pipelines do.
    is_shared = max(machine.num_pipelines, machine.num_engines, machine.num_shards) > 1
    # What the streamed layers of this machine's ranks take in its memory.
    first = machine.rank - machine.local_rank
    here = {
        number
        for numbers in chosen[first : first + machine.local_size]
        for number in numbers
    }
    waiting = sum(layer_bytes(plan, None, number).whole for number in here)
    fits_host = not on_cpu and waiting <= HOST_SHARE * host
    if offload == "cpu" and not fits_host:
        raise UsageError(
            f"--offload cpu would keep {describe_bytes(waiting)} of layers in the host's "
            f"memory. It takes at most {HOST_SHARE:.0%} of what is free, and "
            f"{describe_bytes(host)} are free. Use --offload disk"
        )
    place: Literal["cpu", "disk"] = "cpu" if fits_host and offload != "disk" else "disk"
    ranks = []
    for rank, numbers in zip(plan.ranks, chosen, strict=True):
        size = sum(layer_bytes(plan, rank.share, number).read for number in numbers)
        layers = Streamed(place, is_shared, numbers, size) if numbers else None
        takes = expect_bytes(streamed, rank.part, rank.share, layers)
        ranks.append(replace(rank, takes=takes, streamed=layers))
    return replace(streamed, ranks=tuple(ranks))


def _choose_step_size(plan: RunPlan) -> int:
    """Return the most tokens of a step for which there is memory."""
    if plan.config.chunk_size is not None:
        return plan.config.chunk_size
    each = max(rank.takes.work_token for rank in plan.ranks)
    size = STREAMED[plan.device.type].chunk_size
    while size > ON_CPU.chunk_size and size * each > WORK_SHARE * _room_of_rank(plan):
        size //= 2
    return size


def _room_of_rank(plan: RunPlan) -> float:
    """Return one rank's share of the memory."""
    machine = plan.machine
    if plan.shares_memory:
        sharers = machine.local_size * max(machine.num_pipelines, machine.num_engines)
    else:
        sharers = (
            1
            if machine.device_bytes is not None
            else count_sharers(plan.config, machine)
        )
    return plan.room_bytes / sharers


def _count_streamed(plan: RunPlan, rank: RankPlan) -> int:
    """Return how many of a rank's layers are streamed."""
    num = len(rank.part.layer_numbers)
    if plan.config.offload != "auto":
        return num
    room = _room_of_rank(plan)
    if rank.takes.total(0) <= room * (1 - LEAST_CACHE):
        return 0

    def fits(count: int) -> bool:
        numbers = _spread_layers(rank.part.layer_numbers, count)
        layers = Streamed("disk", False, numbers, 0)
        takes = expect_bytes(plan, rank.part, rank.share, layers)
        return takes.total(0) <= room * (1 - STREAMED_CACHE)

    return 1 + bisect_left(range(1, num), True, key=fits)


def _spread_layers(numbers: list[int], count: int) -> tuple[int, ...]:
    """Return layers at even distances, so that one is read while others compute."""
    num = len(numbers)
    chosen = (i for i in range(num) if (i + 1) * count // num > i * count // num)
    return tuple(numbers[i] for i in chosen)


def describe_streaming(plan: RunPlan, disk_speed: float = 0.0) -> str:
    """Describe a pass, and the streamed layers of the rank with most of them; "": none are."""
    streamed = [(rank, rank.streamed) for rank in plan.ranks if rank.streamed]
    if not streamed:
        return ""
    rank, most = max(streamed, key=lambda pair: pair[1].num_bytes)
    all_layers = with_noun(rank.part.num_layers, "layer")
    layers = f"{len(most.numbers)} of {all_layers}, {describe_bytes(most.num_bytes)},"
    source = "wait in the host's memory, and are copied to the GPU in each pass"
    if most.place == "disk":
        source = "are read from the disk in each pass"
        if disk_speed:
            seconds = most.num_bytes / disk_speed
            rate = f"{describe_bytes(int(disk_speed))}/s"
            source += f", which takes about {seconds:,.1f} s at {rate}"
    num_cached = max(1, plan.num_kv_tokens // plan.config.block_size)
    rows = min(plan.sizes.max_rows, num_cached)
    size = f"up to {rows:,} rows, or {plan.chunk_size:,} tokens"
    text = f"{layers} {source}. A pass computes {size}"
    if len(plan.ranks) > 1:
        text = f"rank {rank.rank}: {text}"

    conversion = find_conversion(plan, most)
    if conversion is None:
        return text
    stored, made = conversion
    if plan.config.quantized_to:
        cost = (
            "quantized again in each pass, which is slow: write them once with "
            "fminfer quantize"
        )
    else:
        cost = f"converted to {made} in each pass"
    return f"{text}. Weights are stored in {stored}, and {cost}"


def find_conversion(plan: RunPlan, streamed: Streamed) -> tuple[str, str] | None:
    """Return the formats that weights are stored in, and made in each pass; None: as stored."""
    of_layer = f"{streamed.numbers[0]}."
    unknown = Dense(plan.dtype)  # that of random weights
    for name, held in plan.held.items():
        stored = plan.stored.get(name, unknown)
        is_made = plan.formats["product"] == held or plan.config.quantized_to
        if name.startswith(of_layer) and stored.name != held.name and is_made:
            return stored.name, held.name
    return None

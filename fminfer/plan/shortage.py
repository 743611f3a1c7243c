"""Whether a run fits the memory it has, how much KV cache fits beside it, and what to
do if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fminfer.core.errors import UsageError
from fminfer.core.quantities import describe_bytes
from fminfer.plan.expected_bytes import GPU_RESERVE
from fminfer.plan.run_plan import RankPlan, RunPlan, name_of

CPU_SHARE = 0.5  # share of the memory that is free after loading; others use it as well
# The same with --offload, of what a pass leaves: files need little of the system's cache.
STREAMED_SHARE = 0.7


@dataclass(slots=True, frozen=True)
class RankRoom:
    """What one rank has and needs, in bytes, as it tells the other ranks."""

    memory: str  # its name: ranks that share it name the same
    device: str  # its kind
    free: int
    least: int  # with which it can answer a request, beside what it has
    work: int
    kv_token: int
    most: int  # tokens of KV cache; more are of no use


def find_room(plan: RunPlan, rank: RankPlan, memory: str, free: int) -> RankRoom:
    """Say what a rank has, of so many free bytes of a memory."""
    return RankRoom(
        memory=memory,
        device=plan.device.type,
        free=free,
        least=_least_bytes(plan, rank),
        work=rank.takes.work + rank.takes.passing,
        kv_token=rank.takes.kv_token,
        most=plan.most_kv_tokens,
    )


def count_kv_tokens(plan: RunPlan) -> int:
    """Return the tokens of a pipeline's KV cache, in whole blocks, before weights are loaded.

    An automatic budget goes by the memory that is free, less what is to be loaded. The system
    counts mapped files as free.
    """
    if plan.config.budget is not None:
        return _whole_blocks(plan, plan.config.budget)
    free = plan.room_bytes
    on_cpu = plan.device.type == "cpu"
    has_libraries = on_cpu or plan.machine.device_bytes is not None
    # What passes counts with a step's work, as it does after loading.
    taken = [
        each.weights - each.mapped - each.passing + each.libraries * has_libraries
        for each in plan.takes
    ]
    if has_libraries and not on_cpu:
        free += GPU_RESERVE  # which `auto_budget` leaves
    if plan.shares_memory:
        taken = [sum(taken)] * len(taken)
        free = free // plan.machine.num_pipelines
    rooms = [
        find_room(
            plan, rank, "all" if plan.shares_memory else str(rank.rank), free - size
        )
        for rank, size in zip(plan.ranks, taken, strict=True)
    ]
    return fit_kv_tokens(plan, rooms)


def fit_kv_tokens(plan: RunPlan, rooms: Sequence[RankRoom]) -> int:
    """Return the tokens of KV cache, in whole blocks, that fit on every rank beside weights."""

    def fit(room: RankRoom) -> int:
        sharers = [each for each in rooms if each.memory == room.memory]
        each = sum(one.kv_token for one in sharers)
        work = sum(one.work for one in sharers)
        if plan.config.offload == "off" or room.device != "cpu":
            return auto_budget(each, room.most, room.free, work, room.device)
        return auto_budget(
            each, room.most, max(0, room.free - work), 0, "cpu", STREAMED_SHARE
        )

    return _whole_blocks(plan, min(map(fit, rooms)))


def auto_budget(
    kv_bytes_per_token: int,
    most_useful: int,
    free: int,
    work: int,
    device_type: str,
    share: float = CPU_SHARE,
) -> int:
    """Return the tokens of KV cache that a device has room for beside loaded weights,
    at least 1.

    Bytes of a token and of steps' work are of all that share the memory.
    """
    room = int(free * share) if device_type == "cpu" else free - work - GPU_RESERVE
    # encoders cache nothing
    return max(1, min(most_useful, room // max(1, kv_bytes_per_token)))


def _whole_blocks(plan: RunPlan, num_tokens: int) -> int:
    return -(-num_tokens // plan.config.block_size) * plan.config.block_size


def find_shortage(plan: RunPlan) -> str:
    """Say what does not fit, and what to do; on this machine only what certainly does not."""
    if plan.shares_memory:
        return _find_host_shortage(plan)
    is_planned = plan.machine.device_bytes is not None
    room = plan.room_bytes
    takes = plan.takes
    more = [(each.libraries + each.work) * is_planned for each in takes]
    needs = [
        _least_bytes(plan, rank) + size
        for rank, size in zip(plan.ranks, more, strict=True)
    ]
    if max(needs) <= room:
        return ""
    rank = needs.index(max(needs))
    budget = _reserved_budget(plan)
    cache = "KV cache" if budget is None else f"a KV cache of {budget:,} tokens"
    if is_planned:
        cache = f"libraries, a step and {cache}"
    weights = (
        f"{describe_bytes(takes[rank].held_weights)} for weights in {plan.held_in}"
    )
    need = (
        f"rank {rank} would take {describe_bytes(max(needs))} ({weights}, the rest for "
        f"{cache})"
    )
    return _refusal(
        plan,
        need,
        f"its device has {describe_bytes(room)}",
        _describe_device_remedy(plan),
    )


def _find_host_shortage(plan: RunPlan) -> str:
    """Say what does not fit of processes that share the memory of this machine."""
    num_pipelines = plan.machine.num_pipelines
    libraries = num_pipelines * sum(each.libraries for each in plan.takes)
    need = libraries + num_pipelines * sum(
        _least_bytes(plan, rank) for rank in plan.ranks
    )
    room = plan.room_bytes + plan.machine.swap
    if need <= room:
        return ""
    who = "its run" if num_pipelines == 1 else f"{num_pipelines} pipelines of it"
    rest = f"the rest for weights in {plan.held_in} and a block of KV cache"
    of_libraries = f"{describe_bytes(libraries)} for Python and its libraries"
    need_told = f"{who} would take {describe_bytes(need)} ({of_libraries}, {rest})"
    return _refusal(plan, need_told, f"{describe_bytes(room)} are free", _remedy(plan))


def find_rank_shortage(plan: RunPlan, rooms: Sequence[RankRoom]) -> str:
    """Say which ranks do not fit the memory that they share; each has looked at its own."""
    for name in dict.fromkeys(room.memory for room in rooms):
        here = [number for number, room in enumerate(rooms) if room.memory == name]
        need = sum(rooms[number].least for number in here)
        free = min(rooms[number].free for number in here)
        if need > free:
            several = f"ranks {', '.join(map(str, here))} together"
            who = several if len(here) > 1 else f"rank {here[0]}"
            need_text = (
                f"{who} would take {describe_bytes(need)} of {name} for weights in "
                f"{plan.held_in}"
            )
            return _refusal(
                plan, need_text, f"{describe_bytes(free)} are free", _remedy(plan)
            )
    return ""


def _refusal(plan: RunPlan, need: str, has: str, remedy: str) -> str:
    return f"{plan.checkpoint.name} does not fit: {need}, and {has}. {remedy}"


def _least_bytes(plan: RunPlan, rank: RankPlan) -> int:
    """Return the least memory with which a process can answer a request."""
    num_kv_tokens = _reserved_budget(plan) or plan.config.block_size
    return rank.takes.held_weights + num_kv_tokens * rank.takes.kv_token


def _reserved_budget(plan: RunPlan) -> int | None:
    """Return a --budget that takes memory at once: a GPU's. A CPU's does block by block."""
    return plan.config.budget if plan.device.type == "cuda" else None


def _remedy(plan: RunPlan) -> str:
    on_cpu = plan.device.type == "cpu"
    ways = []
    if plan.held_in == "float32":
        ways.append("--dtype bfloat16, which takes half")
    if on_cpu and plan.held_in in ("float32", "bfloat16", "float16"):
        ways.append("--quantize int8 or int4")
    ways += _find_offload_ways(plan)
    if _reserved_budget(plan) is not None:
        ways.append("a smaller --budget")
    where = "a machine" if on_cpu else "a GPU"
    ways.append(f"{where} with more memory")
    return (
        f"Use {'; '.join(ways)}; or spread its layers over "
        "machines with --world-size (fminfer check --world-size N --device-memory 80G "
        "foresees that)"
    )


def _find_offload_ways(plan: RunPlan) -> list[str]:
    if plan.config.offload != "off":
        return []
    way = "--offload auto, which streams the layers that do not fit"
    # a check of them stands for a model that has files
    if plan.config.random_init is not None:
        way += ", from a model's files: random weights have none"
    return [way]


def _describe_device_remedy(plan: RunPlan) -> str:
    """Say which --budget a device has room for, and how many processes would be enough.

    Layers count as if they could be cut at any place.
    """
    budget = _reserved_budget(plan)
    takes = plan.takes
    ways = []
    if budget is not None:
        without = replace(plan, config=replace(plan.config, budget=None))
        if not find_shortage(without):
            num_tokens = count_kv_tokens(without)
            ways.append(
                f"use a smaller --budget: without the flag it is {num_tokens:,} tokens"
            )
    num_pipelines = plan.machine.num_pipelines
    room = plan.room_bytes - max(each.libraries + each.work for each in takes)
    if room > 0:
        need = sum(each.weights + (budget or 0) * each.kv_token for each in takes)
        num_stages = -(
            -max(len(takes) + 1, -(-need // room)) // plan.machine.num_shards
        )
        num_ranks = num_stages * plan.machine.num_shards * num_pipelines
        way = f"spread it over more: --world-size {num_ranks} or above"
        if num_pipelines > 1:
            way += f" with --data-group-size {num_pipelines}"
        if num_stages <= len(plan.checkpoint.model.layers):
            ways.append(way)
    ways += [f"use {way}" for way in _find_offload_ways(plan)]
    is_planned = plan.machine.device_bytes is not None
    ways.append(
        "plan with more memory for each" if is_planned else "use GPUs with more memory"
    )
    text = "; or ".join(ways)
    return text[0].upper() + text[1:]


def explain_slowness(plan: RunPlan) -> str:
    """Explain a slow run: weights are used in their mapped files, and do not fit the memory."""
    takes = plan.this_rank.takes
    free = plan.machine.free
    if not takes.reads_files or free is None or takes.weights <= free:
        return ""
    return (
        f"its weights, {describe_bytes(takes.weights)}, are more than the "
        f"{describe_bytes(free)} of memory that are free, and are read from the disk again "
        "at each step; --offload disk reads them ahead, once for thousands of tokens"
    )


def cache_error(plan: RunPlan, num_tokens: int, free: int) -> UsageError:
    """Return the error of a KV cache for which there is no memory."""
    size = num_tokens * plan.this_rank.takes.kv_token
    narrower = ""
    if name_of(plan.kv_dtype) == "float32":
        narrower = ", or --kv-dtype bfloat16"
    return UsageError(
        f"a KV cache of {num_tokens} tokens takes {size / 2**30:.1f} GiB beside the weights, "
        f"and {free / 2**30:.1f} GiB are free; give a smaller --budget{narrower}"
    )

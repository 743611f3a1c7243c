"""What the ranks of a pipeline settle before they compute: model, plan, room, weights,
memory."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError, UsageError
from fminfer.machine.device import make_memory_name, measure_free_bytes
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.models.checkpoint import Checkpoint, open_model
from fminfer.models.fingerprint import name_different_files
from fminfer.pipeline.group import Group
from fminfer.pipeline.ranks import ALONE, Spread
from fminfer.plan.machine_facts import (
    Machine,
    count_sharers,
    find_machine,
    has_moved,
)
from fminfer.plan.planning import make_plan, plan_ahead
from fminfer.plan.run_plan import RunPlan
from fminfer.plan.shortage import (
    RankRoom,
    cache_error,
    find_rank_shortage,
    find_room,
    fit_kv_tokens,
)

log = logging.getLogger("fminfer")
END_S = 3.0  # time for rank 0 to say what is wrong, and to end, once ranks know it


class Opening:
    """Opens the model, and prepares rank 0, before ranks meet: mistakes are told at once.

    Args:
        checkpoint: the model, if it is open already.
        plan: the run's plan, if this process has made it already.
        is_computing: this process computes; otherwise only if it has a group.
        prepare: is called by rank 0 before others are met.
    """

    def __init__(
        self,
        config: EngineConfig,
        spread: Spread = ALONE,
        *,
        checkpoint: Checkpoint | None = None,
        plan: RunPlan | None = None,
        is_computing: bool = False,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._spread = spread
        self._checkpoint = checkpoint if plan is None else plan.checkpoint
        self._plan = plan
        self._is_computing = is_computing
        self._prepare = prepare

    def __call__(self, rank: int) -> None:
        """Find the model; the weights of one at the hub may be fetched later."""
        if rank == 0:
            self._prepare()
        self._checkpoint = self._checkpoint or open_model(
            self.config, has_weights=False
        )

    def plan_run(self, group: Group | None = None) -> RunPlan:
        """Return the run's plan, with the model's weights on this machine.

        A process that may yet compute nothing asks for no GPU's memory.
        """
        if self._plan is not None:
            return self._plan
        config = self.config
        spread = self._spread
        checkpoint = (self._checkpoint or open_model(config)).with_weights()
        if config.offload != "off" and checkpoint.folder is None:
            raise UsageError(
                "--offload streams layers from a model's files, and random weights "
                "have none. Use --model-name, or leave --offload out"
            )
        place = Machine(
            num_stages=spread.num_stages,
            num_shards=config.tensor_parallel_size,
            num_pipelines=spread.num_pipelines,
            local_size=spread.num_stages * config.tensor_parallel_size,
        )
        is_computing = self._is_computing or group is not None
        if is_computing:
            place = find_place_of_rank(place, group, spread)
        self._plan = plan_ahead(config, checkpoint, place, is_computing=is_computing)
        return self._plan


def update_plan(
    plan: RunPlan, place: Machine | None = None, *, is_computing: bool = True
) -> RunPlan:
    """Return the plan for what this machine has now, and for this process's place."""
    place = replace(place or plan.machine, host_free=None)
    machine = find_machine(plan.config, place, is_computing=is_computing)
    return replace_plan(plan, machine)


def replace_plan(plan: RunPlan, machine: Machine) -> RunPlan:
    """Return the plan for a machine.

    It is the same unless the place, free memory or the kernels that can be had have changed.
    """
    if not has_moved(plan.machine, machine):
        return plan
    changed = make_plan(plan.config, plan.checkpoint, machine)
    for dtype, now in (
        (plan.dtype, changed.dtype),
        (plan.kv_dtype, changed.kv_dtype),
    ):
        if dtype != now and machine.rank == 0:
            log.warning("The plan of the run has changed: %s became %s.", dtype, now)
    return changed


def find_place_of_rank(
    planned: Machine, group: Group | None, spread: Spread
) -> Machine:
    """Return the place of a process that computes; None: it has its pipeline alone."""
    place = replace(
        planned,
        num_pipelines=1,
        num_engines=spread.num_engines,
        engine_number=spread.engine_number,
    )
    if group is None:
        return place
    num_shards = place.num_shards
    return replace(
        place,
        num_stages=group.world_size // num_shards,
        rank=group.rank,
        local_rank=group.local_rank,
        local_size=group.local_size,
    )


def settle_plan(
    plan: RunPlan, group: Group | None = None, spread: Spread = ALONE
) -> RunPlan:
    """Return the plan that this process computes by, and refuse one that does not fit memory.

    It is the plan with which its part began, unless that has been replaced.
    """
    config = plan.config
    plan = update_plan(plan, find_place_of_rank(plan.machine, group, spread))
    shortage = plan.shortage
    if group is not None:  # none reads its weights before all have looked
        free = (plan.machine.free or 0) + plan.machine.swap
        shortage = find_rank_shortage(plan, _gather_rooms(plan, group, "room", free))
    if not shortage and plan.device.type == "cpu" and config.budget is not None:
        shortage = _explain_missing_cache(
            plan, -(-config.budget // config.block_size) * config.block_size
        )
    if shortage:
        if group is not None and group.rank > 0:
            time.sleep(END_S)  # rank 0 says it, and ends the run
        raise UsageError(shortage)
    return plan


def require_room_for_all(plan: RunPlan) -> None:
    """Refuse pipelines for which this machine has no memory; of GPUs each process looks
    itself."""
    if shortage := update_plan(plan, is_computing=False).shortage:
        raise UsageError(shortage)


def _explain_missing_cache(plan: RunPlan, num_tokens: int) -> str:
    """Say why the CPU's system gives no memory for a --budget before weights are read;
    "": it does.

    It asks for that memory and gives it back. Nothing touches it, so that this costs no time.
    """
    try:
        torch.empty(
            num_tokens * plan.this_rank.takes.kv_token, dtype=torch.uint8, device="cpu"
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return str(cache_error(plan, num_tokens, measure_free_bytes(plan.device)))
    return ""


def compare_weights(group: Group, mine: dict[str, str]) -> None:
    """Check that every rank finds the same weights as rank 0: each may have its own copy."""
    theirs = group.gather("weights", mine)[0]
    if differences := name_different_files(mine, theirs):
        raise PipelineError(
            f"the weights of rank {group.rank} are not those of rank 0: {differences} "
            "differ; give every rank the same model"
        )


def connect_gpus(group: Group, device: torch.device) -> dist.ProcessGroup | None:
    """Return NCCL's group if each rank has a GPU of its own, which is when it works."""
    names = group.gather("device", make_memory_name(device, socket.gethostname()))
    if any(name.endswith("/cpu") for name in names) or len(set(names)) < len(names):
        return None
    gpus: dist.ProcessGroup = dist.new_group(backend="nccl")
    connect_neighbours(gpus, group, device)
    return gpus


def connect_neighbours(
    gpus: dist.ProcessGroup, group: Group, device: torch.device
) -> None:
    """Send a message from each rank to the next, pair after pair.

    NCCL connects two ranks at their first message. If a receiving and a sending thread
    did this at once, two ranks could wait for each other for ever.
    """
    word = torch.zeros(1, device=device)
    for first in range(group.world_size - 1):
        if group.rank == first:
            dist.send(word, first + 1, group=gpus)
        elif group.rank == first + 1:
            dist.recv(word, first, group=gpus)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gather(group: Group | None, name: str, value: object) -> list[Any]:
    """Return every rank's value, in rank order; that of this process if it is alone."""
    return [value] if group is None else group.gather(name, value)


def agree_step_size(plan: RunPlan, group: Group | None = None) -> int:
    """Return the most tokens of a step with streamed layers, by each rank's room; 0: by
    options."""
    sizes = gather(group, "step size", plan.sizes.chunk_size)
    return min(sizes) if plan.chunk_size else 0


def count_blocks(plan: RunPlan, group: Group | None = None) -> int:
    """Return the size of the KV cache in blocks, the same on every rank, once weights
    are loaded.

    Of an automatic budget each rank allows what its memory has room for; the least counts.
    """
    budget = plan.config.budget
    if budget is None:
        gather(group, "loaded", True)  # every rank's weights are in memory
        free = measure_free_bytes(plan.device) // count_sharers(
            plan.config, plan.machine
        )
        budget = fit_kv_tokens(plan, _gather_rooms(plan, group, "memory", free))
    return -(-budget // plan.config.block_size)


def _gather_rooms(
    plan: RunPlan, group: Group | None, name: str, free: int
) -> list[RankRoom]:
    """Return what each rank needs and has, of which this one has so many bytes free."""
    mine = find_room(
        plan, plan.this_rank, make_memory_name(plan.device, socket.gethostname()), free
    )
    return [RankRoom(**each) for each in gather(group, name, asdict(mine))]

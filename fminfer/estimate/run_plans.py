"""Lists the ways to spread a run over devices, and predicts the time of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from fminfer.core.config import EngineConfig, GroupSizes, Offload, Quantized, StepSizes
from fminfer.core.errors import UsageError
from fminfer.core.quantities import counted
from fminfer.estimate.cost_model import CostModel
from fminfer.estimate.simulation import Simulation, StepCounts
from fminfer.plan.machine_facts import Machine
from fminfer.plan.pass_time import StepLoad, predict_load, predict_run
from fminfer.plan.roofs import Roofs
from fminfer.plan.run_plan import RunPlan, Streamed

ALL_BITS: tuple[Quantized | None, ...] = (None, "int8", "int4")
Plan = Callable[[EngineConfig, Machine], RunPlan]


@dataclass(slots=True, frozen=True)
class FileWork:
    """What the lines of a file ask for, as the engine's own loop found.

    Args:
        simulate: the steps of one of so many pipelines, with these sizes, blocks and stages.
        find_costs: what steps of a plan cost, if they were timed on this machine.
    """

    simulate: Callable[[int, StepSizes, int, int], Simulation]
    find_costs: Callable[[RunPlan], CostModel | None]
    scale: float  # by which the file is longer than what is simulated
    num_tokens: float  # to draw, or else to feed
    longest_row: int
    most_blocks: int  # of KV cache; more make no difference


@dataclass(slots=True, frozen=True)
class PlannedRun:
    """One way to run a file, with what is predicted of it; all times are predictions."""

    config: EngineConfig
    plan: RunPlan | None = None  # None: it cannot be
    why_not: str = ""  # it cannot be, or does not fit
    load_s: float = 0.0
    run_s: float = 0.0
    ms_token: float = 0.0  # of the run, without loading
    bound: str = ""

    @property
    def flags(self) -> str:
        """The flags of `fminfer run` that choose it."""
        config = self.config
        told = {
            "--data-group-size": config.data_group_size,
            "--pipeline-group-size": config.num_stages,
            "--tp": config.tensor_parallel_size,
            "--quantize": config.quantize,
            "--offload": config.offload,
        }
        return " ".join(f"{k} {v}" for k, v in told.items() if v not in (1, None, "off"))

    @property
    def streamed(self) -> list[Streamed]:
        """What comes and goes in each stage."""
        ranks = self.plan.ranks if self.plan else ()
        return [rank.streamed for rank in ranks if rank.streamed and not rank.part.shard]

    @property
    def rank_bytes(self) -> int:
        """The most that a rank takes beside its KV cache."""
        return max(rank.takes.total(0) for rank in self.plan.ranks) if self.plan else 0

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON tells of it."""
        found: dict[str, Any] = {"flags": self.flags, "why_not": self.why_not}
        if self.plan is None or self.why_not:
            return found
        found |= {"weight_dtype": self.plan.held_in, "kv_tokens": self.plan.num_kv_tokens}
        found |= {"rank_bytes": self.rank_bytes, "streamed": [*map(asdict, self.streamed)]}
        return found | {n: getattr(self, n) for n in ("load_s", "run_s", "ms_token", "bound")}


def find_spreads(roofs: Roofs, asked: GroupSizes) -> Iterator[tuple[int, int, int]]:
    """Yield the data groups, stages and shards that use all devices.

    Shards of a stage are on one node. A pipeline has a part of a node, or whole nodes.
    """
    num, size = roofs.num_devices, roofs.num_devices * roofs.num_nodes
    told = (asked.data_group_size, asked.told_stages, asked.tensor_parallel_size)
    for shards in (n for n in range(1, num + 1) if num % n == 0):
        for stages in (n for n in range(1, size + 1) if size // shards % n == 0):
            found = (size // (shards * stages), stages, shards)
            is_told = all(n in (None, 1, own) for own, n in zip(found, told, strict=True))
            if is_told and (num % (shards * stages) == 0 or shards * stages % num == 0):
                yield found


def plan_runs(
    config: EngineConfig,
    machine: Machine,
    make_plan: Plan,
    work: FileWork,
    roofs: Roofs,
    offloads: Sequence[Offload] = ("off", "auto"),
) -> list[PlannedRun]:
    """Plan a file's run in all ways, the fastest first; then those that do not fit.

    Args:
        machine: facts of each device; how many there are does not matter.
        offloads: of each way, until it fits.

    Raises:
        UsageError: no way has the stages and ranks that flags ask for.
    """
    work, found = replace(work, simulate=cache(work.simulate)), list[PlannedRun]()
    for groups, stages, shards in find_spreads(roofs, config):
        for quantize in (config.quantize,) if config.quantized_to else ALL_BITS:
            for offload in offloads:
                asked = replace(
                    config,
                    world_size=None,
                    data_group_size=groups,
                    pipeline_group_size=stages,
                    tensor_parallel_size=shards,
                    quantize=quantize,
                    offload=offload,
                )
                found.append(_plan_one(asked, machine, make_plan, work, roofs))
                if not found[-1].why_not:
                    break  # no layer needs to be streamed
    if not found:
        raise UsageError(
            f"no way uses {counted(roofs.num_devices * roofs.num_nodes, 'device')} with the stages "
            "and ranks that flags ask for: --tp must divide the devices of a node. Give other "
            "numbers, or another --num-devices"
        )
    return sorted(found, key=lambda each: (bool(each.why_not), each.load_s + each.run_s))


def _plan_one(
    config: EngineConfig, machine: Machine, make_plan: Plan, work: FileWork, roofs: Roofs
) -> PlannedRun:
    """Plan a run, and predict its times if it fits."""
    groups, stages, shards = config.data_group_size, config.num_stages, config.tensor_parallel_size
    host = roofs.host_bytes if machine.device_bytes is not None else machine.host_free
    facts = replace(
        machine,
        num_stages=stages,
        num_shards=shards,
        num_pipelines=groups,
        local_size=min(stages * shards, roofs.num_devices),
        host_free=host,
    )
    try:
        plan = make_plan(config, facts)
    except UsageError as error:
        return PlannedRun(config, why_not=str(error))
    if plan.shortage:
        return PlannedRun(config, plan, "more memory is needed")
    if plan.num_kv_tokens < work.longest_row:
        return PlannedRun(config, plan, "the KV cache is too small for the longest row")
    num_blocks = min(work.most_blocks, plan.num_kv_tokens // config.block_size)
    steps = work.simulate(groups, plan.sizes, num_blocks, stages)
    loads = [*map(average, steps.parts(work.scale))]
    seconds, bound = predict_run(plan, loads, steps.stats.max_rows_running, roofs)
    if (costs := work.find_costs(plan)) is not None:
        seconds = costs.whole_run * costs.predict_s(steps.scaled(work.scale).costs)
        bound = "as calibrated"
    ms_token = 1e3 * seconds / max(1.0, work.num_tokens)
    return PlannedRun(config, plan, "", predict_load(plan, roofs), seconds, ms_token, bound)


def average(steps: StepCounts) -> tuple[StepLoad, float]:
    """Return the average of steps, and how many there are."""
    costs, num = [each / steps.num_steps for each in steps.costs], steps.num_steps
    rows = steps.num_rows / num
    load = StepLoad(
        steps.num_tokens / num, rows, costs[4] + costs[8], costs[3] + costs[8], costs[10]
    )
    return load, num

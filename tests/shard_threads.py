"""The ranks of a model that is cut, as threads of one process.

They are built as ranks are, and add up by the library's own sums, or in plain torch.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import fminfer
from fminfer.compute.shards import ShardGroup, SharedMemoryGroup
from fminfer.compute.values.step import Step, StepResult
from fminfer.core.config import EngineConfig, make_config
from fminfer.forward.stage import Stage
from fminfer.models.checkpoint import Checkpoint, open_model
from fminfer.plan.machine_facts import Machine, find_machine
from fminfer.plan.planning import make_plan
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.load import builder


class ThreadGroup:
    """Ranks of a stage that are threads, and add up in the order of ranks in float32."""

    def __init__(
        self, index: int, barrier: threading.Barrier, given: list[Any]
    ) -> None:
        self.index = index
        self.count = len(given)
        self._barrier = barrier
        self._given = given

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self._given[self.index] = x
        self._barrier.wait()
        found = torch.stack(self._given)  # an error where sizes differ
        self._barrier.wait()
        return found

    def stop(self) -> None:
        self._barrier.abort()


def make_shards(count: int, library: Any = None) -> list[ShardGroup]:
    """Return the ranks of a stage, as each sees them."""
    if library is None:
        barrier = threading.Barrier(count, timeout=60)
        given = [None] * count
        return [ThreadGroup(index, barrier, given) for index in range(count)]
    memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(library, count))
    return [SharedMemoryGroup(library, memory, index, count) for index in range(count)]


def plan_ranks(
    config: EngineConfig, checkpoint: Checkpoint, num_shards: int, num_stages: int = 1
) -> list[RunPlan]:
    """Return the plan of each rank, by its number."""
    size = num_shards * num_stages
    known = Machine(num_stages=num_stages, num_shards=num_shards, local_size=size)
    plan = make_plan(config, checkpoint, find_machine(config, known))
    return [
        replace(plan, machine=replace(plan.machine, rank=rank)) for rank in range(size)
    ]


class ShardedRanks:
    """All ranks of a pipeline."""

    def __init__(self, plans: list[RunPlan], num_kv_tokens: int) -> None:
        self._num_shards = plans[0].machine.num_shards
        self._pool = ThreadPoolExecutor(self._num_shards)
        self.loaded = list[builder.LoadedPart]()
        self.stages = list[Stage]()
        shards: list[ShardGroup] = []
        for plan in plans:
            part = plan.this_rank.part

            def connect(
                group: Any, part: Any, device: Any, library: Any
            ) -> ShardGroup | None:
                nonlocal shards
                if part.num_shards == 1:
                    return None
                if part.is_leader:
                    shards = make_shards(part.num_shards, library)
                return shards[part.shard]

            group: Any = SimpleNamespace(
                rank=part.rank,
                world_size=len(plans),
                local_size=len(plans),
                gather=lambda name, value: [value] * len(plans),
            )
            with mock.patch.object(builder, "connect_shards", connect):
                loaded = builder.load_part(plan, group)
            loaded = replace(
                loaded, plan=replace(loaded.plan, num_kv_tokens=num_kv_tokens)
            )
            self.loaded.append(loaded)
            self.stages.append(builder.make_stage(loaded))

    def run(self, step: Step) -> StepResult:
        """Compute a step on all ranks; return what the leader of the last stage finds."""
        hidden: torch.Tensor | None = None
        for first in range(0, len(self.stages), self._num_shards):
            stages = self.stages[first : first + self._num_shards]
            outs = self._together(
                [partial(each.forward, step, hidden) for each in stages]
            )
            assert all(torch.equal(out, outs[0]) for out in outs), "ranks differ"
            hidden = outs[0]
        found = self._together([partial(each.finish, step, hidden) for each in stages])
        assert all(each.keys() == found[0].keys() for each in found)
        return StepResult(step.step_id, found[0], [])

    def _together(self, work: list[Callable[[], Any]]) -> list[Any]:
        futures = [self._pool.submit(each) for each in work]
        return [future.result() for future in futures]


def cut_engine(
    folder: Path | str | None, num_shards: int, num_stages: int = 1, **options: Any
) -> fminfer.Engine:
    """Return an engine whose steps are computed by the ranks of a model that is cut."""
    name = None if folder is None else str(folder)
    engine = fminfer.Engine(name, **options)
    config = make_config(name, **options)
    plans = plan_ranks(config, open_model(config), num_shards, num_stages)
    size = engine.facts.num_kv_blocks * engine.config.block_size
    ranks = ShardedRanks(plans, size)
    engine.pipeline.stages._run = ranks.run  # type: ignore[attr-defined]
    return engine

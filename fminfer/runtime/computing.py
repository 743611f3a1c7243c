"""The processes that compute for an engine: one pipeline, or several."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from fminfer.core.config import EngineConfig
from fminfer.core.messages import RankMemory
from fminfer.engine.engine_core import EngineCore
from fminfer.models.known_sizes import check_split
from fminfer.models.layer_source import OnProgress
from fminfer.pipeline.group import Group, require_no_group
from fminfer.pipeline.ranks import Spread
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.bars import say
from fminfer.runtime.job_engine import OnStep, OnWork
from fminfer.runtime.launch.processes import ProcessContext, Processes
from fminfer.runtime.launch.role import ChildOptions, Role
from fminfer.runtime.load.agreement import require_room_for_all
from fminfer.runtime.load.one_pipeline import OnePipeline
from fminfer.runtime.load.properties import PipelineProperties
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_process import TeamPipeline, start_pipeline
from fminfer.text.tokenizer import Tokenizer

log = logging.getLogger("fminfer")


class Computing(Protocol):
    """The processes that compute for an engine: one pipeline, or several."""

    @property
    def core(self) -> EngineCore:
        """The engine that answers requests."""

    @property
    def facts(self) -> PipelineProperties:
        """The facts of all pipelines together."""

    @property
    def memory(self) -> list[RankMemory]:
        """The peak of each rank so far, beside its forecast."""

    def follow(
        self, on_work: OnWork | None = None, on_step: OnStep | None = None
    ) -> None:
        """Call functions as work is computed: `on_step` only if one pipeline computes."""

    def close(self) -> None:
        """End the processes, and free their memory."""


Compute = Callable[[RunPlan, Tokenizer, OnProgress], Computing]


def spread_of(config: EngineConfig) -> Spread:
    """Return over how many processes a program's engine is spread."""
    return Spread(
        config.num_stages, config.data_group_size, config.tensor_parallel_size
    )


def start_computing(
    plan: RunPlan,
    tokenizer: Tokenizer,
    on_progress: OnProgress,
    run: ProcessContext | None = None,
) -> Computing:
    """Give the other processes on this machine their tasks, and load the model.

    Without a command's run, this is a program, and starts them here.
    """
    config = plan.config
    spread = spread_of(config) if run is None else run.role.spread
    options = ChildOptions() if run is None else run.child_options
    is_team = spread.num_pipelines > 1
    if is_team:
        require_room_for_all(plan)
    elif run is None and spread.num_ranks > 1:
        require_no_group()
        check_split(config, spread.num_stages)
    children = Processes.of(Role("starter", spread)) if run is None else run.children
    group = None

    def start_pipelines() -> list[TeamPipeline]:
        place = replace(spread, num_engines=len(children.all))
        return [
            start_pipeline(
                replace(place, engine_number=number), process, config, options
            )
            for number, process in enumerate(children.all)
        ]

    try:
        if is_team:
            return Team(plan, start_pipelines, log.warning if run is None else say)
        if children.all:
            facts = children.assign_ranks(config, spread, options)
            end = None if run is None else run.end
            group = Group(facts, spread, end=end, children=children)
        return OnePipeline(plan, tokenizer, on_progress, group=group)
    except BaseException:
        if run is None:
            if group is None:
                children.end()
            else:
                group.close(has_failed=True)
        raise

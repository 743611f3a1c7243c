"""The processes that compute for an engine: one pipeline, or several."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from fminfer.compute.step import StepTrace
from fminfer.core.config import EngineConfig
from fminfer.engine.engine_core import EngineCore, Facts
from fminfer.models.checkpoint import Checkpoint
from fminfer.runtime.build.agreement import require_room_for_all
from fminfer.runtime.build.one_pipeline import OnePipeline
from fminfer.runtime.launch.leading import start_own_ranks
from fminfer.runtime.launch.processes import Processes
from fminfer.runtime.launch.role import ChildOptions, Spread, pipeline_names
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_process import start_pipelines
from fminfer.text.tokenizer import Tokenizer

log = logging.getLogger("fminfer")


class Computing(Protocol):
    """The processes that compute for an engine: one pipeline, or several."""

    @property
    def core(self) -> EngineCore: ...

    @property
    def facts(self) -> Facts: ...

    @property
    def gpu_memory(self) -> dict[str, int]: ...

    def follow(
        self, on_work: Callable[[int, int], None], on_step: Callable[[StepTrace], None] | None
    ) -> None: ...

    def close(self) -> None: ...


Compute = Callable[[EngineConfig, Checkpoint, Tokenizer], Computing]


def start_computing(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    on_progress: Callable[[int, int], None],
) -> Computing:
    """Start the processes of which the options speak, and load the model.

    Args:
        on_progress: called with (bytes read, bytes in all) while weights load.
    """
    if config.data_group_size > 1:
        return _start_team(config, checkpoint)
    return _load_pipeline(config, checkpoint, tokenizer, on_progress)


def _load_pipeline(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    on_progress: Callable[[int, int], None],
) -> OnePipeline:
    """Load the model here, and in the processes of other ranks, which this starts."""
    group = start_own_ranks(config) if config.num_stages > 1 else None
    try:
        return OnePipeline(config, checkpoint, tokenizer, on_progress=on_progress, group=group)
    except BaseException:
        if group is not None:
            group.abandon()
        raise


def _start_team(config: EngineConfig, checkpoint: Checkpoint) -> Team:
    """Start several pipelines, in somebody's program."""
    spread = Spread(config.num_stages, config.data_group_size)
    require_room_for_all(config, checkpoint, spread)
    names = pipeline_names(spread.num_pipelines)
    members = Processes(names, num_ranks=spread.num_stages - 1, has_line=True)
    try:
        return Team(
            checkpoint,
            lambda: start_pipelines(members, config, spread, ChildOptions()),
            log.warning,
        )
    except BaseException:
        members.end()
        raise

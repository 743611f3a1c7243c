"""Processes of a run that do not speak to the user: ranks beside rank 0, and members of a team."""

from __future__ import annotations

from fminfer.core.config import EngineConfig
from fminfer.models.checkpoint import Checkpoint
from fminfer.pipeline.group import Group
from fminfer.pipeline.meeting import End
from fminfer.pipeline.ranks import RankFacts
from fminfer.plan.opening import open_model
from fminfer.runtime.build.one_pipeline import serve_rank
from fminfer.runtime.launch.leading import lead_ranks
from fminfer.runtime.launch.place import Place
from fminfer.runtime.launch.processes import Processes
from fminfer.runtime.launch.role import Spread, Task
from fminfer.runtime.team.team_member import serve_pipeline


def do_task(task: Task, ranks: Processes, end: End) -> None:
    """Do the task that the starting process has sent.

    Args:
        ranks: that this process has started for its own pipeline.
        end: ends this process at once.

    Raises:
        FminferError: it cannot go on.
    """
    role, config = task.role, task.config
    if role.facts is not None:
        be_a_stage(config, role.facts, role.spread, role.place, end)
        return
    assert role.place is not None, "a member has a way to the run"
    group = None
    if ranks.all:
        group = lead_ranks(config, ranks, role.spread, task.manners, end)
    serve_pipeline(config, group, role.place)


def be_a_stage(
    config: EngineConfig,
    facts: RankFacts,
    spread: Spread,
    place: Place | None,
    end: End,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Meet the other ranks of a pipeline, and compute one of its stages.

    Args:
        place: of rank 0 of one of several pipelines; None: this is another rank.
        checkpoint: the model, if it is opened already.

    Raises:
        FminferError: it cannot go on; the other ranks have been told.
    """
    opening = Opening(config, checkpoint)
    group = meet(facts, spread, opening, end)
    if place is None:
        serve_rank(group, config, opening.checkpoint)
        return
    with group.telling():
        serve_pipeline(config, group, place, opening.checkpoint)


def meet(facts: RankFacts, spread: Spread, prepare: Opening, end: End) -> Group:
    """Meet the other ranks of a pipeline, all of them started apart or by rank 0."""
    return Group(
        facts,
        join_timeout_s=spread.join_timeout_s,
        rank_timeout_s=spread.rank_timeout_s,
        prepare=prepare,
        end=end,
    )


class Opening:
    """Opens the model before a rank waits for others: mistakes in it are told at once."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None) -> None:
        self._config, self._checkpoint = config, checkpoint

    def __call__(self, rank: int) -> None:
        """Find the model; the weights of one at the hub may be fetched later."""
        self._checkpoint = self._checkpoint or open_model(self._config, has_weights=False)

    @property
    def checkpoint(self) -> Checkpoint:
        """The model, once the others are met."""
        assert self._checkpoint is not None, "no rank meets others before it has opened the model"
        return self._checkpoint

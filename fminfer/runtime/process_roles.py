"""What a process of the command does by its role: it leads an engine, or is a rank of one.

Ranks beside rank 0, and the members of a team, do not speak to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import transformers

from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, StoppedError
from fminfer.models.checkpoint import Checkpoint
from fminfer.pipeline.meeting import End
from fminfer.pipeline.ranks import RankFacts
from fminfer.plan.opening import open_model
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.bars import say
from fminfer.runtime.build.one_pipeline import OnePipeline, serve_rank
from fminfer.runtime.computing import Compute, meet, start_computing
from fminfer.runtime.launch.processes import ProcessContext, Processes
from fminfer.runtime.launch.role import RunLink, Spread, Task
from fminfer.runtime.team.team_apart import Apart
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_member import serve_pipeline

Context = TypeVar("Context", bound=ProcessContext)
Led = TypeVar("Led")
Lead = Callable[[Context, Checkpoint, Compute], Led]


def lead_or_join(process: Context, prepare: Opening, lead: Lead[Context, Led]) -> Led | None:
    """Lead the engine if this is its first process; otherwise be a rank of it, until it ends.

    Args:
        prepare: is called by ranks that are started apart, before they meet.
        lead: makes the engine, given what computes for it, and does the command's work with it.
            Another rank returns None.

    Raises:
        FminferError: the command cannot go on.
    """
    if not process.is_verbose:
        transformers.logging.set_verbosity_error()
    with process.stopper.listening():
        facts = process.role.facts
        if facts is None:
            with _naming_rank_0() if process.role.kind == "starter" else nullcontext():
                compute = partial(start_computing, run=process)
                return lead(process, open_model(process.config), compute)
        if process.role.spread.num_pipelines > 1:
            return _be_one_of_several(process, facts, prepare, lead)
        return _be_a_rank(process, facts, prepare, lead)


def _be_a_rank(
    process: Context, facts: RankFacts, prepare: Opening, lead: Lead[Context, Led]
) -> Led | None:
    """Be one of the ranks of a pipeline; rank 0 leads."""
    group = meet(facts, process.role.spread, prepare, process.end)
    if group.rank > 0:
        process.stopper.leave_to_rank_0()
        serve_rank(group, process.config, prepare.checkpoint)
        return None
    with group.telling():
        checkpoint = prepare.checkpoint.with_weights()
        return lead(process, checkpoint, partial(OnePipeline, group=group))


def _be_one_of_several(
    process: Context, facts: RankFacts, prepare: Opening, lead: Lead[Context, Led]
) -> Led | None:
    """Be one of the ranks of several pipelines; rank 0 leads all of them."""
    config = process.config
    apart = Apart(facts, process.role.spread, prepare=prepare, end=process.end)
    try:
        checkpoint = prepare.checkpoint.with_weights()
        plan = plan_ahead(config, checkpoint, apart.spread.num_stages)
        apart.agree(plan.fingerprint())
    except StoppedError:
        raise
    except Exception as error:
        apart.fail(error)
        raise
    if apart.rank == 0:

        def compute(_: EngineConfig, checkpoint: Checkpoint, *others: object) -> Team:
            start = partial(apart.start_pipelines, config, process.child_options)
            return Team(checkpoint, start, say)

        with apart.leading():
            return lead(process, checkpoint, compute)
    process.stopper.leave_to_rank_0()
    if not apart.await_start():
        return None
    stage, link = apart.take_stage()
    if stage is None:
        assert link is not None, "its pipeline has no other rank"
        serve_pipeline(config, None, link, apart.spread, checkpoint)
        return None
    try:
        be_a_stage(config, stage, apart.spread, link, process.end, checkpoint)
    except FminferError as error:
        error.args = (f"{apart.pipeline_name}: {error}",)
        raise
    return None


@contextmanager
def _naming_rank_0() -> Iterator[None]:
    """Add the rank's name to an error that is not the user's."""
    try:
        yield
    except (FminferError, OSError):
        raise
    except Exception as error:
        raise RuntimeError(f"rank 0 failed: {error}") from error


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
        be_a_stage(config, role.facts, role.spread, role.link, end)
        return
    assert role.link is not None, "a member has a way to the run"
    group = None
    if ranks.all:
        facts = ranks.become_ranks(config, role.spread, task.child_options)
        group = meet(facts, role.spread, end=end, children=ranks)
    try:
        serve_pipeline(config, group, role.link, role.spread)
    except FminferError as error:
        error.is_told = True  # by the run, whose stderr is this process's, too
        raise


def be_a_stage(
    config: EngineConfig,
    facts: RankFacts,
    spread: Spread,
    link: RunLink | None,
    end: End,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Meet the other ranks of a pipeline, and compute one of its stages.

    Args:
        link: of rank 0 of one of several pipelines; None: this is another rank.
        checkpoint: the model, if it is opened already.

    Raises:
        FminferError: it cannot go on; the other ranks have been told.
    """
    opening = Opening(config, checkpoint)
    group = meet(facts, spread, opening, end)
    if link is None:
        serve_rank(group, config, opening.checkpoint, spread)
        return
    with group.telling():
        serve_pipeline(config, group, link, spread, opening.checkpoint)


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

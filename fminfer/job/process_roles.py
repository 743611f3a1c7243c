"""What a process of the command does by its role: it leads an engine, or is a rank of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import transformers

from fminfer.core.errors import FminferError
from fminfer.job.progress import LoadingBar
from fminfer.job.run_context import ProcessContext
from fminfer.job.run_engine import MakeEngine, engine_of_several, own_engine
from fminfer.models.checkpoint import Checkpoint
from fminfer.pipeline.ranks import RankFacts
from fminfer.plan.opening import open_model
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.build.one_pipeline import serve_rank
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.part_process import Opening, be_a_stage, meet
from fminfer.runtime.team.team_apart import Apart
from fminfer.runtime.team.team_member import serve_pipeline

Context = TypeVar("Context", bound=ProcessContext)
Led = TypeVar("Led")
Lead = Callable[[Context, Checkpoint, MakeEngine], Led]


def lead_or_join(process: Context, prepare: Opening, lead: Lead[Context, Led]) -> Led | None:
    """Lead the engine if this is its first process; otherwise be a rank of it, until it ends.

    Args:
        prepare: is called by ranks that are started apart, before they meet.
        lead: makes the engine and does the command's work with it. Another rank returns None.

    Raises:
        FminferError: the command cannot go on.
    """
    if not process.is_verbose:
        transformers.logging.set_verbosity_error()
    with process.stopper.listening():
        facts = process.role.facts
        if facts is None:
            with _naming_rank_0() if process.role.kind == "starter" else nullcontext():
                return lead(process, open_model(process.config), own_engine(process))
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

    def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
        return Engine(process.config, on_progress=loading, group=group, checkpoint=checkpoint)

    with group.telling():
        return lead(process, prepare.checkpoint.with_weights(), make_engine)


def _be_one_of_several(
    process: Context, facts: RankFacts, prepare: Opening, lead: Lead[Context, Led]
) -> Led | None:
    """Be one of the ranks of several pipelines; rank 0 leads all of them."""
    spread = process.role.spread
    apart = Apart(facts, spread, prepare=prepare, end=process.end)
    checkpoint = prepare.checkpoint.with_weights()
    config = apart.part(
        process.config, plan_ahead(process.config, checkpoint, spread.num_stages).fingerprint()
    )
    if apart.rank == 0:

        def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
            return engine_of_several(
                config, checkpoint, lambda: apart.start_pipelines(config, process.manners)
            )

        with apart.leading():
            return lead(replace(process, config=config), checkpoint, make_engine)
    process.stopper.leave_to_rank_0()
    if not apart.await_start():
        return None
    stage, place = apart.take_stage()
    if stage is None:
        assert place is not None, "its pipeline has no other rank"
        serve_pipeline(config, None, place, checkpoint)
        return None
    try:
        be_a_stage(config, stage, spread, place, process.end, checkpoint)
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

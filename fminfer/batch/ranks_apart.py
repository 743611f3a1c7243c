"""A process of `fminfer run` that was started as one of several ranks."""

from __future__ import annotations

from dataclasses import replace

from fminfer.batch.answering import answer
from fminfer.batch.progress import LoadingBar
from fminfer.batch.run_context import RunContext
from fminfer.batch.run_engine import engine_of_several
from fminfer.batch.run_summary import JobSummary
from fminfer.core.errors import FminferError
from fminfer.files.output_paths import Plan
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.fingerprint import fingerprint_of
from fminfer.pipeline.ranks import RankFacts
from fminfer.worker.engine_api import Engine
from fminfer.worker.one_pipeline import serve_rank
from fminfer.worker.serving import Opening, be_a_stage, meet
from fminfer.worker.team_apart import Apart
from fminfer.worker.team_member import serve_pipeline


class _Preparing(Opening):
    """Finds mistakes before a rank waits for others: in the model, and on rank 0 in the job."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run.config)
        self._job, self._plan = run.job, run.plan

    def __call__(self, rank: int) -> None:
        if rank == 0:
            self._plan = self._plan or self._job.plan()
        super().__call__(rank)

    @property
    def plan(self) -> Plan:
        """Rank 0's inputs and outputs."""
        assert self._plan is not None, "rank 0 has a plan before it meets others"
        return self._plan


def be_a_rank(run: RunContext, facts: RankFacts) -> JobSummary | None:
    """Be one of the ranks of a pipeline; rank 0 answers the job."""
    prepare = _Preparing(run)
    group = meet(facts, run.role.spread, prepare, run.end)
    if group.rank > 0:
        run.stopper.leave_to_rank_0()
        serve_rank(group, run.config, prepare.checkpoint)
        return None

    def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
        return Engine(run.config, on_progress=loading, group=group, checkpoint=checkpoint)

    with group.telling():
        checkpoint = prepare.checkpoint.with_weights()
        return answer(run, prepare.plan, checkpoint, make_engine, is_awaited=True)


def be_one_of_several(run: RunContext, facts: RankFacts) -> JobSummary | None:
    """Be one of the ranks of several pipelines; rank 0 answers the job with all of them."""
    prepare = _Preparing(run)
    apart = Apart(facts, run.role.spread, prepare=prepare, end=run.end)
    checkpoint = prepare.checkpoint.with_weights()
    config = apart.part(run.config, fingerprint_of(run.config, checkpoint))
    if apart.rank == 0:
        run = replace(run, config=config)

        def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
            return engine_of_several(
                config, checkpoint, lambda: apart.start_pipelines(config, run.manners)
            )

        with apart.leading():
            return answer(run, prepare.plan, checkpoint, make_engine)
    run.stopper.leave_to_rank_0()
    if not apart.await_start():
        return None
    stage, place = apart.take_stage()
    if stage is None:
        assert place is not None, "its pipeline has no other rank"
        serve_pipeline(config, None, place, checkpoint)
        return None
    try:
        be_a_stage(config, stage, run.role.spread, place, run.end, checkpoint)
    except FminferError as error:
        error.args = (f"{apart.pipeline_name}: {error}",)
        raise
    return None

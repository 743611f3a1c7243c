"""One process of `fminfer run`, by its role: the run's own, or one of ranks started apart."""

from __future__ import annotations

from fminfer.files.output_paths import Plan
from fminfer.job.answering import answer
from fminfer.job.run_paths import RunContext, refuse_other_models
from fminfer.job.run_summary import JobSummary
from fminfer.models.checkpoint import Checkpoint
from fminfer.runtime.computing import Compute
from fminfer.runtime.process_roles import Opening, lead_or_join


def run_process(run: RunContext) -> JobSummary | None:
    """Answer the job, or do another rank's part of it; that one has no summary.

    Raises:
        FminferError: the run cannot go on.
    """
    prepare = _Preparing(run)

    def lead(run: RunContext, checkpoint: Checkpoint, compute: Compute) -> JobSummary:
        is_awaited = run.role.kind == "apart" and run.role.spread.num_pipelines == 1
        return answer(run, prepare.plan, checkpoint, compute, is_awaited=is_awaited)

    return lead_or_join(run, prepare, lead)


class _Preparing(Opening):
    """Finds mistakes before a rank waits for others: in the model, and on rank 0 in the job."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run.config)
        self._job, self._plan = run.job, run.plan

    def __call__(self, rank: int) -> None:
        if rank == 0:
            self._plan = self._plan or self._job.plan()
            refuse_other_models(self._config, self._plan.inputs)
        super().__call__(rank)

    @property
    def plan(self) -> Plan:
        """Rank 0's inputs and outputs."""
        assert self._plan is not None, "rank 0 has a plan before it meets others"
        return self._plan

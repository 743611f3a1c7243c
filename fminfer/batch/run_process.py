"""One process of `fminfer run`, by its role: the run's own, or one of ranks started apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import transformers

from fminfer.batch.answering import answer
from fminfer.batch.ranks_apart import be_a_rank, be_one_of_several
from fminfer.batch.run_context import RunContext
from fminfer.batch.run_engine import own_engine
from fminfer.batch.run_summary import JobSummary
from fminfer.core.errors import FminferError
from fminfer.worker.opening import open_model


def run_process(run: RunContext) -> JobSummary | None:
    """Answer the job, or do another rank's part of it; that one has no summary.

    Raises:
        FminferError: the run cannot go on.
    """
    if not run.job.is_verbose:
        transformers.logging.set_verbosity_error()
    with run.stopper.listening():
        facts = run.role.facts
        if facts is None:
            plan = run.plan or run.job.plan()
            with _naming_rank_0() if run.role.kind == "starter" else nullcontext():
                return answer(run, plan, open_model(run.config), own_engine(run))
        if run.role.spread.num_pipelines > 1:
            return be_one_of_several(run, facts)
        return be_a_rank(run, facts)


@contextmanager
def _naming_rank_0() -> Iterator[None]:
    """Add the rank's name to an error that is not the user's."""
    try:
        yield
    except (FminferError, OSError):
        raise
    except Exception as error:
        raise RuntimeError(f"rank 0 failed: {error}") from error

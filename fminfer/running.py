"""One process of a run: the only one, or one rank. The command line's way to the engine.

It knows ranks and paths, not exit statuses.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import transformers

from fminfer.cache import why_no_cache
from fminfer.config import EngineConfig
from fminfer.errors import FminferError, PipelineError, StoppedError, printable
from fminfer.fingerprint import KV_DTYPE, fingerprint_of
from fminfer.forecast import Layout, name_held_dtype, require_room_for_all
from fminfer.input.files import MOST_NAMED
from fminfer.input.lines import Line
from fminfer.job import run_job
from fminfer.loading import open_model
from fminfer.models.checkpoint import Checkpoint
from fminfer.one_pipeline import serve_rank
from fminfer.output.named_files import NamedFiles, open_files
from fminfer.output.places import Plan
from fminfer.output.progress import LoadingBar, write_beside_bar
from fminfer.output.run_inputs import RunInputs
from fminfer.output.shared_files import share_files
from fminfer.output.summary import JobSummary
from fminfer.paths import JobPaths
from fminfer.pipeline.group import Group
from fminfer.pipeline.meeting import status_of
from fminfer.pipeline.watch import Fault
from fminfer.processor import chosen_name
from fminfer.ranks import RankConfig, RankFacts
from fminfer.stopping import AGAIN, Stopper
from fminfer.team.apart import Apart
from fminfer.team.member import serve_pipeline
from fminfer.team.place import Place
from fminfer.team.process import Pipeline, start_pipelines
from fminfer.team.team import Team
from fminfer.wording import counted
from fminfer.worker import Engine

MakeEngine = Callable[[Checkpoint, LoadingBar], Engine]


def run_process(
    job: JobPaths,
    plan: Plan | None,
    config: EngineConfig,
    ranks: RankConfig,
    facts: RankFacts | None,
    stopper: Stopper,
    elapsed_s: Callable[[], float],
    place: Place | None,
    arguments: list[str],
) -> JobSummary | None:
    """Answer the job's files, or do another rank's part of it; that one has no summary.

    Args:
        plan: inputs and outputs; None: if this is rank 0 it finds them itself, and all ranks hear
            of what is wrong with them.
        facts: this process's place among ranks; None: it is alone.
        place: this pipeline's place among several; None: there is one, or this process has them.
        arguments: of the command, for the pipelines that it may start.
        stopper: hears that the run is to stop.
        elapsed_s: seconds since the command started.

    Raises:
        FminferError: the run cannot go on.
    """
    if not job.is_verbose:
        transformers.logging.set_verbosity_error()
    if place is not None and facts is None:
        stopper.leave_to_rank_0()
        serve_pipeline(config, None, place)
        return None
    with stopper.listening():
        if facts is not None and place is None and ranks.data_group_size > 1:
            return _be_one_of_several(
                job, plan, config, ranks, facts, stopper, elapsed_s, arguments
            )
        if facts is not None:
            return _be_a_rank(job, plan, config, ranks, facts, stopper, elapsed_s, place)

        num_pipelines = ranks.data_group_size

        def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
            if num_pipelines == 1:
                return Engine(config, on_progress=loading)
            require_room_for_all(config, checkpoint, Layout(ranks.size or 1, num_pipelines))
            return _of_several(config, lambda: start_pipelines(num_pipelines, arguments))

        return _answer(job, plan or job.plan(), config, None, stopper, elapsed_s, make_engine)


def _be_a_rank(
    job: JobPaths,
    plan: Plan | None,
    config: EngineConfig,
    ranks: RankConfig,
    facts: RankFacts,
    stopper: Stopper,
    elapsed_s: Callable[[], float],
    place: Place | None,
) -> JobSummary | None:
    def prepare(rank: int) -> None:
        """Find mistakes that need no other rank before waiting for it."""
        nonlocal plan
        if rank == 0 and place is None:
            plan = plan or job.plan()
        open_model(config, has_weights=False)

    group = Group(
        facts,
        join_timeout_s=ranks.join_timeout_s,
        rank_timeout_s=ranks.rank_timeout_s,
        prepare=prepare,
    )
    if group.rank > 0:
        stopper.leave_to_rank_0()
        serve_rank(group, config)
        return None

    def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
        return Engine(config, on_progress=loading, group=group)

    try:
        if place is not None:
            stopper.leave_to_rank_0()  # the run's own process
            serve_pipeline(config, group, place)
            return None
        return _answer(job, plan or job.plan(), config, group, stopper, elapsed_s, make_engine)
    except (PipelineError, StoppedError):
        raise
    except BrokenPipeError:
        group.watch.warn(Fault("whoever read the answers stopped reading"))
        raise
    except FminferError as error:
        group.watch.warn(Fault(str(error), status_of(error)))
        raise
    except Exception as error:
        text = f"rank 0 failed: {error}"
        group.watch.warn(Fault(text))
        raise RuntimeError(text) from error
    finally:
        group.forget()


def _be_one_of_several(
    job: JobPaths,
    plan: Plan | None,
    config: EngineConfig,
    ranks: RankConfig,
    facts: RankFacts,
    stopper: Stopper,
    elapsed_s: Callable[[], float],
    arguments: list[str],
) -> JobSummary | None:
    """Be one of the ranks of several pipelines, which were started apart."""

    def prepare(rank: int) -> None:
        nonlocal plan
        if rank == 0:
            plan = plan or job.plan()
        open_model(config, has_weights=False)

    apart = Apart(
        facts,
        ranks.data_group_size,
        join_timeout_s=ranks.join_timeout_s,
        rank_timeout_s=ranks.rank_timeout_s,
        prepare=prepare,
    )
    config = apart.part(config, fingerprint_of(config, open_model(config)))

    def make_engine(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
        return _of_several(config, lambda: apart.start_pipelines(config, arguments))

    if apart.rank == 0:
        with apart.leading():
            return _answer(job, plan or job.plan(), config, None, stopper, elapsed_s, make_engine)
    stopper.leave_to_rank_0()
    if not apart.await_start():
        return None
    stage, place = apart.take_stage(config)
    if stage is not None:
        try:
            return _be_a_rank(job, None, config, ranks, stage, stopper, elapsed_s, place)
        except FminferError as error:
            error.args = (f"{apart.pipeline_name}: {error}",)
            raise
    assert place is not None  # its pipeline has no other rank
    serve_pipeline(config, None, place)
    return None


def _answer(
    job: JobPaths,
    plan: Plan,
    config: EngineConfig,
    group: Group | None,
    stopper: Stopper,
    elapsed_s: Callable[[], float],
    make_engine: MakeEngine,
) -> JobSummary:
    """Answer the job's files, or the requests that it makes up, or its one prompt."""
    if job.prompt is not None:
        return _answer_prompt(job, job.prompt, config, make_engine)
    checkpoint = open_model(config)
    synthetic = job.synthetic
    if synthetic is None:
        summary = _answer_files(
            job, plan, config, checkpoint, group, stopper, elapsed_s, make_engine
        )
    else:
        with tempfile.TemporaryDirectory(prefix="fminfer-") as folder:
            path = Path(folder) / "made_up.jsonl"
            synthetic.write(
                path,
                vocab_size=checkpoint.config.vocab_size,
                context_length=checkpoint.context_length,
                max_logprobs=config.max_logprobs,
                seed=config.seed,
            )
            job = job.with_input(path)
            summary = _answer_files(
                job, job.plan(), config, checkpoint, group, stopper, elapsed_s, make_engine
            )
        summary.made_up = synthetic.describe(summary.wall_s)
    if job.stats is not None:
        job.stats.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    if not job.is_quiet:
        click.echo(summary.to_text(), err=True)
    return summary


def _answer_files(
    job: JobPaths,
    plan: Plan,
    config: EngineConfig,
    checkpoint: Checkpoint,
    group: Group | None,
    stopper: Stopper,
    elapsed_s: Callable[[], float],
    make_engine: MakeEngine,
) -> JobSummary:
    inputs, outputs = plan.inputs, plan.outputs
    if not job.is_quiet:
        _tell_left_out(job, plan)
    fingerprint = fingerprint_of(config, checkpoint)
    files: RunInputs
    if job.is_shared:
        files = shared = share_files(
            job.plan if job.is_watching else lambda: plan,
            fingerprint,
            model=checkpoint.name,
            restart=job.restart,
            is_watching=job.is_watching,
            limit=job.limit,
        )
        is_done = not shared.look()
    else:
        files = open_files(
            *(inputs, outputs, fingerprint),
            model=checkpoint.name,
            restart=job.restart,
            limit=job.limit,
        )
        is_done = files.is_finished
    summary = JobSummary(checkpoint.name, fingerprint["the dtype"], inputs, outputs)
    summary.kv_dtype, summary.limit = fingerprint.get(KV_DTYPE, summary.dtype), job.limit
    summary.weight_dtype = name_held_dtype(config, checkpoint)
    if group is None and is_done:
        summary = run_job(None, files, summary, is_quiet=job.is_quiet)
    else:
        with _telling_how_to_go_on(job, files, stopper):
            if not job.is_quiet:
                click.echo(f"Loading {checkpoint.name} ({summary.types}) …", err=True)
            engine = _start_engine(job, files, config, lambda bar: make_engine(checkpoint, bar))
            summary.device, summary.start_to_ready_s = str(engine.device), elapsed_s()
            summary.weight_dtype = name_held_dtype(config, checkpoint)  # now the build has ended
            summary.why_slower, summary.num_threads = (
                engine.facts.why_slower,
                engine.facts.num_threads,
            )
            summary.cpu_limit = chosen_name()
            if not job.is_quiet:
                click.echo(_ready_text(summary, files), err=True)
            try:
                summary = run_job(
                    engine, files, summary, stopper=stopper, is_quiet=job.is_quiet, trace=job.trace
                )
                summary.gpu_memory = engine.gpu_memory
            finally:
                engine.close()
    job.remote.upload(outputs)
    if not job.keeps_output:
        summary.outputs = []
    return summary


def _answer_prompt(
    job: JobPaths, request: dict[str, Any], config: EngineConfig, make_engine: MakeEngine
) -> JobSummary:
    """Print the answer to one request."""
    checkpoint, no_files = open_model(config), NamedFiles([], 0)
    engine = _start_engine(job, no_files, config, lambda bar: make_engine(checkpoint, bar))
    try:
        (record,) = engine.run(iter([Line(0, 1, json.dumps(request).encode())]))
    finally:
        engine.close()
    if record.error is not None:
        raise FminferError(f"{record.error.message} ({record.error.code})")
    assert record.result is not None, "a record has a result or an error"
    for choice in record.result["choices"]:
        click.echo(choice["text"])
    return JobSummary(checkpoint.name, str(engine.device), [], [])


def _ready_text(summary: JobSummary, files: RunInputs) -> str:
    num_rows = "rows" if files.num_rows is None else counted(files.num_rows, "row")
    return f"Ready after {summary.start_to_ready_s:.1f} s; answering {num_rows}."


def _tell_left_out(job: JobPaths, plan: Plan) -> None:
    refused = [*plan.refused.values()]
    for reason in [*refused[:MOST_NAMED], *job.describe_left_out()]:
        click.echo(f"Left out: {reason}.", err=True)
    if len(refused) > MOST_NAMED:
        num_more = len(refused) - MOST_NAMED
        click.echo(f"Left out: {num_more:,} more, which the summary names.", err=True)


@contextmanager
def _telling_how_to_go_on(job: JobPaths, files: RunInputs, stopper: Stopper) -> Iterator[None]:
    try:
        yield
    except (StoppedError, PipelineError, KeyboardInterrupt) as caught:
        error: BaseException = caught
        if isinstance(caught, KeyboardInterrupt):  # told twice
            if stopper.reason is None:
                raise
            error = stopper.reason
        num_saved = files.num_saved_rows
        if num_saved is not None and job.keeps_output:
            text = str(error).rstrip(".")
            error.args = (f"{text}. Rows that are finished and kept: {num_saved:,}. {AGAIN}",)
        if error is caught:
            raise
        raise error from None


def _of_several(config: EngineConfig, start: Callable[[], list[Pipeline]]) -> Engine:
    """Return an engine for which several pipelines compute."""
    return Engine(config, compute=lambda config, model, tokenizer: Team(model, start, _say))


def _start_engine(
    job: JobPaths,
    files: RunInputs,
    config: EngineConfig,
    make_engine: Callable[[LoadingBar], Engine],
) -> Engine:
    if config.model is None and config.random_init is None and not job.is_quiet:
        click.echo(
            "Using the demo model, which knows only the way between rooms; "
            "--model-name gives another.",
            err=True,
        )
    loading = LoadingBar(is_quiet=job.is_quiet)
    try:
        engine = make_engine(loading)
    except BaseException as error:
        files.abandon(error)
        raise
    finally:
        loading.close()
    if not job.is_quiet:
        engine.tell_warnings(_say)
    if config.cuda_ids and engine.device.type == "cpu" and not job.is_quiet:
        click.echo("There is no GPU here: --cuda-id means nothing, the CPU computes.", err=True)
    if not job.is_quiet and (why := why_no_cache()):
        click.echo(f"Nothing is kept from run to run, which makes each slower: {why}.", err=True)
    if why := engine.facts.why_plain if job.is_quiet else engine.facts.why_slower:
        click.echo(f"The run is slower than it could be: {why}.", err=True)
    return engine


def _say(text: str) -> None:
    write_beside_bar(printable(text).encode())

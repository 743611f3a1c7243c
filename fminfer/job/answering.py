"""The run's own process: it opens the files, makes the engine, answers, and sums up."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fminfer.answers.answer_index import open_answers
from fminfer.answers.run_terms import CountLines, RunTerms
from fminfer.contract.record import Choice
from fminfer.core.errors import (
    FminferError,
    OutputError,
    PipelineError,
    StoppedError,
    UsageError,
)
from fminfer.core.quantities import counted
from fminfer.files.input_folders import MOST_NAMED, describe_empty
from fminfer.files.journal_rows import Fingerprint
from fminfer.files.output_paths import STDOUT, Plan
from fminfer.files.run_facts import RunFacts
from fminfer.files.status_file import refuse_other_vectors
from fminfer.job.file_job import run_job
from fminfer.job.named_files import open_files
from fminfer.job.report_at_end import name_settings, reporting, write_at_end
from fminfer.job.run_inputs import RunInputs
from fminfer.job.run_paths import JobPaths, RunContext, refuse_other_models
from fminfer.job.run_summary import JobSummary
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine.processor import chosen_name
from fminfer.machine.stopper import AGAIN, Stopper
from fminfer.models.checkpoint import Checkpoint
from fminfer.plan.planning import plan_ahead
from fminfer.plan.run_plan import name_of
from fminfer.runtime.bars import say
from fminfer.runtime.build.assembly import find_vectors, line_counting
from fminfer.runtime.computing import Compute
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.line_intake import FILLS
from fminfer.runtime.process_roles import Opening, lead_or_join, start_engine


def run_process(run: RunContext) -> JobSummary | None:
    """Answer the job, or do another rank's part of it; that one has no summary.

    Raises:
        FminferError: the run cannot go on.
    """
    prepare = _Preparing(run)

    def lead(checkpoint: Checkpoint, compute: Compute) -> JobSummary:
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
            refuse_other_models(self.config, self._plan.inputs)
        super().__call__(rank)

    @property
    def plan(self) -> Plan:
        """Rank 0's inputs and outputs."""
        assert self._plan is not None, "rank 0 has a plan before it meets others"
        return self._plan


CHAT_TOKENS = 1024  # of the answer to --prompt, if it does not say


def answer(
    run: RunContext,
    plan: Plan,
    checkpoint: Checkpoint,
    compute: Compute,
    *,
    is_awaited: bool = False,
) -> JobSummary:
    """Answer the job's files, or the requests that it makes up, or its one prompt.

    Args:
        compute: starts what computes, once there is something to answer.
        is_awaited: other ranks wait for the engine, also if everything is answered already.

    Raises:
        FminferError: the run cannot go on; finished rows are kept.
    """
    job, synthetic = run.job, run.job.synthetic
    if job.prompt is not None:
        return _answer_prompt(run, job.prompt, checkpoint, compute)
    if synthetic is None:
        summary = _answer_files(run, plan, checkpoint, compute, is_awaited=is_awaited)
    else:
        if find_vectors(checkpoint) is not None:
            raise UsageError(
                f"made-up requests draw tokens, and {checkpoint.name} gives vectors; give a file, "
                "or time it by fminfer bench"
            )
        with tempfile.TemporaryDirectory(prefix="fminfer-") as folder:
            path = Path(folder) / "made_up.jsonl"
            synthetic.write(
                path,
                vocab_size=checkpoint.config.vocab_size,
                context_length=checkpoint.context_length,
                max_logprobs=run.config.max_logprobs,
                seed=run.config.seed,
            )
            run = replace(run, job=job.with_input(path))
            plan = run.job.plan()
            summary = _answer_files(run, plan, checkpoint, compute, is_awaited=is_awaited)
        summary.made_up = synthetic.describe(summary.wall_s)
    if job.stats is not None:
        job.stats.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    if not job.is_quiet:
        click.echo(summary.to_text(), err=True)
    if summary.report_trouble:
        raise OutputError(summary.report_trouble)
    return summary


def _answer_prompt(
    run: RunContext, prompt: str, checkpoint: Checkpoint, compute: Compute
) -> JobSummary:
    """Print the answer to one prompt; say how it was asked, and what is odd about the answer."""
    if find_vectors(checkpoint) is not None:
        raise UsageError(
            f"--prompt prints a text, and {checkpoint.name} gives vectors; put the text into a "
            'line, as in: echo \'{"input": "a text"}\' | fminfer run -'
        )
    tell = _say_nothing if run.is_quiet else say
    with closing(start_engine(run, checkpoint, compute)) as engine:
        request = _make_request(run, prompt, engine)
        engine.intake.on_warning = lambda text: None if FILLS.kind in text else tell(text)
        tell(_describe_asking(request, engine, is_raw=run.job.is_raw))
        foreseen = plan_ahead(run.config, checkpoint, run.role.spread.num_stages)
        with _keeping_answers(run, engine, foreseen.fingerprint()):
            (record,) = engine.run([request])
    if record.error is not None:
        raise FminferError(f"{record.error.message} ({record.error.code})")
    for number, choice in enumerate(record.choices, start=1):
        click.echo(choice.text)
        which = "The answer" if len(record.choices) == 1 else f"Answer {number}"
        for oddity in _find_oddities(choice, request, engine):
            tell(f"{which} {oddity}.")
    return JobSummary(checkpoint.name, str(engine.device), [], [])


def _make_request(run: RunContext, prompt: str, engine: Engine) -> dict[str, Any]:
    """Return the request of `--prompt`."""
    most = min(CHAT_TOKENS, engine.context_length // 2)
    request = engine.make_request(prompt, is_raw=run.job.is_raw, **run.job.prompt_fields)
    if "messages" in request and len(prompt) < most:  # small models may go on and on
        request = {"max_tokens": most} | request
    return request


def _describe_asking(request: dict[str, Any], engine: Engine, *, is_raw: bool) -> str:
    """Say whether a prompt is asked as a chat or completed, and how to get the other."""
    is_greedy = request.get("temperature") == 0
    if "messages" in request:
        text = "Asking it as a chat, by the model's template; --raw completes it as plain text."
        return text + " The likeliest tokens are taken (--temperature)." * is_greedy
    why = "--raw" if is_raw else "this model has no chat template"
    if engine.intake.has_chat_template and not is_raw:
        why = "--echo-prompt and --best-of are not of chats"
    most = counted(request["max_tokens"], "token")
    return f"Completing it as plain text ({why}), by at most {most} (--generate-seq-length)."


def _find_oddities(choice: Choice, request: dict[str, Any], engine: Engine) -> Iterator[str]:
    """Say whether an answer has no words, or was cut, and why."""
    stop, is_cut = choice.fields.get("stop_reason"), choice.fields["finish_reason"] == "length"
    if not choice.text.strip():
        ended = "" if is_cut else "; the model ended it by itself"
        yield "has no words" + (f"; --stop {stop!r} ended it" if isinstance(stop, str) else ended)
    if is_cut and "max_tokens" in request:
        most = counted(request["max_tokens"], "token")
        yield f"was cut at its limit of {most}; --generate-seq-length N sets another"
    elif is_cut:
        context, kv_tokens = engine.context_length, engine.stats.num_kv_tokens
        yield f"was cut: the context ({context:,} tokens) or KV cache ({kv_tokens:,}) was full"


def _answer_files(
    run: RunContext,
    plan: Plan,
    checkpoint: Checkpoint,
    compute: Compute,
    *,
    is_awaited: bool,
) -> JobSummary:
    job = run.job
    _tell_left_out(job, plan)
    foreseen = plan_ahead(run.config, checkpoint, run.role.spread.num_stages)
    fingerprint = foreseen.fingerprint()
    facts = RunFacts(settings=name_settings(run.config))
    has_npy = run.config.embeddings == "npy"
    if has_npy:
        _check_npy(plan, checkpoint)
    # A file of vectors does not tell which line an answer is of, once lines have moved.
    counting = None if has_npy else line_counting(run.config, checkpoint)
    files, is_done = _open(job, plan, fingerprint, checkpoint.name, counting, facts)
    summary = JobSummary(checkpoint.name, name_of(foreseen.dtype), plan.inputs, plan.outputs)
    summary.kv_dtype, summary.weight_dtype = name_of(foreseen.kv_dtype), foreseen.held_in
    summary.limit, summary.has_npy = job.limit, has_npy
    if is_done and not is_awaited:
        summary = run_job(None, files, summary, is_quiet=job.is_quiet)
    else:
        with _telling_how_to_go_on(job, files, run.stopper), reporting(job, plan):
            summary = _answer_rows(run, files, summary, checkpoint, compute, fingerprint, facts)
    job.remote.upload(plan.outputs)
    write_at_end(job, plan, summary)
    if not job.keeps_output:
        summary.outputs = []
    return summary


def _check_npy(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse a run that has no vectors to write, or no place for them.

    Raises:
        UsageError: says which.
    """
    facts = find_vectors(checkpoint)
    if facts is None or facts.is_scored:
        does = "generates text" if facts is None else "scores texts"
        raise UsageError(
            f"--embeddings npy is of models that give embeddings, and {checkpoint.name} {does}; "
            "leave it out"
        )
    if STDOUT in plan.outputs:
        raise UsageError("--embeddings npy writes a file beside the output; give --output FILE")
    for output in plan.outputs:
        refuse_other_vectors(output)


def _open(
    job: JobPaths,
    plan: Plan,
    fingerprint: Fingerprint,
    model: str,
    count_lines: CountLines | None,
    facts: RunFacts,
) -> tuple[RunInputs, bool]:
    """Open the inputs and their journals; return whether nothing is left to answer."""
    terms = RunTerms(
        *(model, fingerprint, job.restart, job.limit),
        count_lines=count_lines,
        facts=facts,
        tell=_say_nothing if job.is_quiet else say,
    )
    if job.is_shared:
        find = job.plan if job.is_watching else lambda: plan
        shared = SharedFiles(find, terms, is_watching=job.is_watching)
        return shared, not shared.look()
    named = open_files(plan.inputs, plan.outputs, terms)
    return named, named.is_finished


def _answer_rows(
    run: RunContext,
    files: RunInputs,
    summary: JobSummary,
    checkpoint: Checkpoint,
    compute: Compute,
    fingerprint: Fingerprint,
    facts: RunFacts,
) -> JobSummary:
    """Make the engine, and let it answer the lines that are left."""
    job = run.job
    if not job.is_quiet:
        click.echo(f"Loading {checkpoint.name} ({summary.types}) …", err=True)
    try:
        engine = start_engine(run, checkpoint, compute)
    except BaseException as error:
        files.abandon(error)
        raise
    summary.device, summary.start_to_ready_s = str(engine.device), run.elapsed_s()
    summary.weight_dtype = engine.facts.weight_dtype  # the kernels' build may have failed
    summary.why_slower, summary.num_threads = engine.facts.why_slower, engine.facts.num_threads
    summary.cpu_limit, summary.num_ranks = chosen_name(), engine.facts.num_ranks
    facts.place = {
        "device": summary.device,
        "num_threads": summary.num_threads,
        "ready_s": round(summary.start_to_ready_s, 3),
    }
    if not job.is_quiet:
        num_rows = "rows" if files.num_rows is None else counted(files.num_rows, "row")
        click.echo(f"Ready after {summary.start_to_ready_s:.1f} s; answering {num_rows}.", err=True)
    try:
        with _keeping_answers(run, engine, fingerprint, summary):
            summary = run_job(
                *(engine, files, summary),
                stopper=run.stopper,
                is_quiet=job.is_quiet,
                trace=job.trace,
                run_facts=facts,
            )
    finally:
        engine.close()
    summary.ranks = engine.memory  # with the last reports of all
    return summary


@contextmanager
def _keeping_answers(
    run: RunContext, engine: Engine, fingerprint: Fingerprint, summary: JobSummary | None = None
) -> Iterator[None]:
    """Let the engine take answers of other runs, and keep its own, if the user wants that."""
    place, tell = run.job.result_cache, _say_nothing if run.is_quiet else say
    cache = open_answers(fingerprint, place, tell)
    engine.runs.cache = cache
    try:
        yield
    finally:
        if cache is not None and place is not None:
            cache.close()
            if summary is not None:
                summary.result_cache = str(place.folder)
                summary.cache_trouble = cache.trouble


def _say_nothing(text: str) -> None:
    """Take the place of `say` in a quiet run."""


def _tell_left_out(job: JobPaths, plan: Plan) -> None:
    """Say which inputs are not answered; those that are in error also if it is to be quiet."""
    refused = [*plan.refused.values()]
    others = [] if job.is_quiet else job.describe_left_out()
    for reason in [*refused[:MOST_NAMED], *others]:
        click.echo(f"Left out: {reason}.", err=True)
    for text in [] if job.is_quiet else describe_empty(plan.inputs):
        click.echo(f"Warning: {text}.", err=True)
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

"""The run's own process: it opens the files, makes the engine, answers, and sums up."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fminfer.answers.answer_index import open_answer_index
from fminfer.contract.record import Choice
from fminfer.core.errors import (
    FminferError,
    OutputError,
    PipelineError,
    StoppedError,
    UsageError,
)
from fminfer.core.quantities import with_noun
from fminfer.core.terminal import find_width, wrap_lines
from fminfer.files.input_folders import MOST_NAMED, describe_empty_files
from fminfer.files.line_reader import is_input_name
from fminfer.files.output_paths import STDOUT, OutputPaths
from fminfer.files.own_files import SUMMARY, replace_own_file
from fminfer.files.run_facts import CurrentRun
from fminfer.files.status_file import check_vectors_owned
from fminfer.job.file_job import run_job
from fminfer.job.report.report_file import write_report
from fminfer.job.report.reported_outputs import has_readable_rows, read_output
from fminfer.job.run_inputs import RunInputs, open_files
from fminfer.job.run_paths import JobPaths, RunContext, check_no_other_model
from fminfer.job.run_summary import JobSummary
from fminfer.job.run_terms import make_run_terms
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine.processor import read_chosen_name
from fminfer.machine.stopper import AGAIN, Stopper
from fminfer.plan.run_plan import RunPlan, name_of
from fminfer.runtime.bars import say
from fminfer.runtime.computing import Compute
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.line_intake import FILLS
from fminfer.runtime.load.agreement import Opening
from fminfer.runtime.load.assembly import (
    find_vectors,
)
from fminfer.runtime.process_roles import lead_or_join, start_engine


def run_process(run: RunContext) -> JobSummary | None:
    """Answer the job, or do another rank's part of it; that one has no summary."""
    output_paths = run.output_paths

    def find_files() -> None:
        nonlocal output_paths
        output_paths = output_paths or run.job.find_output_paths()
        check_no_other_model(
            run.config, output_paths.inputs, has_rows=run.job.table.has_template
        )

    def lead(run_plan: RunPlan, compute: Compute) -> JobSummary:
        assert output_paths is not None, "rank 0 has its paths before it meets others"
        return _answer_job(_Job(run, output_paths, run_plan, compute))

    opening = Opening(run.config, run.role.spread, prepare=find_files)
    return lead_or_join(run, opening, lead)


MAX_CHAT_TOKENS = 1024  # of the answer to --prompt, if it does not say


class _Job:
    """A run, its files, and the model that answers them."""

    def __init__(
        self,
        run: RunContext,
        output_paths: OutputPaths,
        run_plan: RunPlan,
        compute: Compute,
    ) -> None:
        self.run = run
        self.output_paths = output_paths
        self.run_plan = run_plan
        self.checkpoint = run_plan.checkpoint
        self._compute = compute
        self.fingerprint = run_plan.fingerprint()
        self.facts = find_vectors(self.checkpoint)  # of a model that gives vectors
        self.print_line: Callable[[str], None] = (
            (lambda text: None) if run.is_quiet else say
        )

    @property
    def is_awaited(self) -> bool:
        """Tell whether other ranks wait for the engine, also if all is answered already."""
        return self.run.role.kind == "apart" and self.run.role.spread.num_pipelines == 1

    def start_engine(self) -> Engine:
        return start_engine(self.run, self.run_plan, self._compute)

    @contextmanager
    def using_kept_answers(self, engine: Engine, summary: JobSummary) -> Iterator[None]:
        """Let the engine use and add kept answers, if the user wants that."""
        place = self.run.job.result_cache
        engine.runs.cache = cache = open_answer_index(
            self.fingerprint, place, self.print_line
        )
        try:
            yield
        finally:
            if cache is not None and place is not None:
                cache.close()
                summary.result_cache = str(place.folder)
                summary.cache_trouble = cache.trouble


def _answer_job(job: _Job) -> JobSummary:
    """Answer the job's files, or the requests that it makes up, or its one prompt."""
    job_paths = job.run.job
    synthetic = job.run.job.synthetic
    if job_paths.prompt is not None:
        return _answer_prompt(job, job_paths.prompt)
    if synthetic is None:
        summary = _answer_files(job)
    else:
        if job.facts is not None:
            raise UsageError(
                f"made-up requests draw tokens, and {job.checkpoint.name} gives vectors; give a "
                "file, or time it by fminfer bench"
            )
        with tempfile.TemporaryDirectory(prefix="fminfer-") as folder:
            path = Path(folder) / "made_up.jsonl"
            synthetic.write_requests(
                path,
                vocab_size=job.checkpoint.config.vocab_size,
                context_length=job.checkpoint.context_length,
                max_logprobs=job.run.config.max_logprobs,
                seed=job.run.config.seed,
            )
            job.run = replace(job.run, job=job_paths.with_input(path))
            job.output_paths = job.run.job.find_output_paths()
            summary = _answer_files(job)
        summary.made_up = synthetic.describe(summary.wall_s)
    if (
        job_paths.is_quiet
    ):  # no summary names the files that were refused since the start
        for name in sorted(
            summary.refused.keys() - set(map(str, job.output_paths.refused))
        ):
            click.echo(f"Left out: {summary.refused[name]}.", err=True)
    else:
        click.echo(wrap_lines(summary.to_text(), find_width(sys.stderr)), err=True)
    if job_paths.stats is not None:
        text = json.dumps(summary.to_dict(), indent=2)
        replace_own_file(job_paths.stats, SUMMARY, "--stats", f"{text}\n".encode())
    if summary.report_trouble:
        raise OutputError(summary.report_trouble)
    return summary


def _answer_prompt(job: _Job, prompt: str) -> JobSummary:
    """Print the answer to one prompt, how it was asked, and what is odd about the answer."""
    if job.facts is not None:
        does = "scores texts or has classes" if job.facts.is_scored else "gives vectors"
        raise UsageError(
            f"--prompt prints a text, and {job.checkpoint.name} {does}; put the text "
            "into a line, "
            'as in: echo \'{"input": "a text"}\' | fminfer run - --model-name '
            f"{shlex.quote(str(job.run.config.model))}"
        )
    with closing(job.start_engine()) as engine:
        summary = JobSummary(job.checkpoint.name, str(engine.device), [], [])
        request = _make_request(job.run, prompt, engine)
        engine.intake.on_warning = lambda text: (
            None if FILLS.kind in text else job.print_line(text)
        )
        job.print_line(_describe_asking(request, engine, is_raw=job.run.job.is_raw))
        if is_input_name(prompt) and os.path.exists(prompt):
            job.print_line(
                f"The prompt is the text {prompt}. The file's lines: fminfer run {prompt}."
            )
        with job.using_kept_answers(engine, summary):
            (record,) = engine.run([request])
    if record.error is not None:
        raise FminferError(f"{record.error.message} ({record.error.code})")
    for number, choice in enumerate(record.choices, start=1):
        click.echo(choice.text)
        which = "The answer" if len(record.choices) == 1 else f"Answer {number}"
        for oddity in _find_oddities(choice, request, engine):
            job.print_line(f"{which} {oddity}.")
    return summary


def _make_request(run: RunContext, prompt: str, engine: Engine) -> dict[str, Any]:
    """Return the request of `--prompt`."""
    most = min(MAX_CHAT_TOKENS, engine.context_length // 2)
    request = engine.make_request(
        prompt, is_raw=run.job.is_raw, **run.job.prompt_fields
    )
    if "messages" in request and len(prompt) < most:  # small models may go on and on
        request = {"max_tokens": most} | request
    return request


def _describe_asking(request: dict[str, Any], engine: Engine, *, is_raw: bool) -> str:
    """Say whether a prompt is asked as a chat or completed, and how to get the other."""
    if "messages" in request:
        text = "Asking it as a chat, by the model's template; --raw completes it as plain text."
        if request.get("temperature") == 0:
            text += " The likeliest tokens are taken (--temperature)."
        return text
    why = "--raw" if is_raw else "this model has no chat template"
    if engine.intake.has_chat_template and not is_raw:
        why = "--echo-prompt and --best-of are not of chats"
    most = with_noun(request["max_tokens"], "token")
    return f"Completing it as plain text ({why}), by at most {most} (--generate-seq-length)."


def _find_oddities(
    choice: Choice, request: dict[str, Any], engine: Engine
) -> Iterator[str]:
    """Say whether an answer has no words, or was cut, and why."""
    stop = choice.fields.get("stop_reason")
    is_cut = choice.fields["finish_reason"] == "length"
    if not choice.text.strip():
        ended = "" if is_cut else "; the model ended it by itself"
        yield "has no words" + (
            f"; --stop {stop!r} ended it" if isinstance(stop, str) else ended
        )
    if is_cut and "max_tokens" in request:
        most = with_noun(request["max_tokens"], "token")
        yield f"was cut at its limit of {most}; --generate-seq-length N sets another"
    elif is_cut:
        yield (
            f"was cut: the context ({engine.context_length:,} tokens) or KV cache "
            f"({engine.stats.num_kv_tokens:,}) was full"
        )


def _answer_files(job: _Job) -> JobSummary:
    job_paths = job.run.job
    output_paths = job.output_paths
    config = job.run.config
    _print_left_out(job_paths, output_paths)
    has_npy = config.embeddings == "npy"
    if has_npy:
        _check_npy(job)
    terms = make_run_terms(
        job.run,
        output_paths,
        job.checkpoint,
        job.fingerprint,
        print_line=job.print_line,
        has_npy=has_npy,
    )
    files: RunInputs
    if job_paths.is_shared:
        find_paths = (
            job_paths.find_output_paths
            if job_paths.is_watching
            else lambda: output_paths
        )
        files = shared = SharedFiles(
            find_paths, terms, is_watching=job_paths.is_watching
        )
        is_left = shared.scan()
    else:
        files = open_files(output_paths.inputs, output_paths.outputs, terms)
        is_left = not files.is_finished
    summary = JobSummary(
        model=job.checkpoint.name,
        dtype=name_of(job.run_plan.dtype),
        inputs=output_paths.inputs,
        outputs=output_paths.outputs,
        kv_dtype=name_of(job.run_plan.kv_dtype),
        weight_dtype=job.run_plan.held_in,
        limit=job_paths.limit,
        has_npy=has_npy,
        table=output_paths.table,
    )
    if is_left or job.is_awaited:
        with (
            _adding_how_to_go_on(job_paths, files, job.run.stopper),
            writing_report_on_error(job_paths, output_paths),
        ):
            _answer_rows(job, files, summary, terms.current_run)
    else:
        run_job(None, files, summary, is_quiet=job_paths.is_quiet)
    job_paths.remote.upload_outputs(output_paths.outputs, output_paths.table)
    write_report_at_end(job_paths, output_paths, summary)
    if not job_paths.keeps_output:
        summary.outputs = []
    return summary


def _check_npy(job: _Job) -> None:
    """Raise a UsageError if a run has no vectors to write, or no place for them."""
    if job.facts is None or job.facts.is_scored:
        does = "generates text" if job.facts is None else "scores texts"
        raise UsageError(
            "--embeddings npy is of models that give embeddings, and "
            f"{job.checkpoint.name} {does}; leave it out"
        )
    if STDOUT in job.output_paths.outputs:
        raise UsageError(
            "--embeddings npy writes a file beside the output; give --output FILE"
        )
    for output in job.output_paths.outputs:
        check_vectors_owned(output)


def _answer_rows(
    job: _Job, files: RunInputs, summary: JobSummary, run_facts: CurrentRun
) -> None:
    """Make the engine, and let it answer the lines that are left."""
    run = job.run
    if not run.is_quiet:
        click.echo(f"Loading {job.checkpoint.name} ({summary.types}) …", err=True)
    try:
        engine = job.start_engine()
    except BaseException as error:
        files.abandon(error)
        raise
    facts = engine.facts
    summary.device = str(engine.device)
    summary.start_to_ready_s = run.elapsed_s()
    summary.weight_dtype = facts.weight_dtype  # the kernels' build may have failed
    summary.why_slower = facts.measured.why_slower
    summary.why_dependent = facts.measured.why_dependent
    summary.same_answers = not summary.why_dependent
    summary.num_threads = facts.measured.num_threads
    summary.cpu_limit = read_chosen_name()
    summary.num_ranks = facts.num_ranks
    run_facts.place = {
        "device": summary.device,
        "num_threads": summary.num_threads,
        "same_answers": summary.same_answers,
        "ready_s": round(summary.start_to_ready_s, 3),
    }
    if not run.is_quiet:
        num_rows = (
            "rows" if files.num_rows is None else with_noun(files.num_rows, "row")
        )
        click.echo(
            f"Ready after {summary.start_to_ready_s:.1f} s; answering {num_rows}.",
            err=True,
        )
    with closing(engine), job.using_kept_answers(engine, summary):
        run_job(
            engine,
            files,
            summary,
            stopper=run.stopper,
            is_quiet=run.is_quiet,
            trace=run.job.trace,
            current_run=run_facts,
        )
    summary.ranks = engine.memory  # with the last reports of all


def _print_left_out(job: JobPaths, output_paths: OutputPaths) -> None:
    """Print which inputs are not answered; those in error also if the run is quiet."""
    refused = [*output_paths.refused.values()]
    others = [] if job.is_quiet else job.describe_left_out()
    for reason in [*refused[:MOST_NAMED], *others]:
        click.echo(f"Left out: {reason}.", err=True)
    for text in [] if job.is_quiet else describe_empty_files(output_paths.inputs):
        click.echo(f"Warning: {text}.", err=True)
    if len(refused) > MOST_NAMED:
        click.echo(
            f"Left out: {len(refused) - MOST_NAMED:,} more, which the summary names.",
            err=True,
        )


@contextmanager
def _adding_how_to_go_on(
    job: JobPaths, files: RunInputs, stopper: Stopper
) -> Iterator[None]:
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
            error.args = (
                f"{text}. Rows that are finished and kept: {num_saved:,}. {AGAIN}",
            )
        if error is caught:
            raise
        raise error from None


# that a report may take when the run was told to stop; it is killed after 5 s
AFTER_STOP_S = 2.0


def write_report_at_end(
    job: JobPaths, output_paths: OutputPaths, summary: JobSummary
) -> None:
    """Write the report that the job asks for; where it cannot be, the summary says why."""
    if job.report is None:
        return
    try:
        if _write_if_readable(
            job, job.report, [*output_paths.outputs, *summary.outputs], math.inf
        ):
            summary.report = str(job.report)
    except OutputError as error:
        summary.report_trouble = str(error)
    except Exception as error:  # a fault of the report's is not one of the run
        summary.report_trouble = (
            f"the report {job.report} was not written ({error}). The answers are as they were; "
            "fminfer report OUTPUT tries again"
        )


@contextmanager
def writing_report_on_error(job: JobPaths, output_paths: OutputPaths) -> Iterator[None]:
    """Write the report of what there is, if the run is ended before its outputs are complete."""
    try:
        yield
    except FminferError:  # a second Ctrl-C is none: it ends the run at once
        if job.report is not None:
            try:
                end_s = time.monotonic() + AFTER_STOP_S
                if (
                    _write_if_readable(job, job.report, output_paths.outputs, end_s)
                    and not job.is_quiet
                ):
                    click.echo(f"report    {job.report}", err=True)
            except Exception as error:  # the run ends for another reason, which is told
                click.echo(
                    f"The report {job.report} was not written: {error}.", err=True
                )
        raise


def _write_if_readable(
    job: JobPaths, path: Path, outputs: list[Path], end_s: float
) -> bool:
    """Write the report of outputs with rows; tell whether there were any."""
    readable = [
        read_output(output)
        for output in dict.fromkeys(outputs)
        if has_readable_rows(output)
    ]
    if not readable:
        if not job.is_quiet:
            click.echo(
                f"The report {path} was not written: there are no answers yet.",
                err=True,
            )
        return False
    write_report(readable, path, truth=job.truth, end_s=end_s)
    return True

"""Answers the files of a run, whatever answers their lines, and sums up."""

from __future__ import annotations

import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click

from fminfer.answers.answer_index import open_answer_index
from fminfer.answers.carrying_over import RunTerms
from fminfer.core.errors import (
    FminferError,
    OutputError,
    PipelineError,
    ServerError,
    StoppedError,
)
from fminfer.core.quantities import with_noun
from fminfer.core.terminal import find_width, wrap_lines
from fminfer.files.input_folders import MOST_NAMED, describe_empty_files
from fminfer.files.journal_rows import Fingerprint
from fminfer.files.output_paths import OutputPaths
from fminfer.files.own_files import SUMMARY, replace_own_file
from fminfer.files.run_facts import CurrentRun
from fminfer.job.file_job import run_job
from fminfer.job.report.report_file import write_report
from fminfer.job.report.reported_outputs import has_readable_rows, read_output
from fminfer.job.run_inputs import RunInputs, open_files
from fminfer.job.run_paths import JobPaths, RunContext
from fminfer.job.run_summary import JobSummary
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine.stopper import AGAIN, Stopper
from fminfer.runtime.bars import say
from fminfer.runtime.job_engine import JobEngine


class AnsweringJob(ABC):
    """A run, its files, and what answers their lines."""

    # whether others wait for the engine, also if all is answered already
    is_awaited = False
    has_npy = False  # vectors go to files of their own

    def __init__(
        self, run: RunContext, output_paths: OutputPaths, fingerprint: Fingerprint
    ) -> None:
        self.run = run
        self.output_paths = output_paths
        self.fingerprint = fingerprint
        self.print_line: Callable[[str], None] = (
            (lambda text: None) if run.is_quiet else say
        )

    @abstractmethod
    def make_terms(self) -> RunTerms:
        """Return what holds for every input."""

    @abstractmethod
    def make_summary(self) -> JobSummary:
        """Return the summary of a run that has answered nothing yet."""

    @abstractmethod
    def start_engine(self, summary: JobSummary, current_run: CurrentRun) -> JobEngine:
        """Return what answers lines; tell of it in the summary and the status files."""

    @abstractmethod
    def add_to_summary(self, summary: JobSummary) -> None:
        """Add what the engine knows at the end to the summary."""

    @contextmanager
    def using_kept_answers(
        self, engine: JobEngine, summary: JobSummary
    ) -> Iterator[None]:
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


def answer_files(job: AnsweringJob) -> JobSummary:
    """Answer the job's files; write its report."""
    job_paths = job.run.job
    output_paths = job.output_paths
    _print_left_out(job_paths, output_paths)
    terms = job.make_terms()
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
    summary = job.make_summary()
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


def print_summary(job: AnsweringJob, summary: JobSummary) -> None:
    """Print the summary of a run, and write it where --stats says."""
    job_paths = job.run.job
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


def _answer_rows(
    job: AnsweringJob, files: RunInputs, summary: JobSummary, current_run: CurrentRun
) -> None:
    """Make the engine, and let it answer the lines that are left."""
    run = job.run
    try:
        engine = job.start_engine(summary, current_run)
    except BaseException as error:
        files.abandon(error)
        raise
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
            current_run=current_run,
        )
    job.add_to_summary(summary)


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
    except (
        StoppedError,
        PipelineError,
        ServerError,
        KeyboardInterrupt,
    ) as caught:
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

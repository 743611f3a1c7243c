"""The report that `fminfer run --report` writes when a run ends, whole or interrupted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, OutputError
from fminfer.core.option import options_of
from fminfer.files.output_paths import Plan
from fminfer.job.report.report_file import write_report
from fminfer.job.report.told_outputs import is_there, open_output
from fminfer.job.run_paths import JobPaths
from fminfer.job.run_summary import JobSummary

AFTER_STOP_S = 2.0  # that a report may take when the run was told to stop; it is killed after 5 s
UNTOLD = ("model", "request_args")
MAX_CHARS = 200  # of a setting


def name_settings(config: EngineConfig) -> dict[str, str]:
    """Return the engine's options that are not the defaults, for the status file."""
    return {
        each.told: str(getattr(config, name))[:MAX_CHARS]
        for name, each in options_of(EngineConfig).items()
        if name not in UNTOLD and getattr(config, name) != each.default
    }


def write_at_end(job: JobPaths, plan: Plan, summary: JobSummary) -> None:
    """Write the report that the job asks for; where it cannot be, the summary says why."""
    if job.report is None:
        return
    try:
        if _write(job.report, [*plan.outputs, *summary.outputs], job.is_quiet, math.inf):
            summary.report = str(job.report)
    except OutputError as error:
        summary.report_trouble = str(error)
    except Exception as error:  # a fault of the report's is not one of the run
        summary.report_trouble = (
            f"the report {job.report} was not written ({error}). The answers are as they were; "
            "fminfer report OUTPUT tries again"
        )


@contextmanager
def reporting(job: JobPaths, plan: Plan) -> Iterator[None]:
    """Write the report of what there is, if the run is ended before its outputs are complete."""
    try:
        yield
    except FminferError:  # a second Ctrl-C is none: it ends the run at once
        if job.report is not None:
            try:
                end_s = time.monotonic() + AFTER_STOP_S
                if _write(job.report, plan.outputs, job.is_quiet, end_s) and not job.is_quiet:
                    click.echo(f"report    {job.report}", err=True)
            except Exception as error:  # the run ends for another reason, which is told
                click.echo(f"The report {job.report} was not written: {error}.", err=True)
        raise


def _write(path: Path, outputs: list[Path], is_quiet: bool, end_s: float) -> bool:
    """Write the report; return whether there was something to write of."""
    found = [open_output(output) for output in dict.fromkeys(outputs) if is_there(output)]
    if not found:
        if not is_quiet:
            click.echo(f"The report {path} was not written: there are no answers yet.", err=True)
        return False
    write_report(found, path, end_s=end_s)
    return True

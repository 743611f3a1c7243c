"""`fminfer submit`: jobs of a cluster, each a `fminfer run`, for files that are not finished."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from fminfer.cli.config_file import ConfiguredCommand
from fminfer.cli.flags import GroupedCommand, make_flags
from fminfer.cli.old_command_lines import parse_old_job_name
from fminfer.cli.process import EXIT_STOPPED
from fminfer.cluster.resources import (
    SubmitOptions,
    check_shared_files,
    make_job_values,
    parse_flags,
)
from fminfer.cluster.slurm_and_lsf import SCHEDULERS, Scheduler
from fminfer.core.config import ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.option import pop_options
from fminfer.core.quantities import with_noun
from fminfer.files.input_folders import describe_left_out, find_inputs
from fminfer.files.output_paths import require_output_paths
from fminfer.files.tables.table_options import TableOptions
from fminfer.job.run_paths import check_no_other_model


@click.command(
    "fminfer run", cls=ConfiguredCommand, settings_of="run", params=make_flags("run")
)
@click.argument("paths", nargs=-1)
def accept_run_flags(**flags: Any) -> None:
    """Accept the flags of `fminfer run`, and do nothing."""


JOB_NAME = re.compile(r"\w[\w.@+=-]*")


@click.command(cls=GroupedCommand, params=make_flags("submit"))
@click.argument(
    "run_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS OF FMINFER RUN]"
)
def submit(run_flags: tuple[str, ...], **options: Any) -> None:
    """Submit jobs that answer files on a cluster.

    \b
    fminfer submit --scheduler slurm --infer-data shards/ --gpus 1 --time 4:00:00 \\
        -- --model-name /models/llama-7b
    fminfer submit --scheduler lsf --mode array --infer-data shards/ --queue gpu --dry-run
    fminfer submit --scheduler slurm --mode ranks --infer-data shards/ --gpus 16 --nodes 2 \\
        -- --model-name /models/opt-175b --output answers/

    It leaves out files whose answers are complete, and those that a job in the queue
    will answer. So the same command again submits the missing files. docs/clusters.md
    explains it step by step.
    """
    submit_options = pop_options(SubmitOptions, options)
    if submit_options.job_name is not None:
        submit_options = parse_old_job_name(submit_options, submit_options.job_name)
    if submit_options.scheduler is None:
        raise UsageError("submit needs --scheduler slurm or --scheduler lsf")
    if not submit_options.infer_data:
        files = [word for word in run_flags if os.path.exists(word)]
        raise UsageError(f"submit needs --infer-data {files[0] if files else 'FOLDER'}")
    _submit_jobs(SCHEDULERS[submit_options.scheduler], submit_options, run_flags)


def _submit_jobs(
    scheduler: Scheduler, submit_options: SubmitOptions, run_flags: tuple[str, ...]
) -> None:
    """Submit the jobs, or show them in a dry run; print what became of the files."""
    from fminfer.cluster.job_scripts import TEMPLATES, ScriptTemplate
    from fminfer.cluster.submission import POLL_S, DryRun, JobSpec, Submission

    flags = parse_flags(accept_run_flags, run_flags, submit_options.gpus)
    paths = tuple(Path(os.path.abspath(path)) for path in submit_options.infer_data)
    has_rows = flags["prompt_template"] is not None
    table = pop_options(TableOptions, {**flags})
    if has_rows:
        table.make_template("messages", {})
    outputs = _plan_outputs(paths, flags["output"], has_rows=has_rows)
    check_shared_files(submit_options.mode, flags, len(outputs))
    check_no_other_model(
        ModelOptions(flags["model"], flags["random_init"]), outputs, has_rows=has_rows
    )
    values, more_flags = make_job_values(scheduler, submit_options, flags)

    is_dry = submit_options.dry_run  # its commands are shown alone
    template = submit_options.template or TEMPLATES / scheduler.template
    first_output = next(iter(outputs.values()))
    submission = Submission(
        sender=DryRun(scheduler, _print_script) if is_dry else scheduler,
        spec=JobSpec(
            mode=submit_options.mode,
            name=_choose_job_name(submit_options.name, flags),
            job_dir=_choose_job_dir(submit_options.job_dir, first_output),
            paths=paths,
            template=ScriptTemplate(template),
            values=values,
            command=(*_find_program(), "run", *more_flags, *run_flags),
            max_running=submit_options.max_running,
        ),
        outputs=outputs,
        max_queued=submit_options.max_queued,
        print_note=(lambda text: None) if is_dry else _print_note,
        poll_s=0 if is_dry else POLL_S,
    )
    try:
        submission.run()
    except KeyboardInterrupt:
        sent = with_noun(len(submission.sent), "job")
        _print_note(f"Interrupted; submitted: {sent}. The same command goes on.")
        sys.exit(EXIT_STOPPED["interrupted"])

    sent = "sent"
    if is_dry:
        sent = "to send (a dry run sends none and does not ask the queue)"
    _print_note(f"{submission.summary} {sent}.")


def _plan_outputs(
    paths: tuple[Path, ...], output: Any, *, has_rows: bool
) -> dict[Path, Path]:
    """Return each input file with its output; print what is left out."""
    inputs = find_inputs(list(paths), has_rows=has_rows)
    folders = [path for path in paths if path.is_dir()]
    for text in describe_left_out(folders, has_lost=True, has_rows=has_rows):
        _print_note(f"Left out: {text}.")
    return dict(zip(inputs, require_output_paths(inputs, output), strict=True))


def _choose_job_name(name: str | None, flags: dict[str, Any]) -> str:
    if name is None:
        model = str(flags["model"] or flags["random_init"] or "demo")
        return re.sub(r"[^\w.@+=-]|^\W", "-", Path(model).name).lstrip("-.") or "model"
    if not JOB_NAME.fullmatch(name):
        raise UsageError(
            f"--name is {name!r}; letters, digits and . _ - @ + = are allowed"
        )
    return name


def _choose_job_dir(job_dir: Path | None, output: Path) -> Path:
    """Return where logs and lists go; by default jobs/ beside the answers.

    It is higher up if a folder has a scheduler's sign in its name: `fminfer split` writes %20.
    """
    parents = Path(os.path.abspath(output)).parents
    default = next((p for p in parents[:-1] if _can_hold_logs(p)), parents[0]) / "jobs"
    folder = default if job_dir is None else Path(os.path.abspath(job_dir))
    if not _can_hold_logs(folder):
        raise UsageError(
            f"{str(folder)!r} cannot hold logs: schedulers read % and \\ in a path as their own "
            "signs; give --job-dir another folder"
        )
    return folder


def _can_hold_logs(folder: Path) -> bool:
    return not set("%\\") & set(str(folder)) and str(folder).isprintable()


def _find_program() -> list[str]:
    """Return this very fminfer: a job's shell may find another one, or none."""
    script = Path(sys.executable).with_name("fminfer")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "fminfer"]


def _print_script(text: str) -> None:
    click.echo(os.fsencode(text))  # names of files need not be UTF-8


def _print_note(text: str) -> None:
    click.echo(os.fsencode(text), err=True)

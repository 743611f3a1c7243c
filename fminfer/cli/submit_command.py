"""`fminfer submit`: jobs of a cluster, each a `fminfer run`, for files that are not finished."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from fminfer.cli.config_file import ConfiguredCommand
from fminfer.cli.flags import GroupedCommand, flags_of
from fminfer.cli.old_command_lines import options_of_old_job
from fminfer.cli.process import EXIT_STOPPED
from fminfer.cluster.resources import (
    SubmitOptions,
    check_shared_files,
    job_values,
    parse_flags,
)
from fminfer.cluster.slurm_and_lsf import SCHEDULERS
from fminfer.core.config import ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.option import pop_options
from fminfer.core.quantities import with_noun
from fminfer.files.input_folders import describe_left_out, find_inputs
from fminfer.files.output_paths import require_output_paths
from fminfer.job.run_paths import check_no_other_model


@click.command(
    "fminfer run", cls=ConfiguredCommand, settings_of="run", params=flags_of("run")
)
@click.argument("paths", nargs=-1)
def run_stand_in(**flags: Any) -> None:
    """Take the flags of `fminfer run`, and do nothing."""


NAME = re.compile(r"\w[\w.@+=-]*")


@click.command(cls=GroupedCommand, params=flags_of("submit"))
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
    from fminfer.cluster.job_scripts import TEMPLATES, ScriptTemplate
    from fminfer.cluster.submission import DryRun, JobForm, Submission

    asked = pop_options(SubmitOptions, options)
    if asked.job_name is not None:
        asked = options_of_old_job(asked, asked.job_name)
    if asked.scheduler is None:
        raise UsageError("submit needs --scheduler slurm or --scheduler lsf")
    if not asked.infer_data:
        files = [word for word in run_flags if os.path.exists(word)]
        raise UsageError(f"submit needs --infer-data {files[0] if files else 'FOLDER'}")
    chosen = SCHEDULERS[asked.scheduler]
    flags = parse_flags(run_stand_in, run_flags, asked.gpus)
    paths = tuple(Path(os.path.abspath(path)) for path in asked.infer_data)
    outputs = _plan(paths, flags["output"])
    check_shared_files(asked.mode, flags, len(outputs))
    check_no_other_model(ModelOptions(flags["model"], flags["random_init"]), outputs)
    values, more_flags = job_values(chosen, asked, flags)
    form = JobForm(
        asked.mode,
        _name(asked.name, flags),
        _job_dir(asked.job_dir, next(iter(outputs.values()))),
        paths,
        ScriptTemplate(asked.template or TEMPLATES / chosen.template),
        values,
        (*_program(), "run", *more_flags, *run_flags),
        asked.max_running,
    )
    if asked.dry_run:  # its commands are shown alone
        submission = Submission(
            sender=DryRun(chosen, _show),
            form=form,
            outputs=outputs,
            max_queued=asked.max_queued,
            tell=lambda text: None,
            poll_s=0,
        )
    else:
        submission = Submission(chosen, form, outputs, asked.max_queued, _say)
    try:
        submission.run()
    except KeyboardInterrupt:
        sent = with_noun(len(submission.sent), "job")
        _say(f"Interrupted; submitted: {sent}. The same command goes on.")
        sys.exit(EXIT_STOPPED["interrupted"])
    sent = (
        "to send (a dry run sends none and does not ask the queue)"
        if asked.dry_run
        else "sent"
    )
    _say(f"{submission.summary} {sent}.")


def _plan(paths: tuple[Path, ...], output: Any) -> dict[Path, Path]:
    """Return each input file with its output, and say what was left out."""
    inputs = find_inputs(list(paths))
    for text in describe_left_out(
        [path for path in paths if path.is_dir()], has_lost=True
    ):
        _say(f"Left out: {text}.")
    return dict(zip(inputs, require_output_paths(inputs, output), strict=True))


def _name(name: str | None, flags: dict[str, Any]) -> str:
    if name is None:
        model = str(flags["model"] or flags["random_init"] or "demo")
        return re.sub(r"[^\w.@+=-]|^\W", "-", Path(model).name).lstrip("-.") or "model"
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name is {name!r}; letters, digits and . _ - @ + = are allowed"
        )
    return name


def _job_dir(job_dir: Path | None, output: Path) -> Path:
    """Return where logs and lists go; by default jobs/ beside the answers.

    It is higher up if a folder has a scheduler's sign in its name: `fminfer split` writes %20.
    """
    parents = Path(os.path.abspath(output)).parents
    default = next((p for p in parents[:-1] if _can_hold_logs(p)), parents[0]) / "jobs"
    found = default if job_dir is None else Path(os.path.abspath(job_dir))
    if not _can_hold_logs(found):
        raise UsageError(
            f"{str(found)!r} cannot hold logs: schedulers read % and \\ in a path as their own "
            "signs; give --job-dir another folder"
        )
    return found


def _can_hold_logs(folder: Path) -> bool:
    return not set("%\\") & set(str(folder)) and str(folder).isprintable()


def _program() -> list[str]:
    """Return this very fminfer: a job's shell may find another one, or none."""
    script = Path(sys.executable).with_name("fminfer")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "fminfer"]


def _show(text: str) -> None:
    click.echo(os.fsencode(text))  # names of files need not be UTF-8


def _say(text: str) -> None:
    click.echo(os.fsencode(text), err=True)

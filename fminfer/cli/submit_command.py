"""`fminfer submit`: jobs of a cluster, each a `fminfer run`, for files that are not finished."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fminfer.cli.config_file import ConfiguredCommand
from fminfer.cli.ending import EXIT_STOPPED
from fminfer.cli.options.flags import GroupedCommand, flags_of
from fminfer.cluster.resources import SubmitOptions, check_shared_files, job_values, parse_flags
from fminfer.cluster.slurm_and_lsf import SCHEDULERS, parts_of
from fminfer.core.config import ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.option import take
from fminfer.core.quantities import counted
from fminfer.files.input_folders import describe_left_out, find_inputs
from fminfer.files.output_paths import plan_outputs
from fminfer.job.run_paths import refuse_other_models


@click.command("fminfer run", cls=ConfiguredCommand, settings_of="run", params=flags_of("run"))
@click.argument("paths", nargs=-1)
def run_stand_in(**flags: Any) -> None:
    """Take the flags of `fminfer run`, and do nothing."""


NAME = re.compile(r"\w[\w.@+=-]*")


@click.command(cls=GroupedCommand, params=flags_of("submit"))
@click.argument("run_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS OF FMINFER RUN]")
def submit(run_flags: tuple[str, ...], **options: Any) -> None:
    """Submit jobs that answer files on a cluster.

    \b
    fminfer submit --scheduler slurm --infer-data shards/ --gpus 1 --time 4:00:00 \\
        -- --model-name /models/llama-7b
    fminfer submit --scheduler lsf --mode array --infer-data shards/ --queue gpu --dry-run
    fminfer submit --scheduler slurm --mode ranks --infer-data shards/ --gpus 16 --nodes 2 \\
        -- --model-name /models/opt-175b --output answers/

    It leaves out files whose answers are complete, and those that a job in the queue will answer.
    So the same command again submits the missing files. docs/clusters.md explains it step by step.
    """
    from fminfer.cluster.job_scripts import TEMPLATES, ScriptTemplate
    from fminfer.cluster.submission import DryRun, JobForm, Submission

    asked = take(SubmitOptions, options)
    if asked.job_name is not None:
        asked = _of_old_name(asked, asked.job_name)
    if asked.scheduler is None or not asked.infer_data:
        missing = (
            "--infer-data FOLDER" if asked.scheduler else "--scheduler slurm or --scheduler lsf"
        )
        raise UsageError(f"submit needs {missing}")
    chosen = SCHEDULERS[asked.scheduler]
    flags = parse_flags(run_stand_in, run_flags, asked.gpus)
    paths = tuple(Path(os.path.abspath(path)) for path in asked.infer_data)
    outputs = _plan(paths, flags["output"])
    check_shared_files(asked.mode, flags, len(outputs))
    refuse_other_models(ModelOptions(flags["model"], flags["random_init"]), outputs)
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
    if asked.dry_run:
        cluster, tell = DryRun(chosen, _show), lambda text: None  # its commands are shown alone
        submission = Submission(cluster, form, outputs, asked.max_queued, tell, 0)
    else:
        submission = Submission(chosen, form, outputs, asked.max_queued, _say)
    try:
        submission.run()
    except KeyboardInterrupt:
        sent = counted(len(submission.sent), "job")
        _say(f"Interrupted; submitted: {sent}. The same command goes on.")
        sys.exit(EXIT_STOPPED["interrupted"])
    sent = "to send (a dry run sends none and does not ask the queue)" if asked.dry_run else "sent"
    _say(f"{submission.summary} {sent}.")


def _plan(paths: tuple[Path, ...], output: Any) -> dict[Path, Path]:
    """Return each input file with its output, and say what was left out."""
    inputs = find_inputs(list(paths))
    for text in describe_left_out([path for path in paths if path.is_dir()], has_lost=True):
        _say(f"Left out: {text}.")
    return dict(zip(inputs, plan_outputs(inputs, output), strict=True))


def _of_old_name(asked: SubmitOptions, job_name: str) -> SubmitOptions:
    """Return the options with the name and the files that an old job's name holds."""
    parts = parts_of(job_name)
    if parts is None:
        raise UsageError(
            f"--job-name {job_name}: it must be lsf_NAME#PATH, PATH being the files to answer"
        )
    if asked.name is not None or asked.infer_data:
        raise UsageError("--job-name lsf_NAME#PATH says --name and --infer-data; leave these out")
    scheduler = asked.scheduler or "lsf"
    return replace(asked, name=parts[0], infer_data=(parts[1],), scheduler=scheduler)


def _name(name: str | None, flags: dict[str, Any]) -> str:
    if name is None:
        model = str(flags["model"] or flags["random_init"] or "demo")
        return re.sub(r"[^\w.@+=-]|^\W", "-", Path(model).name).lstrip("-.") or "model"
    if not NAME.fullmatch(name):
        raise UsageError(f"--name is {name!r}; letters, digits and . _ - @ + = are allowed")
    return name


def _job_dir(job_dir: Path | None, output: Path) -> Path:
    """Return where logs and lists go; schedulers have signs of their own in a log's path.

    By default that is jobs/ beside the answers, or above a folder with such a sign in its name:
    `fminfer split` writes some characters of engines' names as %20.
    """
    if job_dir is not None:
        found = Path(os.path.abspath(job_dir))
    else:
        parents = Path(os.path.abspath(output)).parents
        found = next((p for p in parents[:-1] if _can_hold_logs(p)), parents[0]) / "jobs"
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

"""`fminfer submit`: jobs of a cluster, each a `fminfer run`, for files that are not finished."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

import click

from fminfer.cli.config_file import ConfiguredCommand
from fminfer.cli.exit_status import EXIT_STOPPED
from fminfer.cli.options.option_groups import (
    INPUT_OUTPUT,
    JOBS,
    OLD,
    QUEUE,
    GroupedCommand,
    in_group,
    with_options,
)
from fminfer.cli.options.value_types import Duration
from fminfer.cli.run_options import run_options
from fminfer.cluster.job_names import parts_of
from fminfer.cluster.resources import check_mode, check_shared_files, job_values, parse_flags
from fminfer.cluster.slurm_and_lsf import SCHEDULERS
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.quantities import counted
from fminfer.files.input_folders import describe_left_out, find_inputs
from fminfer.files.output_paths import plan_outputs
from fminfer.job.run_paths import refuse_other_models

DEFAULT_MAX_QUEUED, DEFAULT_MAX_REQUEUES = 300, 20
_input_option, _job_option = in_group(INPUT_OUTPUT), in_group(JOBS)
_queue_option, _old_option = in_group(QUEUE), in_group(OLD)

SUBMIT_OPTIONS = [
    _input_option(
        "--infer-data",
        multiple=True,
        type=click.Path(path_type=Path),
        help="A folder of input files, or a file. May be repeated.",
    ),
    _job_option("--scheduler", type=click.Choice(["lsf", "slurm"]), help="bsub or sbatch."),
    _job_option(
        "--mode",
        type=click.Choice(["each", "array", "ranks"]),
        default="each",
        show_default=True,
        help="each: a job a file. array: job arrays, a task a file. ranks: one job for all files, "
        "a rank a task.",
    ),
    _job_option(
        "--time",
        "time_s",
        type=Duration(),
        help="The jobs' wall-time limit. A job ends in good order a little before it, waits in the "
        "queue again, and goes on.  [default: the queue's limit, which the jobs do not know]",
    ),
    _job_option("--queue", "--partition", help="LSF's queue or Slurm's partition."),
    _job_option(
        "--gpus",
        type=click.IntRange(min=1),
        help="GPUs of a job, with a rank of the model on each.  [default: none]",
    ),
    _job_option(
        "--nodes",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="With --mode ranks: number of machines. Ranks and GPUs are spread evenly over them.",
    ),
    _job_option(
        "--launcher",
        help="With --mode ranks: the command that starts the ranks.  "
        "[default: srun; mpirun -n RANKS]",
    ),
    _job_option(
        "--directive",
        "directives",
        multiple=True,
        help="One more #SBATCH or #BSUB line: --directive=--account=lab. May be repeated.",
    ),
    _job_option(
        "--template",
        type=click.Path(path_type=Path),
        help="Your own Jinja2 template of the script (docs/clusters.md).",
    ),
    _job_option(
        "--job-dir",
        type=click.Path(path_type=Path),
        help="Folder for logs and lists of files.  [default: jobs/ beside the answers, or above "
        "one whose name holds a %]",
    ),
    _queue_option(
        "--name",
        help="Part of the jobs' names. By it, submit finds its own jobs in the queue.  "
        "[default: the last part of the model's]",
    ),
    _queue_option(
        "--max-queued",
        type=click.IntRange(min=1),
        default=DEFAULT_MAX_QUEUED,
        show_default=True,
        help="Most jobs of this name in the queue, waiting or running. Each task of an array "
        "counts. submit waits for room.",
    ),
    _queue_option(
        "--max-running",
        type=click.IntRange(min=1),
        help="With --mode array: most tasks of an array that run at once.  [default: no limit]",
    ),
    _queue_option(
        "--max-requeues",
        type=click.IntRange(min=0),
        default=DEFAULT_MAX_REQUEUES,
        show_default=True,
        help="How often a job that runs out of time goes back into the queue by itself.",
    ),
    _queue_option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing."),
    _old_option(
        "--job-name",
        metavar="lsf_NAME#PATH",
        help="A job's name in FM Inference. It means --name NAME --infer-data PATH "
        "--scheduler lsf.",
    ),
]
submit_options = with_options(SUBMIT_OPTIONS)


@click.command("fminfer run", cls=ConfiguredCommand, settings_of="run")
@click.argument("paths", nargs=-1)
@run_options
def run_stand_in(**flags: Any) -> None:
    """Take the flags of `fminfer run`, and do nothing."""


NAME = re.compile(r"\w[\w.@+=-]*")


@click.command(cls=GroupedCommand)
@submit_options
@click.argument("run_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS OF FMINFER RUN]")
def submit(
    scheduler: Literal["lsf", "slurm"] | None,
    mode: Literal["each", "array", "ranks"],
    infer_data: tuple[Path, ...],
    job_name: str | None,
    name: str | None,
    job_dir: Path | None,
    template: Path | None,
    max_queued: int,
    max_running: int | None,
    dry_run: bool,
    run_flags: tuple[str, ...],
    **resources: Any,
) -> None:
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
    from fminfer.cluster.submission import Cluster, DryRun, JobForm, Submission

    if job_name is not None:
        name, infer_data = _of_old_name(job_name, name, infer_data)
        scheduler = scheduler or "lsf"
    if scheduler is None or not infer_data:
        missing = "--infer-data FOLDER" if scheduler else "--scheduler slurm or --scheduler lsf"
        raise UsageError(f"submit needs {missing}")
    chosen = SCHEDULERS[scheduler]
    flags = parse_flags(run_stand_in, run_flags, resources["gpus"])
    check_mode(mode, max_running, resources)
    paths = tuple(Path(os.path.abspath(path)) for path in infer_data)
    outputs = _plan(paths, flags["output"])
    check_shared_files(mode, flags, len(outputs))
    refuse_other_models(EngineConfig(flags["model"], flags["random_init"]), outputs)
    values, more_flags = job_values(chosen, mode, flags, **resources)
    form = JobForm(
        mode,
        _name(name, flags),
        _job_dir(job_dir, next(iter(outputs.values()))),
        paths,
        ScriptTemplate(template or TEMPLATES / chosen.template),
        values,
        (*_program(), "run", *more_flags, *run_flags),
        max_running,
    )
    if dry_run:
        submission = Submission(DryRun(chosen, _show), form, outputs, max_queued, _ignore, 0.0)
    else:
        submission = Submission(Cluster(chosen), form, outputs, max_queued, _say)
    try:
        submission.run()
    except KeyboardInterrupt:
        sent = counted(len(submission.sent), "job")
        _say(f"Interrupted; submitted: {sent}. The same command goes on.")
        sys.exit(EXIT_STOPPED["interrupted"])
    sent = "to send (a dry run sends none and does not ask the queue)" if dry_run else "sent"
    _say(f"{submission.summary} {sent}.")


def _plan(paths: tuple[Path, ...], output: Any) -> dict[Path, Path]:
    """Return each input file with its output, and say what was left out."""
    inputs = find_inputs(list(paths))
    for text in describe_left_out([path for path in paths if path.is_dir()], has_lost=True):
        _say(f"Left out: {text}.")
    return dict(zip(inputs, plan_outputs(inputs, output), strict=True))


def _of_old_name(
    job_name: str, name: str | None, infer_data: tuple[Path, ...]
) -> tuple[str, tuple[Path, ...]]:
    """Return the name and the files that an old job's name holds."""
    parts = parts_of(job_name)
    if parts is None:
        raise UsageError(
            f"--job-name {job_name}: it must be lsf_NAME#PATH, PATH being the files to answer"
        )
    if name is not None or infer_data:
        raise UsageError("--job-name lsf_NAME#PATH says --name and --infer-data; leave these out")
    return parts[0], (parts[1],)


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


def _ignore(text: str) -> None:
    """Say nothing: a dry run shows its commands alone."""

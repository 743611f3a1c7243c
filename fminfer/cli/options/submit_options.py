"""Options of `fminfer submit`: the jobs, what they need, and how many may wait."""

from __future__ import annotations

from pathlib import Path

import click

from fminfer.cli.options.option_groups import INPUT_OUTPUT, JOBS, OLD, QUEUE, in_group, with_options
from fminfer.cli.options.value_types import Duration

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

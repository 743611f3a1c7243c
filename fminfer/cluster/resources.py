"""What jobs need, by the flags of `fminfer submit` and of the `fminfer run` inside them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from fminfer.cluster.slurm_and_lsf import Scheduler, format_duration
from fminfer.core.config import EngineConfig, GroupSizes, ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.impostors import is_gguf
from fminfer.core.option import (
    Options,
    Seconds,
    ShownAmount,
    ShownCount,
    option,
    pop_options,
)
from fminfer.files.output_paths import STDOUT
from fminfer.machine.stopper import check_times
from fminfer.models.known_sizes import check_split
from fminfer.models.model_folder import check_files_beside
from fminfer.models.stored.weight_folder import find_weights
from fminfer.pipeline.ranks import RankConfig

# Of the time limit: what the job's start takes before `fminfer run` counts, and its end after.
MIN_SPARE_S = 15.0
MAX_SPARE_S = 120.0
SPARE_SHARE = 0.05


_job_option = partial(option, group="Jobs", commands=("submit",))
_queue_option = partial(option, group="Queue", commands=("submit",))


@dataclass(frozen=True)
class SubmitOptions(Options):
    """Which jobs are made, and how they wait in the queue."""

    infer_data: tuple[Path, ...] = _job_option(
        "A folder of input files, or a file. May be repeated.", group="Input and output"
    )
    scheduler: Literal["lsf", "slurm"] | None = _job_option(
        "lsf: submit with bsub. slurm: with sbatch."
    )
    mode: Literal["each", "array", "ranks"] = _job_option(
        "each: one job per file. array: job arrays, one task per file. ranks: one job for all "
        "files, one rank per task.",
        default="each",
    )
    time_s: Seconds | None = _job_option(
        "The jobs' wall-time limit. A job stops cleanly a little before it, is "
        "requeued, and goes on.  [default: the queue's limit, which the jobs do not "
        "know]"
    )
    queue: str | None = _job_option(
        "LSF's queue or Slurm's partition.", flags=("--queue", "--partition")
    )
    gpus: ShownCount | None = _job_option(
        "GPUs of each job, with one rank on each.  [default: none]"
    )
    nodes: ShownCount = _job_option(
        "With --mode ranks: number of machines. Ranks and GPUs are spread evenly over them.",
        default=1,
    )
    launcher: str | None = _job_option(
        "With --mode ranks: the command that starts the ranks.  [default: srun of "
        "Slurm; mpirun -n RANKS of LSF]"
    )
    directives: tuple[str, ...] = _job_option(
        "One more #SBATCH or #BSUB line: --directive=--account=lab. May be repeated.",
        flags=("--directive",),
    )
    template: Path | None = _job_option(
        "Your own Jinja2 template of the script (docs/clusters.md)."
    )
    job_dir: Path | None = _job_option(
        "Folder for logs and lists of files.  [default: jobs/ beside the answers; "
        "above a folder with % or \\ in its name]"
    )
    name: str | None = _queue_option(
        "Part of the jobs' names, by which submit finds its own jobs in the queue.  "
        "[default: the last part of the model's name]"
    )
    max_queued: ShownCount = _queue_option(
        "Most jobs of this name in the queue, waiting or running. Each task of an array counts. "
        "submit waits for room.",
        default=300,
    )
    max_running: ShownCount | None = _queue_option(
        "With --mode array: most tasks of an array that run at once.  [default: no limit]"
    )
    max_requeues: ShownAmount = _queue_option(
        "How often a job that runs out of time is requeued by itself.", default=20
    )
    dry_run: bool = _queue_option("Print what would be sent, and send nothing.")
    job_name: str | None = _job_option(
        "A job's name in FM Inference: the same as --name NAME --infer-data PATH "
        "--scheduler lsf.",
        group="Old command lines",
        metavar="lsf_NAME#PATH",
    )

    def check(self) -> None:
        """Raise for flags that mean nothing in this mode."""
        if self.max_running is not None and self.mode != "array":
            raise UsageError(
                "--max-running is for --mode array; for separate jobs see --max-queued"
            )
        if self.mode != "ranks" and self.nodes > 1:
            raise UsageError(
                f"--nodes {self.nodes} needs --mode ranks: a file has one node"
            )
        if self.mode != "ranks" and self.launcher is not None:
            raise UsageError(
                "--launcher needs --mode ranks; other jobs start their ranks themselves"
            )
        texts = [
            ("--queue", self.queue or ""),
            *(("--directive", e) for e in self.directives),
        ]
        for flag, text in texts:
            if not text.isprintable():
                raise UsageError(
                    f"{flag} {text!r} holds characters that no line of a script may hold"
                )


def parse_flags(
    run: click.Command, run_flags: Sequence[str], gpus: int | None = None
) -> dict[str, Any]:
    """Return the flags of `fminfer run` by name; raise for those that jobs cannot have."""
    flags = run.make_context("fminfer run", list(run_flags)).params
    if flags["paths"] or flags["infer_data"] or "--" in run_flags:
        raise UsageError(
            "files are given by fminfer submit's own --infer-data, before the --"
        )
    if flags["restart"]:
        raise UsageError(
            "--restart would begin anew each time that a job goes on in another turn; "
            "move the old answers away, or give another --output"
        )
    if flags["output"] == STDOUT:
        raise UsageError("--output - would end in a job's log; give a folder")
    if flags["rank"] is not None or flags["dist_url"] is not None:
        raise UsageError(
            "--rank and --dist-url are for ranks started by hand; see --mode ranks"
        )
    job_flags = {**flags, "world_size": count_ranks(flags, gpus)}
    ranks = pop_options(RankConfig, {**job_flags})
    config = pop_options(EngineConfig, job_flags)
    check_model_path(config)
    check_split(config, ranks.num_stages)
    return flags


def count_ranks(flags: dict[str, Any], gpus: int | None) -> int:
    """Return how many ranks a job has in all."""
    sizes = pop_options(GroupSizes, {**flags})
    if gpus and sizes.configured_ranks is None and gpus % sizes.num_ranks:
        raise UsageError(
            f"--gpus {gpus} is no multiple of --tensor-parallel-size "
            f"{sizes.tensor_parallel_size} × --data-group-size "
            f"{sizes.data_group_size}, and a rank runs on each GPU"
        )
    return sizes.configured_ranks or gpus or sizes.num_ranks


def check_model_path(config: ModelOptions) -> None:
    """Raise for a model that is written as a path and is not there.

    A hub id is left to the job, which fetches it.
    """
    if config.model is None:
        return
    if is_gguf(config.model):
        find_weights(Path(config.model))
        return
    folder = Path(config.model)
    is_path = config.model.startswith(("/", "./", "../", "~"))
    if folder.is_dir() or is_path or config.model.count("/") > 1:
        if not folder.is_dir():
            raise UsageError(f"--model-name {config.model}: there is no such folder")
        check_files_beside(config.model, folder, without_adapter=config.without_adapter)
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"--model-name {config.model}: there is no config.json in it"
            )


def check_shared_files(mode: str, flags: dict[str, Any], num_inputs: int) -> None:
    """Raise for a file that several jobs would write."""
    for flag in ("stats", "trace"):
        if flags[flag] is not None and mode != "ranks" and num_inputs > 1:
            raise UsageError(
                f"--{flag} {flags[flag]}: {num_inputs} jobs would write it"
            )


def make_job_values(
    scheduler: Scheduler, submit_options: SubmitOptions, flags: dict[str, Any]
) -> tuple[dict[str, object], list[str]]:
    """Return the template's values, and flags for `fminfer run`; raise if numbers clash."""
    num_ranks = count_ranks(flags, submit_options.gpus)
    time_s = submit_options.time_s
    num_shards: int = flags["tensor_parallel_size"]
    num_nodes = submit_options.nodes
    for noun, count in (("ranks", num_ranks), ("GPUs", submit_options.gpus or 0)):
        if count % num_nodes:
            raise UsageError(
                f"{count} {noun} cannot be spread evenly over --nodes {num_nodes}"
            )
    if num_ranks // num_nodes % num_shards:
        raise UsageError(
            f"{num_ranks // num_nodes} ranks on each of --nodes {num_nodes} are no "
            f"multiple of --tensor-parallel-size {num_shards}; ranks that have parts "
            "of one layer must be on one node. Change --gpus, --nodes or "
            "--tensor-parallel-size"
        )
    launcher = (
        shlex.split(submit_options.launcher)
        if submit_options.launcher
        else scheduler.make_launcher(num_ranks, has_shards=num_shards > 1)
    )
    more_flags = []
    if submit_options.mode != "ranks" and num_ranks > 1 and not flags["world_size"]:
        more_flags += ["--world-size", str(num_ranks)]
    if time_s is not None and flags["deadline_s"] is None:
        spare_s = min(MAX_SPARE_S, max(MIN_SPARE_S, SPARE_SHARE * time_s))
        try:
            check_times(flags["grace_s"], time_s - spare_s)
        except UsageError as error:
            raise UsageError(
                f"--time {format_duration(time_s)} is too short; {spare_s:g} s of it "
                f"are kept for the job's start and end. For `fminfer run`: {error}"
            ) from None
        more_flags += ["--deadline", format_duration(time_s - spare_s)]
    names = ("queue", "gpus", "nodes", "directives", "max_requeues")
    values: dict[str, object] = {name: getattr(submit_options, name) for name in names}
    values |= {
        "time": None if time_s is None else scheduler.format_time(time_s),
        "tasks": num_ranks if submit_options.mode == "ranks" else 1,
        "launcher": launcher,
    }
    return values, more_flags

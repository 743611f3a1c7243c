"""What jobs need, from the flags of `fminfer submit` and of the `fminfer run` inside them.

Mistakes are told before anything waits in a queue. It knows flags and numbers, not files.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from fminfer.cluster.slurm_and_lsf import Scheduler, format_duration
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.files.output_paths import STDOUT
from fminfer.machine.stopper import check_times
from fminfer.models.beside import refuse_what_is_beside
from fminfer.models.layer_count import check_split
from fminfer.pipeline.ranks import RankConfig

# Of the time limit: what the job's start takes before `fminfer run` counts, and its end after.
MIN_SPARE_S, MAX_SPARE_S, SPARE_SHARE = 15.0, 120.0, 0.05


def parse_flags(
    run: click.Command, run_flags: Sequence[str], gpus: int | None = None
) -> dict[str, Any]:
    """Return the flags of `fminfer run`, by name.

    Args:
        run: a command that takes them.
        gpus: of a job, a rank on each unless the flags say how many ranks there are.

    Raises:
        UsageError: a flag that is wrong, or that makes no sense in these jobs.
    """
    flags = run.make_context("fminfer run", list(run_flags)).params
    if flags["paths"] or flags["infer_data"] or "--" in run_flags:
        raise UsageError("files are given by fminfer submit's own --infer-data, before the --")
    if flags["restart"]:
        raise UsageError(
            "--restart would begin anew each time that a job goes on in another turn; move the old "
            "answers away, or give another --output"
        )
    if flags["output"] == STDOUT:
        raise UsageError("--output - would end in a job's log; give a folder")
    if flags["rank"] is not None or flags["dist_url"] is not None:
        raise UsageError("--rank and --dist-url are for ranks started by hand; see --mode ranks")
    given = {field.name: flags[field.name] for field in fields(RankConfig)}
    ranks = RankConfig(**given | {"world_size": count_ranks(flags, gpus)})
    engine = {f.name: flags[f.name] for f in fields(EngineConfig) if f.name in flags}
    config = EngineConfig(**engine)
    check_model_path(config)
    check_split(config, ranks.size or 1)
    return flags


def count_ranks(flags: dict[str, Any], gpus: int | None) -> int:
    """Return how many ranks a job has in all."""
    if flags["world_size"]:
        return int(flags["world_size"])
    if flags["pipeline_group_size"]:
        return int(flags["pipeline_group_size"] * flags["data_group_size"])
    return gpus or int(flags["data_group_size"])


def check_model_path(config: EngineConfig) -> None:
    """Refuse a model that is written as a path and is not there; a hub id is the job's to fetch.

    Raises:
        UsageError: there is no such folder, or no config.json in it.
    """
    if config.model is None:
        return
    folder, is_path = Path(config.model), config.model.startswith(("/", "./", "../", "~"))
    if folder.is_dir() or is_path or config.model.count("/") > 1:
        if not folder.is_dir():
            raise UsageError(f"--model-name {config.model}: there is no such folder")
        refuse_what_is_beside(config.model, folder, without_adapter=config.without_adapter)
        if not (folder / "config.json").is_file():
            raise UsageError(f"--model-name {config.model}: there is no config.json in it")


def check_mode(mode: str, max_running: int | None, resources: dict[str, Any]) -> None:
    """Refuse flags that mean nothing in this mode.

    Raises:
        UsageError: there is one.
    """
    if max_running is not None and mode != "array":
        raise UsageError("--max-running is for --mode array; for separate jobs see --max-queued")
    if mode != "ranks" and resources["nodes"] > 1:
        raise UsageError(f"--nodes {resources['nodes']} needs --mode ranks: a file has one node")
    if mode != "ranks" and resources["launcher"] is not None:
        raise UsageError("--launcher needs --mode ranks; other jobs start their ranks themselves")


def check_shared_files(mode: str, flags: dict[str, Any], num_inputs: int) -> None:
    """Refuse a file that several jobs would write.

    Raises:
        UsageError: there is one.
    """
    for flag in ("stats", "trace"):
        if flags[flag] is not None and mode != "ranks" and num_inputs > 1:
            raise UsageError(f"--{flag} {flags[flag]}: {num_inputs} jobs would write it")


def job_values(
    scheduler: Scheduler,
    mode: str,
    flags: dict[str, Any],
    *,
    time_s: float | None,
    queue: str | None,
    gpus: int | None,
    nodes: int,
    launcher: str | None,
    directives: tuple[str, ...],
    max_requeues: int,
) -> tuple[dict[str, object], list[str]]:
    """Return the template's values, and flags for `fminfer run`.

    Raises:
        UsageError: numbers that do not fit together, or text that no line can hold.
    """
    num_ranks = count_ranks(flags, gpus)
    for what, count in (("ranks", num_ranks), ("GPUs", gpus or 0)):
        if count % nodes:
            raise UsageError(f"{count} {what} cannot be spread evenly over --nodes {nodes}")
    for flag, text in (("--queue", queue or ""), *(("--directive", line) for line in directives)):
        if not text.isprintable():
            raise UsageError(f"{flag} {text!r} holds characters that no line of a script may hold")
    start = shlex.split(launcher) if launcher else scheduler.launcher(num_ranks)
    more_flags = []
    if mode != "ranks" and num_ranks > 1 and not flags["world_size"]:
        more_flags += ["--world-size", str(num_ranks)]
    if time_s is not None and flags["deadline_s"] is None:
        spare_s = min(MAX_SPARE_S, max(MIN_SPARE_S, SPARE_SHARE * time_s))
        try:
            check_times(flags["grace_s"], time_s - spare_s)
        except UsageError as error:
            raise UsageError(
                f"--time {format_duration(time_s)} is too short; {spare_s:g} s of it are kept for "
                f"the job's start and end. For `fminfer run`: {error}"
            ) from None
        more_flags += ["--deadline", format_duration(time_s - spare_s)]
    values: dict[str, object] = {
        "time": None if time_s is None else scheduler.format_time(time_s),
        "queue": queue,
        "gpus": gpus,
        "nodes": nodes,
        "tasks": num_ranks if mode == "ranks" else 1,
        "launcher": start,
        "directives": directives,
        "max_requeues": max_requeues,
    }
    return values, more_flags

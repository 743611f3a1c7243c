"""`fminfer bench`: the time of a token at several batch sizes, and each rank's memory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import click

from fminfer.cli.config_file import ConfiguredCommand, print_notices
from fminfer.cli.flags import make_flags
from fminfer.cli.option_table import BenchOptions
from fminfer.cli.process import (
    EXIT_FAILED,
    Ending,
    importing_engine,
    start_kernel_build,
    starting_process,
)
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.option import pop_options
from fminfer.files.own_files import PICTURE, replace_own_file
from fminfer.job.report.bench_picture import draw_bench
from fminfer.machine.library_imports import importing_libraries
from fminfer.pipeline.ranks import RankConfig
from fminfer.runtime.launch.processes import ProcessContext
from fminfer.runtime.launch.role import Role, find_role


@click.command(cls=ConfiguredCommand, settings_of="run", params=make_flags("bench"))
def bench(**options: Any) -> None:
    """Time the generation of short rows at several batch sizes.

    \b
    fminfer bench --random-init bloom-560m
    fminfer bench --model-name /models/bloom-7b1 --dtype bfloat16 --batch-sizes 1,8
    fminfer bench --model-name /models/bloom --tp 8 --plot bloom.svg
    fminfer bench --model-name /models/bloom-7b1 --calibrate
    \f

    It measures as the BLOOM inference scripts do: greedy generation of 100 tokens from
    inputs of a few tokens, each batch size once, after a short row to warm up. For a model that
    gives vectors it measures rows a second, at several lengths. It starts ranks as
    fminfer run does. With --data-group-size, each pipeline has a batch of its own.

    A batch that does not fit prints oom, and the others are timed. Last come each rank's peak
    memory beside the forecast of fminfer check, and a line of JSON.

    \b
    Exit status: 0 a batch size was timed; 1 none fits, or it failed; 2 wrong usage;
    130 interrupted; 143 terminated.
    """
    ending = Ending()
    try:
        bench_options = pop_options(BenchOptions, options)
        ranks = pop_options(RankConfig, {**options})
        config = pop_options(EngineConfig, options)
        role = find_role(ranks, os.environ)
        if role.is_first:
            print_notices(is_quiet=False)
        if bench_options.calibrate:
            return _calibrate_costs(config, role)
        is_timed = _time_batches(config, role, bench_options, ending)
    except (Exception, KeyboardInterrupt) as error:
        ending.fail(error)
    # at once: ranks may have run out of memory
    ending.exit(0 if is_timed else EXIT_FAILED)


def _time_batches(
    config: EngineConfig, role: Role, bench_options: BenchOptions, ending: Ending
) -> bool:
    """Time the batch sizes on this process's part; return False if none was timed."""
    largest_batch = max(bench_options.batch_sizes)
    if config.max_rows is not None and largest_batch > config.max_rows:
        raise UsageError(
            f"a batch of {largest_batch} does not run at once: --max-rows is {config.max_rows}. "
            "Raise it, or take smaller batches"
        )
    config = replace(config, max_rows=config.max_rows or largest_batch)
    with starting_process(
        ProcessContext, config, role, ending, is_quiet=False
    ) as process:
        with importing_engine(config, role):
            from fminfer.estimate.bench import bench_process
        result = bench_process(
            process, bench_options.batch_sizes, bench_options.new_tokens, click.echo
        )
    if result is None:
        return True
    click.echo(result.to_text())
    click.echo(json.dumps(result.to_dict()))
    if bench_options.plot is not None:
        picture = draw_bench(result.title, result.y_name, result.curves, result.ranks)
        replace_own_file(bench_options.plot, PICTURE, "--plot", picture.encode())
    return result.is_timed


def _calibrate_costs(config: EngineConfig, role: Role) -> None:
    if role.kind != "alone":
        raise UsageError(
            "--calibrate times the steps of one process; leave out --world-size and the like"
        )
    start_kernel_build(config)
    with importing_libraries():
        from fminfer.estimate.calibration import calibrate
        from fminfer.estimate.cost_model import COSTS

    click.echo(
        "Loading the model, then timing its steps: half a minute, or minutes if it is slow.",
        err=True,
    )
    calibration = calibrate(config)
    for cost, seconds in zip(COSTS, calibration.costs.seconds, strict=True):
        click.echo(f"{seconds * 1000:12.5f} ms  {cost}")
    error = calibration.costs.error
    runs = calibration.costs.whole_runs
    click.echo(
        f"{len(calibration.samples):,} steps, half of them predicted to {error:.0%} or "
        f"better; {len(runs)} whole runs took {min(runs):.2f} to {max(runs):.2f} times "
        "what was predicted"
    )
    click.echo(
        "fminfer check now estimates the time of this model's runs on this machine."
    )
    click.echo(
        json.dumps(
            {"path": str(calibration.path), "median_error": error, "whole_runs": runs}
        )
    )

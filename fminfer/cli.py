"""The command line: flags in, exit status out. Heavy imports wait until a run needs them."""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click

from fminfer import __version__
from fminfer.cluster.job_names import infer_data_of
from fminfer.commands.check import check
from fminfer.commands.families import families
from fminfer.commands.merge import merge
from fminfer.commands.split import split
from fminfer.commands.status import status
from fminfer.commands.submit import submit
from fminfer.config import EngineConfig
from fminfer.cost_model import COSTS
from fminfer.errors import FminferError, StoppedError, UsageError, printable
from fminfer.host_memory import reading_files, touching_memory
from fminfer.hyperparameters import Hyperparameters
from fminfer.imports import import_transformers
from fminfer.kernel_build import abandon_build, start_build
from fminfer.launcher import end_after, launch
from fminfer.models.layer_count import check_split
from fminfer.models.weight_files import find_weight_files
from fminfer.options.groups import GroupedCommand
from fminfer.options.value_types import PathOrUrl
from fminfer.output.progress import TimeBar
from fminfer.paths import JobPaths
from fminfer.processor import cap_libraries
from fminfer.ranks import RankConfig, RankFacts, find_facts, is_spawned
from fminfer.run_options import bench_options, dtype_name, run_options
from fminfer.stopping import Stopper, check_times
from fminfer.storage import Location, RemoteFolders, default_work_dir
from fminfer.synthetic import NUM_BATCHES, Synthetic
from fminfer.team.place import find_place
from fminfer.threads import wait_briefly
from fminfer.urls import hide_secrets

STARTED_S = time.perf_counter()
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
_HYPERPARAMETERS = fields(Hyperparameters)
EXIT_FAILED, EXIT_USAGE, EXIT_SOME_ERRORS = 1, 2, 3


class _Commands(click.Group):
    """Says what ended a command; `run` does so by itself."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a file's name may hold any bytes
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            cap_libraries()
            return super().invoke(ctx)
        except FminferError as error:
            sys.exit(_tell(error, Stopper(0.0), False))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fminfer")
def main() -> None:
    """Answer files of OpenAI-completions requests with a language model, offline.

    \b
    fminfer run requests.jsonl                      answers in output_requests.jsonl
    fminfer run --help                              everything that a run can be told
    fminfer status shards/                          how far runs are
    fminfer bench --random-init bloom-560m          what a token takes at several batch sizes
    fminfer split --input-file requests.jsonl --output-dir parts/
    fminfer merge --input-dir parts/ --output answers.jsonl
    fminfer submit --scheduler slurm --infer-data shards/     jobs on a cluster, one a file
    fminfer check requests.jsonl                    what is wrong, and what a run will take
    fminfer families                                the architectures that run
    """


for command in (check, split, merge, submit, status, families):
    main.add_command(command)


class _KeepsArguments(GroupedCommand):
    """Remembers what it was called with, for the ranks that it may start."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)


@main.command(cls=_KeepsArguments)
@click.argument("paths", nargs=-1, type=PathOrUrl(path_type=Path))
@run_options
def run(
    paths: tuple[Location, ...],
    infer_data: tuple[Location, ...],
    output: Location | None,
    work_dir: Path | None,
    fp16: bool,
    restart: bool,
    is_watching: bool,
    limit: int | None,
    prompt: str | None,
    is_overwriting: bool,
    stats: Path | None,
    quiet: bool,
    verbose: bool,
    trace: Path | None,
    pp_mode: str | None,
    grace_s: float,
    deadline_s: float | None,
    **options: Any,
) -> None:
    """Answer every line of the given files.

    \b
    fminfer run --prompt $'Question: How do you go from the den to the porch?\\nAnswer:'
    fminfer run requests.jsonl
    fminfer run --infer-data shards/ --model-name /models/llama --output answers/
    fminfer run requests.jsonl --random-init llama-160m --stats stats.json
    zstdcat requests.jsonl.zst | fminfer run -q - > answers.jsonl 2> errors.jsonl
    fminfer run --model-name /models/llama --batch-size 8 --input-seq-length 512

    Each line is one request, {"request": {…}, …} or an OpenAI Batch line, and is answered in its
    own shape, in the order of the input. A line that cannot be answered stands in
    <output>.errors.jsonl with what is wrong and what to do, and costs no other line. The output's
    name appears when it is complete; <output>.status.json says how far it is.

    Without input but with a flag of made-up requests, such as --batch-size, the run is synthetic.
    It makes prompts up, tells how fast it answered them, and keeps answers only with --output.

    \b
    Exit status: 0 every line answered; 1 the run failed; 2 wrong usage;
    3 finished, some lines are in the errors file; 75 out of time (--deadline, or a scheduler's
    warning); 129 hung up; 130 interrupted; 143 terminated. After 1, 75, 129, 130 and 143 the same
    command goes on where the run ended.

    Environment: FMINFER_CPU=avx2, avx512 or avx512_bf16 holds a newer processor to those
    instructions, so that it computes as an older one would.
    """
    options["dtype"] = dtype_name(fp16, options["dtype"])
    rank_options = {field.name: options.pop(field.name) for field in fields(RankConfig)}
    hyperparameters = Hyperparameters(**{f.name: options.pop(f.name) for f in _HYPERPARAMETERS})
    is_rank, stopper = False, Stopper(grace_s, is_quiet=quiet)
    given, named = [*infer_data, *paths], infer_data_of(os.environ)
    files = given or [named] if named is not None else given
    remote = RemoteFolders(work_dir or default_work_dir(), is_quiet=quiet)
    job = JobPaths(files, output, restart, stats, trace, quiet, verbose, remote, is_watching)
    request = None if prompt is None else {"prompt": prompt} | hyperparameters.request_fields
    job = replace(job, limit=limit, prompt=request)
    try:
        ranks, config = RankConfig(**rank_options), EngineConfig(**options, is_only_run=True)
        if prompt is not None and (hyperparameters.input_seq_length or hyperparameters.batch_size):
            raise UsageError(
                "--input-seq-length and --batch-size are of prompts that are made up; leave them "
                "out with --prompt"
            )
        if prompt is None and not files and hyperparameters.flags:
            job, config = _make_up(job, config, hyperparameters)
        elif prompt is None and is_overwriting:
            config = replace(config, request_args=_request_args(hyperparameters))
        check_times(grace_s, deadline_s)
        if deadline_s is not None:
            stopper.set_deadline(time.monotonic() + deadline_s - _elapsed_s())
        # A pipeline's first process may be told to start ranks; the flags speak of the run's own.
        is_first_process = find_place() is not None and not is_spawned()
        facts = None if is_first_process else find_facts(ranks, os.environ)
        is_rank = facts is not None
        is_first = not is_spawned() and (facts is None or not facts.rank)
        if files != given and is_first and not quiet:
            click.echo(f"Answering {named}, which is in this job's name.", err=True)
        if files and is_first and not quiet:
            _tell_ignored(hyperparameters, is_overwriting)
        status = _run(job, config, ranks, facts, stopper)
    except (Exception, KeyboardInterrupt) as error:
        _end(_tell(error, stopper, verbose), is_rank)
    sys.exit(status)


def _tell_ignored(flags: Hyperparameters, is_overwriting: bool) -> None:
    """Say which hyperparameters of the command line mean nothing for the lines of files."""
    ignored = flags.flags_of_no_line if is_overwriting else flags.flags
    own = (
        "; each line's own hyperparameters count. --overwrite-request-args puts these in their "
        "place" * (not is_overwriting)
    )
    if ignored:
        click.echo(f"{', '.join(ignored)}: only for requests that are made up{own}.", err=True)


def _request_args(flags: Hyperparameters) -> dict[str, Any]:
    """Return the fields that replace each line's own."""
    if not flags.request_fields:
        raise UsageError(
            "--overwrite-request-args has nothing to overwrite with; give hyperparameters, such as "
            "--temperature 0 --generate-seq-length 20"
        )
    return flags.request_fields


def _make_up(
    job: JobPaths, config: EngineConfig, flags: Hyperparameters
) -> tuple[JobPaths, EngineConfig]:
    """Turn a run without input into a synthetic one, in which --num-iters counts batches."""
    synthetic = Synthetic(flags, config.max_steps or NUM_BATCHES)
    max_rows = config.max_rows or synthetic.num_rows
    return replace(job, synthetic=synthetic), replace(config, max_steps=None, max_rows=max_rows)


@main.command(cls=GroupedCommand)
@bench_options
def bench(
    batch_sizes: tuple[int, ...],
    new_tokens: int,
    fp16: bool,
    is_calibration: bool,
    **options: Any,
) -> None:
    """Time the generation of short rows at several batch sizes.

    \b
    fminfer bench --random-init bloom-560m
    fminfer bench --model-name /models/bloom-7b1 --dtype bfloat16 --batch-sizes 1,8
    fminfer bench --model-name /models/bloom-7b1 --calibrate

    The figures are those of the BLOOM inference scripts: greedy generation of 100 tokens from
    inputs of a few, each batch size once, after a short row to warm up. One process; a line of JSON
    comes last.
    """
    options["dtype"] = dtype_name(fp16, options["dtype"])
    _prepare_torch()
    if options["kernels"] != "off":
        start_build()
    if is_calibration:
        return _calibrate(EngineConfig(**options))
    with _importing():
        from fminfer.bench import run_bench

    rows = []
    for figures in run_bench(EngineConfig(**options), batch_sizes, new_tokens, _elapsed_s):
        click.echo(f"{figures.to_text()}\n")
        rows.append(asdict(figures) | {"ms_per_token": figures.ms_per_token})
    click.echo("batch size        " + "".join(f"{row['batch_size']:>9}" for row in rows))
    click.echo("msecs a token     " + "".join(f"{row['ms_per_token']:>9.2f}" for row in rows))
    click.echo(json.dumps({"batches": rows}))


def _calibrate(config: EngineConfig) -> None:
    with _importing():
        from fminfer.calibration import calibrate

    click.echo(
        "Loading the model, then timing its steps: some 30 s, longer if it is slow.", err=True
    )
    bar = TimeBar("calibrate")
    try:
        found = calibrate(config, bar.update)
    finally:
        bar.close()
    for cost, seconds in zip(COSTS, found.costs.seconds, strict=True):
        click.echo(f"{seconds * 1000:12.5f} ms  {cost}")
    error, runs = found.costs.error, found.costs.whole_runs
    click.echo(
        f"{len(found.samples):,} steps, half of them predicted to {error:.0%} or better; "
        f"{len(runs)} whole runs took {min(runs):.2f} to {max(runs):.2f} times what was predicted"
    )
    click.echo("fminfer check now estimates the time of this model's runs on this machine.")
    click.echo(json.dumps({"path": str(found.path), "median_error": error, "whole_runs": runs}))


# What comes and goes in a few steps of hundreds of rows. Python's own 700 had the collector look at
# all rows' tokens so often that it took a third of the time between steps.
MOST_NEW_OBJECTS = 10_000


def _prepare_torch() -> None:
    """Settle how torch, which is not imported yet, asks for memory and waits for work.

    It takes pages of 2 MB for what is larger than that: weights and KV cache are read from end to
    end at each step. docs/performance.md has the figures.
    """
    wait_briefly()
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def _importing() -> Iterator[None]:
    """Keep the collector of garbage away from half a million objects that stay to the end.

    It would look at all of them again and again: that takes a third of the imports' time.
    """
    gc.disable()
    try:
        import_transformers()
        yield
    finally:
        gc.freeze()
        gc.set_threshold(MOST_NEW_OBJECTS)
        gc.enable()


def _run(
    job: JobPaths,
    config: EngineConfig,
    ranks: RankConfig,
    facts: RankFacts | None,
    stopper: Stopper,
) -> int:
    """Start ranks, be one of them, or do all alone; return the exit status."""
    arguments = click.get_current_context().meta["arguments"]
    place = find_place()
    if place is not None:  # one of several pipelines
        config = replace(config, num_engines=place.num_engines, engine_number=place.number)
    # Mistakes in the plan are told before anything is started or loaded; a rank's are told to all.
    plan = job.plan() if facts is None and place is None else None
    if job.trace is not None and ranks.data_group_size > 1:
        raise UsageError("--trace shows one pipeline; leave out --trace or --data-group-size")
    num_stages = ranks.size or 1
    if facts is None and num_stages > 1:
        check_split(config, num_stages)
        if place is not None:
            return launch(["run", *arguments], num_stages, (place.descriptor,))
        if ranks.data_group_size == 1:
            return launch(["run", *arguments], num_stages)
    if facts is not None:  # torch's own words on broken connections say less than ours, at length
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if facts.parent is not None:
            end_after(facts.parent)
    _prepare_torch()
    if config.kernels != "off":
        start_build()  # it runs beside the imports
    is_alone = facts is None and place is None and ranks.data_group_size == 1
    files: dict[Path, int] = {}
    if is_alone and config.model is not None and _is_for_cpu(config.device):
        files = find_weight_files(config.model)
    num_bytes = 2 * sum(files.values())  # packed, and as much for the KV cache
    with reading_files(files), touching_memory(num_bytes), _importing():
        from fminfer.running import run_process

    summary = run_process(job, plan, config, ranks, facts, stopper, _elapsed_s, place, arguments)
    if summary is not None and summary.refused:
        return EXIT_USAGE
    return EXIT_SOME_ERRORS if summary is not None and summary.has_errors else 0


def _is_for_cpu(device: str) -> bool:
    """Tell, without torch, whether a run will most likely compute on the CPU."""
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPU_DRIVERS)))


def _elapsed_s() -> float:
    return time.perf_counter() - STARTED_S


def _tell(error: BaseException, stopper: Stopper, verbose: bool) -> int:
    """Say what ended the run; return the exit status."""
    if isinstance(error, KeyboardInterrupt):  # told twice
        error = stopper.reason or StoppedError("Interrupted.", "cancelled", 130)
    if isinstance(error, StoppedError):
        click.echo(str(error), err=True)
        return error.exit_status
    if isinstance(error, BrokenPipeError):
        error = FminferError("whoever read the answers stopped reading")
    if verbose or not isinstance(error, FminferError):
        click.echo(hide_secrets("".join(traceback.format_exception(error))), err=True, nl=False)
    click.echo(f"Error: {printable(hide_secrets(str(error)))}", err=True)
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _end(status: int, is_rank: bool) -> None:
    """Exit; a rank at once, for its threads may wait for others that are gone."""
    try:
        sys.stdout.flush()
    except OSError:  # told before; Python is not to try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_rank:
        abandon_build()
        os._exit(status)
    sys.exit(status)

"""The command line: flags in, exit status out. Heavy imports wait until a run needs them."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from fminfer.answers.cache_place import KeptAnswers
from fminfer.cli.bench_command import bench
from fminfer.cli.check_command import check
from fminfer.cli.config_file import ConfiguredCommand, print_notices
from fminfer.cli.doctor_command import doctor
from fminfer.cli.families_command import families
from fminfer.cli.flags import PathOrUrl, make_flags
from fminfer.cli.old_command_lines import describe_unknown_command, unknown_option_error
from fminfer.cli.process import (
    EXIT_SOME_ERRORS,
    EXIT_STOPPED,
    EXIT_USAGE,
    Ending,
    elapsed_s,
    importing_engine,
    print_error,
    starting_process,
)
from fminfer.cli.quantize_command import quantize
from fminfer.cli.report_command import report
from fminfer.cli.serve_command import serve
from fminfer.cli.serve_part_command import serve_part
from fminfer.cli.split_command import merge, split
from fminfer.cli.status_command import status
from fminfer.cli.submit_command import submit
from fminfer.client.remote_options import RemoteOptions, check_no_model_flags
from fminfer.cluster.slurm_and_lsf import find_old_job_path
from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, UsageError
from fminfer.core.option import pop_options
from fminfer.core.version import __version__
from fminfer.files.storage import Location, RemoteFolders, default_work_dir
from fminfer.files.tables.table_options import TableOptions
from fminfer.job.run_paths import JobOptions, JobPaths, RunContext, check_no_other_model
from fminfer.job.run_summary import JobSummary
from fminfer.job.synthetic import NUM_BATCHES, Hyperparameters, Synthetic
from fminfer.machine.processor import cap_libraries
from fminfer.machine.stopper import ProcessOptions, check_times
from fminfer.pipeline.ranks import RankConfig
from fminfer.runtime.launch.role import Role, find_role


class _Commands(click.Group):
    """Prints what ended a command; `run` prints it itself."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a file's name may hold any bytes
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        words = [*ctx.args]
        try:
            cap_libraries()
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise unknown_option_error(error, words, self.commands) from None
        except BrokenPipeError:
            raise  # click ends such a command silently
        except (FminferError, OSError) as error:
            sys.exit(print_error(error))
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(EXIT_STOPPED["interrupted"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; name ours for one of another tool before click guesses."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (text := describe_unknown_command(cmd_name)):
            raise click.UsageError(f"No such command {cmd_name!r}. {text}.", ctx)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fminfer")
def main() -> None:
    """Answer completions and chat requests with a language model: of files, or as a server.

    \b
    fminfer run --prompt "How do you go from the den to the porch?"     print one answer
    fminfer run requests.jsonl                      write the answers to output_requests.jsonl
    fminfer run --help                              show its common flags; --help-all: every one
    fminfer serve /models/llama                     OpenAI's API over HTTP, and a page to chat on
    fminfer check requests.jsonl                    find wrong lines, predict memory
    fminfer status shards/                          show the progress of runs
    fminfer report output_requests.jsonl            write an HTML page about answers
    fminfer families                                list the model families that run
    fminfer quantize --model-name M --output M-int4 --to int4      write a model in 8 or 4 bits
    fminfer bench --random-init bloom-560m          time a token at several batch sizes
    fminfer split --input-file requests.jsonl --output-dir parts/
    fminfer merge --input-dir parts/ --output answers.jsonl
    fminfer submit --scheduler slurm --infer-data shards/     send a cluster job for each file
    fminfer doctor                                  show what to paste into a report
    """


service = click.Group(
    "service",
    {"init": serve},
    hidden=True,
    help="Start a server as EnergonAI does: service init --config_file FILE.",
)
for command in (
    serve,
    check,
    split,
    merge,
    submit,
    status,
    report,
    families,
    quantize,
    bench,
    doctor,
):
    main.add_command(command)
main.add_command(service)
main.add_command(serve_part)


@main.command(cls=ConfiguredCommand, settings_of="run", params=make_flags("run"))
@click.argument("paths", nargs=-1, type=PathOrUrl(path_type=Path))
def run(paths: tuple[Location, ...], **options: Any) -> None:
    """Answer every line of the given files.

    \b
    fminfer run --prompt "How do you go from the den to the porch?"
    fminfer run requests.jsonl
    fminfer run --infer-data shards/ --model-name /models/llama --output answers/
    fminfer run reviews.csv --prompt-template 'Is it good? {{ text }}' --choices yes,no
    \f
    \b
    fminfer run requests.jsonl --random-init llama-160m --stats stats.json
    zstdcat requests.jsonl.zst | fminfer run -q - > answers.jsonl 2> errors.jsonl
    fminfer run --model-name /models/llama --batch-size 8 --input-seq-length 512

    Each line is a bare request, {"request": {…}, …} or an OpenAI Batch line. Its answer has the
    same shape. Answers are in the order of the input. A wrong line goes to
    <output>.errors.jsonl, with the reason and what to do; all other lines are answered.
    The output appears under its name when it is complete. <output>.status.json shows
    the progress.

    Without input but with a flag of made-up requests, such as --batch-size, the run is
    synthetic. It makes prompts up, prints its speed, and keeps answers only with --output.

    \b
    Exit status: 0 every line answered; 1 the run failed; 2 wrong usage;
    3 finished, some lines are in the errors file; 75 out of time (--deadline, or a scheduler's
    warning); 129 hung up; 130 interrupted; 143 terminated. After 1, 75, 129, 130 and
    143 the same command goes on where the run ended.

    Environment: FMINFER_MODEL_NAME and so on set flags, as --config's file does.
    FMINFER_CPU=avx2, avx512, avx512_bf16 or amx limits a newer processor to those
    instructions, so that it computes as an older one would.
    """
    process = pop_options(ProcessOptions, options)
    ending = Ending(
        process.grace_s, is_quiet=process.is_quiet, is_verbose=process.is_verbose
    )
    try:
        status = _run_files(paths, options, process, ending)
    except (Exception, KeyboardInterrupt) as error:
        ending.fail(error)
    sys.exit(status)


def _run_files(
    paths: Sequence[Location],
    options: dict[str, Any],
    process: ProcessOptions,
    ending: Ending,
) -> int:
    """Do this process's part of `fminfer run`; return the exit status."""
    is_quiet = process.is_quiet
    flags = pop_options(Hyperparameters, options)
    job_options = pop_options(JobOptions, options)
    named_file = find_old_job_path(os.environ)
    typed_files = [*job_options.infer_data, *paths]
    files = typed_files
    if not files and named_file is not None:
        files = [named_file]

    table = pop_options(TableOptions, options)
    job = JobPaths(
        **vars(job_options),
        table=table,
        paths=files,
        is_quiet=is_quiet,
        remote=RemoteFolders(
            job_options.work_dir or default_work_dir(),
            is_quiet=is_quiet,
            has_rows=table.has_template,
        ),
        prompt_fields=flags.request_fields,
        result_cache=pop_options(KeptAnswers, options).cache_place,
    )
    ranks = pop_options(RankConfig, {**options})
    config = pop_options(EngineConfig, options)
    remote = pop_options(RemoteOptions, options)
    if remote.engine is not None:
        check_no_model_flags(ranks, config)
        _check_remote_job(job, flags)
    _check_prompt_flags(job, config, flags)
    if job.prompt is None and not files and flags.flags and not table.has_template:
        job, config = _make_synthetic_job(job, config, flags)
    elif job.prompt is None and flags.is_overwriting:
        config = replace(config, request_args=flags.request_fields)
    check_times(process.grace_s, job.deadline_s)
    if job.deadline_s is not None:
        ending.stopper.deadline_s = time.monotonic() + job.deadline_s - elapsed_s()

    # Runs on servers elsewhere share files, and are no ranks of each other.
    role = find_role(ranks, os.environ if remote.engine is None else {})
    if role.is_first and not is_quiet:
        print_notices(is_quiet=is_quiet)
        if files != typed_files:
            click.echo(
                f"Answering {named_file}, which is in this job's name.", err=True
            )
        if files:
            _warn_of_ignored_flags(flags, has_rows=table.has_template)
    if remote.engine is not None:
        return _run_remote_job(job, config, remote, role, ending)
    return _run_job(job, config, role, ending)


def _check_remote_job(job: JobPaths, flags: Hyperparameters) -> None:
    """Raise a UsageError for what needs a model in this process."""
    is_made_up = not job.paths and flags.flags and not job.table.has_template
    for flag, is_set in {
        "--prompt": job.prompt is not None,
        "--trace": job.trace is not None,
        next(iter(flags.flags), ""): is_made_up,
    }.items():
        if is_set:
            raise UsageError(
                f"{flag} needs a model that is loaded here, and --engine has servers "
                "answer files. Leave one of the two out"
            )


def _check_prompt_flags(
    job: JobPaths, config: EngineConfig, flags: Hyperparameters
) -> None:
    if job.prompt is not None and (flags.input_seq_length or flags.batch_size):
        raise UsageError(
            "--input-seq-length and --batch-size are of prompts that are made up; "
            "leave them out with --prompt"
        )
    has_text = job.prompt is not None or job.table.has_template
    if job.is_raw and not has_text:
        raise UsageError(
            "--raw needs --prompt or --prompt-template; add one, or leave --raw out"
        )
    if job.is_raw and config.chat_template is not None:
        raise UsageError("--raw and --chat-template exclude each other; leave one out")


def _warn_of_ignored_flags(flags: Hyperparameters, *, has_rows: bool) -> None:
    """Say which request parameters of the command line have no effect on lines of files."""
    sets_fields = flags.is_overwriting or has_rows
    ignored = flags.flags_of_no_line if sets_fields else flags.flags
    if not ignored:
        return
    text = f"{', '.join(ignored)}: only for requests that are made up"
    if not sets_fields:
        text += (
            "; each line's own hyperparameters count. --overwrite-request-args puts these "
            "in their place"
        )
    click.echo(f"{text}.", err=True)


def _make_synthetic_job(
    job: JobPaths, config: EngineConfig, flags: Hyperparameters
) -> tuple[JobPaths, EngineConfig]:
    """Turn a run without input into a synthetic one, in which --num-iters counts batches."""
    synthetic = Synthetic(flags, config.max_steps or NUM_BATCHES)
    max_rows = config.max_rows or synthetic.num_rows
    return replace(job, synthetic=synthetic), replace(
        config, max_steps=None, max_rows=max_rows
    )


def _run_remote_job(
    job: JobPaths,
    config: EngineConfig,
    options: RemoteOptions,
    role: Role,
    ending: Ending,
) -> int:
    """Have servers answer a run's files; return the exit status."""
    make_context = partial(RunContext, job=job, output_paths=job.find_output_paths())
    with starting_process(
        make_context, config, role, ending, is_quiet=job.is_quiet
    ) as process:
        from fminfer.job.remote_answering import run_remote

        return _choose_exit_status(run_remote(process, options))


def _run_job(job: JobPaths, config: EngineConfig, role: Role, ending: Ending) -> int:
    """Do this process's part of a run; return the exit status."""
    if job.trace is not None and role.spread.num_pipelines > 1:
        raise UsageError(
            "--trace shows one pipeline; leave out --trace or --data-group-size"
        )
    # Mistakes in the paths are printed before anything is started or loaded.
    # Those of a rank are sent to all ranks.
    output_paths = job.find_output_paths() if role.kind != "apart" else None
    check_no_other_model(
        config,
        output_paths.inputs if output_paths else [],
        has_rows=job.table.has_template,
    )
    make_context = partial(RunContext, job=job, output_paths=output_paths)
    with starting_process(
        make_context, config, role, ending, is_quiet=job.is_quiet
    ) as process:
        with importing_engine(config, role):
            from fminfer.job.model_answering import run_process
        summary = run_process(process)
    return _choose_exit_status(summary)


def _choose_exit_status(summary: JobSummary | None) -> int:
    if summary is not None and summary.refused:
        return EXIT_USAGE
    return EXIT_SOME_ERRORS if summary is not None and summary.has_errors else 0

"""`fminfer check`: what a run of these files would meet, before any weight is read."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
from click.core import ParameterSource

from fminfer.cli.config_file import ConfiguredCommand, print_notices
from fminfer.cli.flags import PathOrUrl, make_flags
from fminfer.cli.option_table import CheckOptions
from fminfer.cli.process import EXIT_FAILED, EXIT_SOME_ERRORS, print_wrapped
from fminfer.cli.refusals import Refusals
from fminfer.client.remote_options import RemoteOptions, check_no_model_flags
from fminfer.core.config import EngineConfig, GroupSizes
from fminfer.core.errors import UsageError
from fminfer.core.option import pop_options
from fminfer.core.terminal import find_width
from fminfer.files.input_folders import (
    describe_empty_files,
    describe_left_out,
    find_inputs,
)
from fminfer.files.storage import Location, RemoteFolders, default_work_dir
from fminfer.files.tables.table_options import RowRequests, TableOptions
from fminfer.job.run_paths import JobOptions, check_no_other_model
from fminfer.job.synthetic import Hyperparameters
from fminfer.machine.library_imports import import_transformers
from fminfer.plan.roofs import PlanOptions


@click.command(cls=ConfiguredCommand, settings_of="run", params=make_flags("check"))
@click.argument("paths", nargs=-1, type=PathOrUrl(path_type=Path))
def check(paths: tuple[Location, ...], **options: Any) -> None:
    """Check every line of the given files, and predict what their run takes.

    \b
    fminfer check requests.jsonl
    fminfer check shards/ --model-name /models/llama --dtype bfloat16 --json > report.json
    fminfer check requests.jsonl --model-name /models/opt-175b --world-size 8 --device-memory 80G
    fminfer check requests.jsonl --random-init bloom-176b --plan --device-kind h200
    --num-devices 8
    \f

    It checks lines as `fminfer run` does, with the same messages. It prints each
    message once, with the numbers of its lines. It counts their tokens, and shows the
    first prompt as the model will see it. It reads no weights.

    A table shows the memory that each rank takes, and how much KV cache fits beside the weights.
    --device-memory plans for another machine. Memory and micro-batches are upper bounds, as if
    every row generated all of its max_tokens. Time is an estimate. It is told once
    `fminfer bench --calibrate` has timed the same model with the same options on this
    machine. --plan compares the ways to spread the run over devices, here or elsewhere,
    with the time predicted for each.

    With --engine no model is opened. Lines are checked as far as that goes without one,
    and the servers get one request of one token for each set of fields.

    \b
    Exit status: 0 every line is right; 1 the model does not run or does not fit; 2 wrong usage;
    3 some lines are wrong.
    """
    check_options = pop_options(CheckOptions, options)
    plan_options = pop_options(PlanOptions, options)
    pop_options(GroupSizes, {**options})  # its errors name flags
    job_options = pop_options(JobOptions, options)
    table = pop_options(TableOptions, options)
    row_fields = _make_row_fields(options, job_options, table)
    config = pop_options(EngineConfig, options)
    remote = pop_options(RemoteOptions, options)
    if remote.engine is not None:
        check_no_model_flags(config)
    print_notices(is_quiet=check_options.is_json)
    inputs = _find_inputs(
        (*job_options.infer_data, *paths),
        is_quiet=check_options.is_json,
        has_rows=table.has_template,
    )
    row_requests = RowRequests(table, row_fields, is_raw=job_options.is_raw)
    if remote.engine is not None:
        sys.exit(
            _print_remote_report(config, remote, check_options, inputs, row_requests)
        )
    check_no_other_model(config, inputs, has_rows=table.has_template)
    sys.exit(_print_report(config, plan_options, check_options, inputs, row_requests))


def _make_row_fields(
    options: dict[str, Any], job_options: JobOptions, table: TableOptions
) -> dict[str, Any]:
    """Return the fields that flags set in the requests of rows; lines have their own."""
    flags = pop_options(Hyperparameters, options)
    typed = [*flags.flags, *(["--raw"] if job_options.is_raw else [])]
    if typed and not table.has_template:
        raise UsageError(
            f"{typed[0]} is for requests made of rows, and there is no "
            f"--prompt-template. Add one, or leave {typed[0]} out"
        )
    return flags.request_fields


def _find_inputs(
    paths: Sequence[Location], *, is_quiet: bool, has_rows: bool
) -> list[Path]:
    """Return the input files, fetched from URLs; print what is left out."""
    remote = RemoteFolders(default_work_dir(), is_quiet=is_quiet, has_rows=has_rows)
    local = [file for path in paths for file in remote.fetch_inputs(path)]
    inputs = find_inputs(local, has_rows=has_rows)
    folders = [path for path in paths if isinstance(path, Path) and path.is_dir()]
    for text in describe_left_out(folders, has_lost=True, has_rows=has_rows):
        click.echo(f"Left out: {text}.", err=True)
    for text in describe_empty_files(inputs):
        click.echo(f"Warning: {text}.", err=True)
    if not inputs:
        raise UsageError(
            "no input; give a .jsonl file, as in: fminfer check requests.jsonl"
        )
    return inputs


def _print_report(
    config: EngineConfig,
    plan_options: PlanOptions,
    check_options: CheckOptions,
    inputs: list[Path],
    row_requests: RowRequests,
) -> int:
    """Check the lines and plan their run; print both. Return the exit status."""
    import_transformers()
    from fminfer.estimate.checking import Check  # imports torch

    is_json = check_options.is_json
    with tempfile.TemporaryFile() as spool:
        errors = _ErrorPrinter(inputs, spool, check_options)
        checker = Check(
            config,
            plan_options,
            check_options.device_bytes,
            has_weights=not check_options.no_weights,
            kept=_find_set_options(),
        )
        report = checker.run(
            inputs, errors.add, is_quiet=is_json, row_requests=row_requests
        )

        if is_json:
            _print_json_report(report.to_dict(), spool)
        else:
            errors.print_reasons()
            columns = find_width(sys.stdout)
            print_wrapped(report.to_text(is_all=check_options.is_all, columns=columns))
    if not report.fits:
        return EXIT_FAILED
    return EXIT_SOME_ERRORS if report.counts.num_wrong else 0


def _print_remote_report(
    config: EngineConfig,
    remote: RemoteOptions,
    check_options: CheckOptions,
    inputs: list[Path],
    row_requests: RowRequests,
) -> int:
    """Check the lines and try their fields at servers; return the exit status."""
    from fminfer.client.remote_check import RemoteCheck

    with tempfile.TemporaryFile() as spool:
        errors = _ErrorPrinter(inputs, spool, check_options)
        report = RemoteCheck(config, remote).run(inputs, row_requests, errors.add)
        if check_options.is_json:
            _print_json_report(report.to_dict(), spool)
        else:
            errors.print_reasons()
            print_wrapped(report.to_text())
    return 0 if report.is_right else EXIT_SOME_ERRORS


def _find_set_options() -> set[str]:
    """Return the names of the options that the user has set."""
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not ParameterSource.DEFAULT
    }


class _ErrorPrinter:
    """Prints wrong lines by reason, or each by itself. For JSON all go to a file."""

    def __init__(
        self, inputs: list[Path], spool: BinaryIO, options: CheckOptions
    ) -> None:
        self._inputs = inputs
        self._spool = spool
        self._options = options
        self._refusals = Refusals(inputs)
        self._num_errors = 0

    def add(self, record: Any) -> None:
        error = record.error
        file = str(self._inputs[record.line.source])
        text = f"{error.message} ({error.code})"
        self._num_errors += 1
        if self._options.is_json:
            fields = {
                "file": file,
                "line": record.line.number,
                "code": error.code,
                "message": error.message,
                "param": error.param,
            }
            comma = b", " if self._num_errors > 1 else b""
            self._spool.write(comma + json.dumps(fields).encode())
        elif self._options.is_all:
            from tqdm import tqdm

            tqdm.write(f"{file}:{record.line.number}: {text}", sys.stdout)
        else:
            self._refusals.add(
                record.line.source, record.line.number, text, error.param
            )

    def print_reasons(self) -> None:
        """Print the reasons that were gathered."""
        for line in self._refusals.describe_reasons():
            print_wrapped(line)


def _print_json_report(fields: dict[str, Any], errors: BinaryIO) -> None:
    """Print the report as one object on one line, the errors copied from their file."""
    out = sys.stdout.buffer
    out.write(json.dumps(fields)[:-1].encode() + b', "errors": [')
    errors.seek(0)
    shutil.copyfileobj(errors, out)
    out.write(b"]}\n")
    out.flush()

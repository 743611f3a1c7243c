"""`fminfer check`: what a run of these files would meet, told before any weight is read."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import click
from click.core import ParameterSource

from fminfer.cli.config_file import ConfiguredCommand, tell_notices
from fminfer.cli.flags import PathOrUrl, flags_of
from fminfer.cli.option_table import CheckOptions
from fminfer.cli.process import EXIT_FAILED, EXIT_SOME_ERRORS, show
from fminfer.cli.refusals import Refusals
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
from fminfer.job.run_paths import JobOptions, check_no_other_model
from fminfer.machine.library_imports import import_transformers
from fminfer.plan.roofs import PlanOptions


@click.command(cls=ConfiguredCommand, settings_of="run", params=flags_of("check"))
@click.argument("paths", nargs=-1, type=PathOrUrl(path_type=Path))
def check(paths: tuple[Location, ...], **options: Any) -> None:
    """Check every line of the given files, and predict what their run takes.

    \b
    fminfer check requests.jsonl
    fminfer check shards/ --model-name /models/llama --dtype bfloat16 --json > report.json
    fminfer check requests.jsonl --model-name /models/opt-175b --world-size 8 --device-memory 80G
    fminfer check requests.jsonl --random-init bloom-176b --plan --device-kind h200
    --num-devices 8

    It checks lines as `fminfer run` does, with the same messages. It prints each
    message once, with the numbers of its lines. It counts their tokens, and shows the
    first prompt as the model will see it. It reads no weights.

    A table shows the memory that each rank takes, and how much KV cache fits beside the weights.
    --device-memory plans for another machine. Memory and micro-batches are upper bounds, as if
    every row generated all of its max_tokens. Time is an estimate. It is told once
    `fminfer bench --calibrate` has timed the same model with the same options on this
    machine. --plan compares the ways to spread the run over devices, here or elsewhere,
    with the time predicted for each.

    \b
    Exit status: 0 every line is right; 1 the model does not run or does not fit; 2 wrong usage;
    3 some lines are wrong.
    """
    asked = pop_options(CheckOptions, options)
    planned = pop_options(PlanOptions, options)
    pop_options(GroupSizes, {**options})  # its errors name flags
    paths = (*pop_options(JobOptions, options).infer_data, *paths)
    config = pop_options(EngineConfig, options)
    tell_notices(is_quiet=asked.is_json)
    remote = RemoteFolders(default_work_dir(), is_quiet=asked.is_json)
    inputs = find_inputs([file for path in paths for file in remote.fetch_inputs(path)])
    folders = [path for path in paths if isinstance(path, Path) and path.is_dir()]
    for text in describe_left_out(folders, has_lost=True):
        click.echo(f"Left out: {text}.", err=True)
    for text in describe_empty_files(inputs):
        click.echo(f"Warning: {text}.", err=True)
    if not inputs:
        raise UsageError(
            "no input; give a .jsonl file, as in: fminfer check requests.jsonl"
        )
    check_no_other_model(config, inputs)
    import_transformers()
    from fminfer.estimate.checking import Check  # imports torch

    with tempfile.TemporaryFile() as spool:
        errors = _Errors(inputs, spool, asked)
        context = click.get_current_context()
        sources = {name: context.get_parameter_source(name) for name in context.params}
        found = Check(
            config,
            planned,
            asked.device_bytes,
            has_weights=not asked.no_weights,
            kept={
                name
                for name, of in sources.items()
                if of is not ParameterSource.DEFAULT
            },
        )
        report = found.run(inputs, errors.add, is_quiet=asked.is_json)
        if asked.is_json:
            _print_json(report.to_dict(), spool)
        else:
            errors.tell_rest()
            show(report.to_text(is_all=asked.is_all, columns=find_width(sys.stdout)))
    if not report.fits:
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_SOME_ERRORS if report.counts.num_wrong else 0)


class _Errors:
    """Prints wrong lines by reason, or each by itself. For JSON all go to a file."""

    def __init__(
        self, inputs: list[Path], spool: BinaryIO, asked: CheckOptions
    ) -> None:
        self._inputs = inputs
        self._spool = spool
        self._asked = asked
        self._refusals = Refusals(inputs)
        self._num = 0

    def add(self, record: Any) -> None:
        error = record.error
        file = str(self._inputs[record.line.source])
        text = f"{error.message} ({error.code})"
        self._num += 1
        if self._asked.is_json:
            fields = {
                "file": file,
                "line": record.line.number,
                "code": error.code,
                "message": error.message,
                "param": error.param,
            }
            comma = b", " if self._num > 1 else b""
            self._spool.write(comma + json.dumps(fields).encode())
        elif self._asked.is_all:
            from tqdm import tqdm

            tqdm.write(f"{file}:{record.line.number}: {text}", sys.stdout)
        else:
            self._refusals.add(
                record.line.source, record.line.number, text, error.param
            )

    def tell_rest(self) -> None:
        """Print the reasons that were gathered."""
        for line in self._refusals.lines():
            show(line)


def _print_json(fields: dict[str, Any], errors: BinaryIO) -> None:
    """Print the report as one object on one line, the errors copied from their file."""
    out = sys.stdout.buffer
    out.write(json.dumps(fields)[:-1].encode() + b', "errors": [')
    errors.seek(0)
    shutil.copyfileobj(errors, out)
    out.write(b"]}\n")
    out.flush()

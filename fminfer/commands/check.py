"""`fminfer check`: what a run of these files would meet, told before any weight is read."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import click

from fminfer.config import EngineConfig
from fminfer.errors import UsageError
from fminfer.input.files import find_inputs
from fminfer.run_options import check_options, dtype_name

MAX_TOLD = 20  # wrong lines, unless all are asked for
EXIT_SOME_WRONG = 3


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@check_options
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, all errors in it.")
@click.option("--all", "is_all", is_flag=True, help=f"Print all errors, not the first {MAX_TOLD}.")
def check(
    paths: tuple[Path, ...],
    infer_data: tuple[Path, ...],
    world_size: int | None,
    fp16: bool,
    is_json: bool,
    is_all: bool,
    **options: Any,
) -> None:
    """Check every line of the given files, and predict what their run takes.

    \b
    fminfer check requests.jsonl
    fminfer check shards/ --model-name /models/llama --dtype bfloat16 --json > report.json

    Lines are checked as `fminfer run` does, with the same messages, and their tokens are counted;
    the first prompt is shown as the model will see it. Memory, micro-batches and time are predicted
    for rows that all draw max_tokens, so they are upper bounds; time only after
    `fminfer bench --calibrate` with the same model and options on this machine. No weight is read.

    \b
    Exit status: 0 every line is right; 1 the model does not run; 2 wrong usage;
    3 some lines are wrong.
    """
    options["dtype"] = dtype_name(fp16, options["dtype"])
    config = EngineConfig(**options)
    if world_size is not None and world_size < 1:
        raise UsageError(f"--world-size is {world_size}; it must be at least 1")
    inputs = find_inputs([*infer_data, *paths])
    if not inputs:
        raise UsageError("no input; give a .jsonl file, as in: fminfer check requests.jsonl")
    from fminfer.check.checking import Check  # imports torch

    with tempfile.TemporaryFile() as spool:
        errors = _Errors(inputs, spool, None if is_all or is_json else MAX_TOLD, is_json)
        report = Check(config, world_size or 1).run(inputs, errors.add, is_quiet=is_json)
        if is_json:
            _print_json(report.to_dict(), spool)
        else:
            errors.tell_rest()
            click.echo(report.to_text())
    sys.exit(EXIT_SOME_WRONG if report.counts.num_wrong else 0)


class _Errors:
    """Tells wrong lines as they are met; for JSON they go to a file, however many there are."""

    def __init__(
        self, inputs: list[Path], spool: BinaryIO, most: int | None, is_json: bool
    ) -> None:
        self._inputs, self._spool, self._most, self._is_json = inputs, spool, most, is_json
        self._num = 0

    def add(self, record: Any) -> None:
        error, file = record.error, str(self._inputs[record.line.source])
        self._num += 1
        if self._is_json:
            fields = {"file": file, "line": record.line.number, "code": error.code}
            fields |= {"message": error.message, "param": error.param}
            comma = b", " if self._num > 1 else b""
            self._spool.write(comma + json.dumps(fields).encode())
        elif self._most is None or self._num <= self._most:
            from tqdm import tqdm

            tqdm.write(f"{file}:{record.line.number}: {error.message} ({error.code})", sys.stdout)

    def tell_rest(self) -> None:
        if self._most is not None and self._num > self._most:
            click.echo(f"… and {self._num - self._most:,} more; --all shows them")


def _print_json(fields: dict[str, Any], errors: BinaryIO) -> None:
    """Print the report as one object on one line, the errors copied from their file."""
    out = sys.stdout.buffer
    out.write(json.dumps(fields)[:-1].encode() + b', "errors": [')
    errors.seek(0)
    shutil.copyfileobj(errors, out)
    out.write(b"]}\n")
    out.flush()

"""`fminfer quantize` writes a model's folder in 8 or 4 bits."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing
from typing import Any

import click

from fminfer.cli.flags import GroupedCommand, make_flags
from fminfer.cli.option_table import QuantizeOptions
from fminfer.cli.process import EXIT_STOPPED
from fminfer.core.config import ModelOptions
from fminfer.core.errors import UsageError
from fminfer.core.option import pop_options
from fminfer.core.quantities import describe_bytes, describe_seconds
from fminfer.files.claims import claiming_output
from fminfer.files.disk import making_folder, raising_disk_errors
from fminfer.machine.library_imports import importing_libraries
from fminfer.runtime.bars import LoadingBar


@click.command(cls=GroupedCommand, params=make_flags("quantize"))
def quantize(seed: int, **options: Any) -> None:
    """Write a folder of a model whose weights have 8 or 4 bits.

    \b
    fminfer quantize --model-name /models/llama --output /models/llama-int4 --to int4
    fminfer run requests.jsonl --model-name /models/llama-int4

    Answers are the same as with fminfer run --quantize. The folder is smaller, and
    loads faster. It runs on every processor, but only fminfer reads it. It appears once
    all of it is on the disk. If it is already there, made of the same model, the
    command says so and ends with 0.
    """
    quantize_options = pop_options(QuantizeOptions, options)
    model_options = pop_options(ModelOptions, options)
    output = quantize_options.output
    to = quantize_options.to
    if output is None:
        raise click.UsageError("Missing option '--output'.")
    with importing_libraries():
        from fminfer.models.checkpoint import open_model
        from fminfer.models.quantized_folder import (
            is_quantized_copy,
            write_quantized_folder,
        )
    start_s = time.monotonic()
    # An exit removes the draft; a signal would leave it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED["terminated"]))
    checkpoint = open_model(model_options)
    output = output.resolve()
    with raising_disk_errors(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
    with claiming_output(output):
        if is_quantized_copy(output, checkpoint, to, seed=seed):
            return click.echo(
                f"{output} is already there: {checkpoint.name} in {to}", err=True
            )
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UsageError(
                f"--output {output} is there already; name a folder that is new or empty"
            )
        with (
            closing(LoadingBar(is_quiet=False)) as show,
            making_folder(output) as draft,
        ):
            num_bytes = write_quantized_folder(
                checkpoint, draft, to, seed=seed, on_progress=show
            )
    took = describe_seconds(time.monotonic() - start_s)
    click.echo(
        f"{output}: {checkpoint.name} in {to}, {describe_bytes(num_bytes)}, in {took}",
        err=True,
    )

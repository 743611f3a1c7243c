"""`fminfer quantize` writes a model's folder in 8 or 4 bits."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import get_args

import click

from fminfer.cli.ending import EXIT_STOPPED
from fminfer.core.config import ModelOptions, Quantized
from fminfer.core.quantities import show_bytes, show_seconds
from fminfer.machine.start_up import importing


@click.command()
@click.option("--model-name", "--model", help="A local folder or a Hugging Face hub id.")
@click.option(
    "--random-init",
    metavar="CONFIG_OR_SIZE",
    help="Random weights in the shape of a config.json, a hub id or a known size.",
)
@click.option(
    "--tokenizer", metavar="FOLDER_OR_ID", help="A tokenizer.  [default: the model's own]"
)
@click.option(
    "--model-config", metavar="CONFIG_OR_SIZE", help="A config.  [default: the model's own]"
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option(
    "--to",
    type=click.Choice(get_args(Quantized)),
    default="int8",
    show_default=True,
    help="The format, as in fminfer run --quantize.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder to write. It must be new or empty.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of random weights.")
def quantize(
    model_name: str | None,
    random_init: str | None,
    tokenizer: str | None,
    model_config: str | None,
    revision: str | None,
    to: str,
    output: Path,
    seed: int,
) -> None:
    """Write a folder of a model whose weights have 8 or 4 bits.

    \b
    fminfer quantize --model-name /models/llama --output /models/llama-int4 --to int4
    fminfer run requests.jsonl --model-name /models/llama-int4

    Answers are the same as with fminfer run --quantize. The folder is smaller, and loads at the
    speed of the disk. It runs on every processor, but only fminfer reads it.
    """
    with importing():
        from tqdm import tqdm

        from fminfer.models.quantized_folder import write_quantized
        from fminfer.plan.opening import open_model
    named = ModelOptions(
        model_name,
        random_init,
        tokenizer=tokenizer,
        model_config=model_config,
        revision=revision,
    )
    start_s = time.monotonic()
    status = EXIT_STOPPED["terminated"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))  # the draft is removed
    checkpoint = open_model(named)
    with tqdm(unit="B", unit_scale=True, desc="quantizing", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        num_bytes = write_quantized(checkpoint, output, to, seed=seed, on_progress=show)
    took = show_seconds(time.monotonic() - start_s)
    click.echo(f"{output}: {checkpoint.name} in {to}, {show_bytes(num_bytes)}, in {took}", err=True)

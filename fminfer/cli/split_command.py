"""`fminfer split` makes a folder of parts of a file, and `fminfer merge` one file of answers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from fminfer.cli.flags import NamedPath
from fminfer.cli.process import EXIT_SOME_ERRORS
from fminfer.core.quantities import with_noun

_path_option = partial(click.option, type=NamedPath(path_type=Path), required=True)


@click.command()
@_path_option(
    "--input-file",
    help="The file to split: .jsonl, .ndjson or .json, also .gz or .zst; - is stdin.",
)
@_path_option(
    "--output-dir", help="The folder for the parts, created if its parent is there."
)
@click.option(
    "--min-generate-token",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Least number of tokens to generate that a request counts as.",
)
@click.option(
    "--generate-token-chunk-size",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="Most tokens to generate in one part; a part holds at least one request.",
)
@click.option(
    "--flat",
    "is_flat",
    is_flag=True,
    help="Put the parts into the output folder itself, for a loop over request_<N>.jsonl.",
)
def split(input_file: Path, output_dir: Path, **options: Any) -> None:
    """Split a file into parts of one engine and equal parameters, long prompts first.

    \b
    fminfer split --input-file requests.jsonl --output-dir parts/
    fminfer run --infer-data parts/gpt-j-6b --model-name /models/gpt-j-6b
    fminfer merge --input-dir parts/ --output answers.jsonl
    zstdcat requests.jsonl.zst | fminfer split --input-file - --output-dir parts/

    `fminfer run` answers mixed files as they are. Split for several machines, or to run
    each set of parameters by itself. Equal lines without a seed draw differently, also
    in different
    parts: the manifest has their numbers. A custom_id that comes again is named.

    Parts are <output-dir>/<engine>/request_<N>.jsonl, N from 0 for each engine (or
    model; "default" for lines that name none). Letters that a folder's name should not
    have are written as in URLs. With --flat, parts are <output-dir>/request_<N>.jsonl,
    for files that name one engine or none. Lines of a part have one engine, and agree
    in all fields that change how tokens are drawn or told. They stay byte for byte.
    Wrong lines are kept too; the run reports them. <output-dir>/manifest.json says
    which part holds which lines, for fminfer merge.

    You can split into the same folder again: old parts are removed. If an old part has
    answers that would lose their requests, the command refuses.
    """
    from fminfer.split.splitting import SplitOptions, split_file

    click.echo(
        split_file(input_file, output_dir, SplitOptions(**options)).to_text(), err=True
    )


@click.command()
@_path_option(
    "--input-dir",
    help="The folder that fminfer split wrote, with the answers beside its parts.",
)
@_path_option(
    "--output", help="The file for the answers. A file that differs is not replaced."
)
def merge(input_dir: Path, output: Path) -> None:
    """Merge the answers to a split file into one file, in the order of its lines.

    \b
    fminfer split --input-file requests.jsonl --output-dir parts/
    fminfer run --infer-data parts/gpt-j-6b --model-name /models/gpt-j-6b
    fminfer merge --input-dir parts/ --output answers.jsonl

    It reads the answers of `fminfer run`, or of the old tool: output_request_<N>.jsonl beside
    request_<N>.jsonl. Errors go to answers.errors.jsonl, with the line numbers of the
    file that was split. If a part has no answers yet, it writes nothing, and names the
    lines and the command that answers them. If the file has changed since it was split,
    it merges all the same, and warns. If the output is there and equal, the command
    says so. One that differs is not replaced.

    \b
    Exit status: 0 every line answered; 1 answers are missing, or not those of their part;
    2 wrong usage; 3 merged, some lines are in the errors file.
    """
    from fminfer.files.ordered_output import errors_path
    from fminfer.split.merging import merge_parts

    summary = merge_parts(input_dir, output)
    click.echo(
        f"merged    {with_noun(summary.num_answers, 'answer')} of "
        f"{with_noun(summary.num_parts, 'part')}: {output}"
        f"{' is already there' if summary.was_there else ''}",
        err=True,
    )
    if summary.source_change:
        click.echo(f"Warning: {summary.source_change}.", err=True)
    if summary.num_errors:
        click.echo(
            f"errors    {with_noun(summary.num_errors, 'line')}: {errors_path(output)}",
            err=True,
        )
        sys.exit(EXIT_SOME_ERRORS)

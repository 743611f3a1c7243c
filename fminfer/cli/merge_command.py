"""`fminfer merge`: the answers to the parts of a split become one file again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fminfer.cli.exit_status import EXIT_SOME_ERRORS
from fminfer.core.quantities import counted


@click.command()
@click.option(
    "--input-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder that fminfer split wrote, with the answers beside its parts.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The file for the answers; it must not exist yet.",
)
def merge(input_dir: Path, output: Path) -> None:
    """Merge the answers to a split file into one file, in the order of its lines.

    \b
    fminfer split --input-file requests.jsonl --output-dir parts/
    fminfer run --infer-data parts/gpt-j-6b --model-name /models/gpt-j-6b
    fminfer merge --input-dir parts/ --output answers.jsonl

    It reads the answers of `fminfer run`, or of the old tool: output_request_<N>.jsonl beside
    request_<N>.jsonl. Errors go to answers.errors.jsonl, with the line numbers of the file that was
    split. If a part has no answers yet, it writes nothing, and names the lines and the command that
    answers them. If the file has changed since it was split, it merges all the same, and warns.

    \b
    Exit status: 0 every line answered; 1 answers are missing, or not those of their part;
    2 wrong usage; 3 merged, some lines are in the errors file.
    """
    from fminfer.files.ordered_output import errors_path
    from fminfer.split.merging import merge_parts

    summary = merge_parts(input_dir, output)
    click.echo(
        f"merged    {counted(summary.num_answers, 'answer')} of "
        f"{counted(summary.num_parts, 'part')}: {output}",
        err=True,
    )
    if summary.source_change:
        click.echo(f"Warning: {summary.source_change}.", err=True)
    if summary.num_errors:
        click.echo(
            f"errors    {counted(summary.num_errors, 'line')}: {errors_path(output)}", err=True
        )
        sys.exit(EXIT_SOME_ERRORS)

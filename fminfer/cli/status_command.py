"""`fminfer status`: what folders of answers hold. It prints what `batch.overview` finds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from fminfer.cli.flags import NamedPath
from fminfer.cli.process import print_wrapped
from fminfer.core.errors import RETRYABLE
from fminfer.core.quantities import describe_seconds, with_noun
from fminfer.job.overview import STATES, FileState, Overview, find_overviews

MAX_LISTED = 20


@click.command()
@click.argument("paths", nargs=-1, required=True, type=NamedPath(path_type=Path))
@click.option(
    "--json",
    "is_json",
    is_flag=True,
    help="Print one JSON object for each folder, with all files.",
)
def status(paths: tuple[Path, ...], is_json: bool) -> None:
    """Show the progress of runs: files done, running (by whom), stopped, waiting.

    \b
    fminfer status shards/
    fminfer status answers/ --json
    fminfer status output_requests.jsonl

    It reads the files that runs leave beside their outputs, and does not disturb the runs. It
    counts the files of a folder that a run over it answers, and looks through the
    folders below. It counts rows without an answer by error code. The time left assumes
    that the runs that are now at work go on, and that no others begin.
    """
    for path in paths:
        for overview in find_overviews(path):
            if is_json:
                # which takes names of any bytes
                click.echo(json.dumps(_make_json_fields(overview)))
            else:
                print_wrapped(_describe_overview(overview))


def _make_json_fields(overview: Overview) -> dict[str, object]:
    return {
        "path": overview.path,
        "num_files": {state: overview.count(state) for state in STATES},
        "num_rows": overview.num_rows,
        "num_answered": sum(file.num_answered for file in overview.files),
        "num_failed": sum(file.num_failed for file in overview.files),
        "failed_by_code": overview.failed_by_code,
        "left_s": overview.left_s,
        "left_out": overview.left_out,
        "files": [asdict(file) for file in overview.files],
    }


def _describe_overview(overview: Overview) -> str:
    answered = sum(file.num_answered for file in overview.files)
    failed = sum(file.num_failed for file in overview.files)
    counts = [
        f"{overview.count('done'):,} of {with_noun(len(overview.files), 'file')} done"
    ]
    numbers = [(state, overview.count(state)) for state in STATES[1:]]
    counts += [f"{number:,} {state}" for state, number in numbers if number]
    rows = f"{answered + failed:,} of {_describe_num_rows(overview.num_rows)}"
    if failed:
        codes = ", ".join(
            f"{count:,} {code}" for code, count in overview.failed_by_code.items()
        )
        rows += f", {failed:,} of them in error ({codes})"
        num_retryable = sum(overview.failed_by_code.get(code, 0) for code in RETRYABLE)
        rows += (
            f"; the same command tries {num_retryable:,} again" if num_retryable else ""
        )
    lines = [overview.path, f"  {', '.join(counts)}", f"  {rows}"]
    if overview.count("done") < len(overview.files):
        lines.append(f"  {_describe_time_left(overview)}")
    open_files = [
        file for file in overview.files if file.state in ("running", "stopped")
    ]
    open_files += [
        file for file in overview.files if file.state == "waiting" and file.why
    ]
    lines += _shorten_list(
        [f"    {_describe_file(file)}" for file in open_files], "    … and "
    )
    passed_over = [
        f"  left out: {path}: {why}" for path, why in overview.left_out.items()
    ]
    return "\n".join([*lines, *_shorten_list(passed_over, "  left out: ")])


def _shorten_list(lines: list[str], more: str) -> list[str]:
    if len(lines) <= MAX_LISTED:
        return lines
    return [
        *lines[:MAX_LISTED],
        f"{more}{len(lines) - MAX_LISTED:,} more (--json lists all)",
    ]


def _describe_time_left(overview: Overview) -> str:
    if overview.count("waiting") == len(overview.files):
        return "no run has begun; fminfer run answers them"
    if not overview.count("running"):
        if any(file.is_edited for file in overview.files):
            return "fminfer run refuses what was edited; put it back as it was, or move it away"
        return "no run is at work; the same command goes on"
    if overview.left_s is None:
        return "time left not known yet"
    return f"{describe_seconds(overview.left_s)} left"


def _describe_file(file: FileState) -> str:
    name = Path(file.output if file.input is None else file.input).name
    rows = f"{file.num_answered + file.num_failed:,} of {_describe_num_rows(file.num_rows)}"
    if file.state == "stopped":
        return f"{name}: stopped ({file.why}), {rows}"
    if file.state == "waiting":
        return f"{name}: {file.why}"
    left = "" if file.left_s is None else f", {describe_seconds(file.left_s)} left"
    return f"{name}: {rows}, by {file.owner}{left}"


def _describe_num_rows(number: int | None) -> str:
    return "? rows" if number is None else with_noun(number, "row")

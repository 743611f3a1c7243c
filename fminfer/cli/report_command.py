"""`fminfer report`: one HTML file that shows what runs have answered."""

from __future__ import annotations

from pathlib import Path

import click

from fminfer.cli.flags import NamedPath
from fminfer.core.errors import UsageError
from fminfer.core.quantities import with_noun


@click.command()
@click.argument("outputs", nargs=-1, required=True, type=NamedPath(path_type=Path))
@click.option(
    "--out",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="The HTML file to write. It replaces nothing but an HTML page.  [default: "
    "<output>.report.html beside an output; report.html in a folder]",
)
@click.option(
    "--truth",
    metavar="COLUMN",
    help="The column with the true labels; of JSON lines, the key beside `request`. The page "
    "shows how many answers are right.",
)
def report(outputs: tuple[Path, ...], out: Path | None, truth: str | None) -> None:
    """Write an HTML page about outputs: what was asked and answered, errors, speed, a sample.

    \b
    fminfer report output_requests.jsonl
    fminfer report answers/ --out answers.html
    fminfer report labels.jsonl --truth label           counts labels that are right
    fminfer run requests.jsonl --report report.html     writes it at the end of the run

    The page is one file, opens without a server or network, and shows at most 200 rows, however
    many there are. An output that is not complete is shown as far as its journal goes. A folder
    gives all of its outputs, or those of the folders below it, such as a split's. An
    input stands for its output. The page names what a run has not kept, such as the
    times of Batch lines.
    """
    from fminfer.files.own_files import PAGE, require_own_file
    from fminfer.job.report.report_file import write_report
    from fminfer.job.report.reported_outputs import find_outputs

    reported = find_outputs(outputs)
    out = out or _choose_default_path(outputs, reported[0].path)
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if out.resolve() in {
        path.resolve() for output in reported for path in output.files
    }:
        raise UsageError(f"--out {out} holds rows of the report; give another name")
    require_own_file(out, PAGE, "--out")
    written = write_report(reported, out, truth=truth)
    num_outputs = with_noun(len(reported), "output")
    click.echo(
        f"report    {out}: {with_noun(written.num_rows, 'row')} of {num_outputs}, "
        f"{written.num_shown:,} of them shown, {_describe_size(written.num_bytes)}",
        err=True,
    )


def _describe_size(num_bytes: int) -> str:
    return (
        f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} KB"
    )


def _choose_default_path(paths: tuple[Path, ...], output: Path) -> Path:
    if len(paths) > 1:
        raise UsageError(
            f"--out is missing; {len(paths)} outputs go into one report: give --out FILE"
        )
    if paths[0].is_dir():
        return paths[0] / "report.html"
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.report.html")

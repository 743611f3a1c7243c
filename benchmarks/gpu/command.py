"""`scripts/try_gpu`: all that a short hour with a GPU should show, in phases.

scripts/try_gpu --prepare prepared          # beforehand, anywhere: checkpoints and answers
scripts/try_gpu --prepared prepared --out found
scripts/try_gpu --phase 1 --phase 2         # only these
scripts/try_gpu --cpu                       # tiny shapes, which prove this very code
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.gpu import results
from benchmarks.gpu.cases import Setting
from benchmarks.gpu.phases import BY_NUMBER, PHASES, Phase
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.summary import has_passed, latest, to_text

NEEDED = ("imports", "machine")  # the cases of phase 0 without which nothing else can run


@click.command(help=__doc__)
@click.option("--phase", "numbers", multiple=True, type=click.IntRange(0, 8), help="[default: all]")
@click.option("--cpu", "is_on_cpu", is_flag=True, help="Tiny shapes on the CPU.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("try_gpu"),
    show_default=True,
    help="Folder for results.jsonl, summary.txt and log.txt; results are appended.",
)
@click.option("--prepare", type=click.Path(path_type=Path), help="Write checkpoints, and end.")
@click.option("--prepared", type=click.Path(path_type=Path, exists=True), help="What that wrote.")
@click.option("--seconds", default=570.0, show_default=True, help="After which nothing runs.")
@click.option("--list", "is_list", is_flag=True, help="Show the phases, and end.")
def main(
    numbers: tuple[int, ...],
    is_on_cpu: bool,
    out: Path,
    prepare: Path | None,
    prepared: Path | None,
    seconds: float,
    is_list: bool,
) -> None:
    if is_list:
        for phase in PHASES:
            click.echo(f"{phase.number} {phase.planned_s:4} s  {phase.what}")
        return
    if prepare is not None:
        from benchmarks.gpu.family_answers import prepare_all

        prepare_all(prepare)
        return
    out.mkdir(parents=True, exist_ok=True)
    phases = [BY_NUMBER[number] for number in sorted({*numbers})] or [*PHASES]
    scratch = Path(tempfile.mkdtemp(prefix="try_gpu-"))
    try:
        lines = run(phases, "cpu" if is_on_cpu else "cuda", out, prepared, scratch, seconds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    text = to_text(lines, phases)
    (out / "summary.txt").write_text(text + "\n")
    click.echo(text)
    sys.exit(0 if has_passed(lines, phases) else 1)


def run(
    phases: list[Phase],
    device: str,
    out: Path,
    prepared: Path | None,
    scratch: Path,
    seconds: float,
) -> list[results.Line]:
    """Run phases and return the lines that they wrote."""
    path = out / "results.jsonl"
    first_line = len(results.read(path))
    prepared = None if prepared is None else prepared.resolve()
    setting = Setting(device, path.resolve(), prepared, scratch, seconds)
    runner = Runner(setting, out / "log.txt", time.monotonic() + seconds)
    for phase in phases:
        click.echo(f"phase {phase.number}: {phase.what} …", err=True)
        runner.run(phase)
        found = latest(results.read(path)[first_line:], phase)
        missing = [
            name for name in NEEDED if found.get(name, {"state": "passed"})["state"] != "passed"
        ]
        if missing:
            click.echo(f"Nothing else can run: phase 0, {missing[0]}.", err=True)
            break
    return results.read(path)[first_line:]


if __name__ == "__main__":
    main()

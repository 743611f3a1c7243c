"""`scripts/try_gpu`: all that a short hour with a GPU should show, in phases.

scripts/try_gpu --prepare prepared          # beforehand: checkpoints, answers, missing wheels
scripts/try_gpu --visit --prepared prepared --out found
scripts/try_gpu --phase 2 --phase 1         # only these, in this order
scripts/try_gpu --visit --cpu               # tiny shapes, which prove this very code
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
from benchmarks.gpu.phases import PHASES, VISIT_S, Turn, turns_of, visit_turns
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.summary import has_passed, latest, to_text

# the case of phase 0 without which nothing else can run: there is no GPU
NEEDED = "machine"
UNDISTURBED = "time_kernels"  # which times the host: no imports run beside it
DEFAULT_S = 570.0
LOG_BYTES = 15 << 20


@click.command(help=__doc__)
@click.option(
    "--visit",
    "is_visit",
    is_flag=True,
    help="Phases 0 to 7, the most informative first.",
)
@click.option(
    "--phase",
    "numbers",
    multiple=True,
    type=click.IntRange(0, 8),
    help="[default: all]",
)
@click.option("--cpu", "is_on_cpu", is_flag=True, help="Tiny shapes on the CPU.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("try_gpu"),
    show_default=True,
    help="Folder for results.jsonl, summary.txt and log.txt; results are appended.",
)
@click.option(
    "--prepare",
    type=click.Path(path_type=Path),
    help="Write checkpoints and wheels, and end.",
)
@click.option(
    "--prepared", type=click.Path(path_type=Path, exists=True), help="Its folder."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="Time limit of the whole try; --visit divides it among its phases. "
    f"[default: {DEFAULT_S:g}, of a visit {VISIT_S}]",
)
@click.option("--list", "is_list", is_flag=True, help="Show the phases, and end.")
def main(
    is_visit: bool,
    numbers: tuple[int, ...],
    is_on_cpu: bool,
    out: Path,
    prepare: Path | None,
    prepared: Path | None,
    seconds: float | None,
    is_list: bool,
) -> None:
    if is_list:
        for phase in PHASES:
            click.echo(f"{phase.number} {phase.planned_s:4} s  {phase.what}")
        return
    if prepare is not None:
        from benchmarks.gpu.family_answers import prepare_all

        sys.exit(prepare_all(prepare))
    if is_visit and numbers:
        raise click.UsageError("--visit has its own phases; leave out --phase")
    seconds = seconds or (VISIT_S if is_visit else DEFAULT_S)
    turns = visit_turns(seconds) if is_visit else turns_of(numbers)
    out.mkdir(parents=True, exist_ok=True)
    prepared = None if prepared is None else prepared.resolve()
    scratch = Path(tempfile.mkdtemp(prefix="try_gpu-"))
    results_path = (out / "results.jsonl").resolve()
    device = "cpu" if is_on_cpu else "cuda"
    setting = Setting(device, results_path, prepared, scratch, seconds)
    try:
        text, is_good = run(turns, setting, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        results.cut_middle(out / "log.txt", LOG_BYTES)
    click.echo(text)
    sys.exit(0 if is_good else 1)


def run(turns: list[Turn], setting: Setting, out: Path) -> tuple[str, bool]:
    """Run phases; return a summary, and whether all passed.

    The summary is written after each phase: the machine may go away.
    """
    path = setting.results
    started = time.monotonic()
    first_line = len(results.read(path))
    runner = Runner(setting, out / "log.txt", started + setting.seconds)
    phases = [turn.phase for turn in turns]
    text = ""
    is_good = False
    try:
        for number, turn in enumerate(turns):
            click.echo(f"phase {turn.phase.number}: {turn.phase.what} …", err=True)
            end_s = None if turn.end_s is None else started + turn.end_s
            after = next(iter(phases[number + 1 :]), None)
            if turn.phase.name == UNDISTURBED:
                after = None
            runner.run(turn.phase, end_s, after)
            lines = results.read(path)[first_line:]
            text = to_text(lines, phases)
            is_good = has_passed(lines, phases)
            (out / "summary.txt").write_text(text + "\n")
            of_machine = (
                latest(lines, turn.phase).get(NEEDED)
                if turn.phase.number == 0
                else None
            )
            if of_machine is not None and of_machine["state"] in ("wrong", "failed"):
                click.echo(
                    "Phase 0 found no usable GPU (case `machine`): the other phases "
                    "are skipped.",
                    err=True,
                )
                break
    finally:
        runner.close()
    return text, is_good


if __name__ == "__main__":
    main()

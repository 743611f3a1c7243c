"""Compares the answers of a commit with those of the checkout: `scripts/same_answers`.

Both answer 160 lines of many kinds with the demo model, with six sets of options. Answers and
errors must be equal byte for byte, without times. Messages must be equal without their numbers.
The status file and `--stats` must have the same fields. Last, a run of the commit is killed
half-way, and the checkout finishes it. No row that was on disk may be computed again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tests.commits.base_tree import (
    CHECKOUT,
    environment_of,
    name_commit,
    open_commit,
    require_code_of,
)
from tests.commits.comparison import (
    Difference,
    compare,
    names_of_fields,
    without_numbers,
    without_times,
)
from tests.commits.varied_requests import NUM_LINES, write_lines

SETS = {
    "plain": "",
    "few rows": "--dtype float32 --max-rows 4 --chunk-size 48 --token-format text",
    "scarce cache": "--dtype float32 --budget 512 --chunk-size 64 --no-prefix-cache",
    "two stages": "--dtype float32 --world-size 2 --kernels off --seed 5",
    "two shards": "--dtype bfloat16 --tp 2 --generation-config model --strict",
    "int8": "--dtype int8 --on-too-long truncate-left --model-name demo",
}
# One row at a time has the same numbers in whatever order the rows come.
RESUMED = "--dtype float32 --max-rows 1 --no-prefix-cache"
OUTPUT = "answers.jsonl"
ERRORS = "answers.errors.jsonl"
STATUS = "answers.status.json"
STATS = "stats.json"
SOME_ERRORS = 3  # the exit status of a run that refused some lines
RETRYABLE = b'"code":"out_of_memory"'
RUN_S = 120.0  # most time of one run


@dataclass(slots=True)
class Result:
    """What came of one set of options."""

    name: str
    num_rows: int
    differences: list[Difference]
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.differences)


def command(options: str) -> list[str]:
    """Return the command that answers the lines in the folder above its own."""
    start = [sys.executable, "-m", "fminfer", "run", "../lines.jsonl"]
    return [*start, "--output", OUTPUT, "--stats", STATS, *options.split()]


def answer(tree: Path, folder: Path, options: str) -> dict[str, bytes]:
    """Answer the lines with a tree's code; return what the run wrote, as it is compared."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command(options),
        cwd=folder,
        env=environment_of(tree),
        capture_output=True,
        timeout=RUN_S,
    )
    if done.returncode != SOME_ERRORS:
        raise click.ClickException(
            f"{options or 'plain'}: the run of {tree} ended with the exit status "
            f"{done.returncode}\n{done.stderr.decode(errors='replace')}"
        )
    return {
        OUTPUT: without_times((folder / OUTPUT).read_bytes()),
        ERRORS: without_times((folder / ERRORS).read_bytes()),
        "messages": without_numbers(done.stderr + done.stdout),
        "fields of the status": names_of_fields((folder / STATUS).read_bytes()),
        "fields of --stats": names_of_fields((folder / STATS).read_bytes()),
    }


def count_rows(files: dict[str, bytes]) -> int:
    return sum(len(files[name].splitlines()) for name in (OUTPUT, ERRORS))


def differences_of(base: dict[str, bytes], head: dict[str, bytes]) -> list[Difference]:
    """Return the differences of all files."""
    found = (compare(name, base[name], head[name]) for name in base)
    return [each for each in found if each is not None]


def compare_set(name: str, trees: tuple[Path, Path], folder: Path) -> Result:
    """Answer the lines by both commits with one set of options."""
    start = time.monotonic()
    place = name.replace(" ", "-")
    base, head = (
        answer(tree, folder / f"{place}-{commit}", SETS[name])
        for tree, commit in zip(trees, ("base", "head"), strict=True)
    )
    seconds = time.monotonic() - start
    return Result(name, count_rows(base), differences_of(base, head), seconds)


def finish_what_base_began(trees: tuple[Path, Path], folder: Path) -> Result:
    """Kill a run of the commit half-way; the checkout finishes it as if nothing had been."""
    start = time.monotonic()
    base, head = trees
    whole = answer(base, folder / "whole", RESUMED)
    resumed = folder / "resumed"
    kept = answer_half(base, resumed)

    final = answer(head, resumed, RESUMED)
    names = (OUTPUT, ERRORS)
    differences = differences_of(
        {name: whole[name] for name in names}, {name: final[name] for name in names}
    )
    # A row that was computed again would have other times.
    written = b"".join((resumed / name).read_bytes() for name in names)
    again = set(kept) - set(written.splitlines())
    differences += [
        Difference(
            "rows that BASE answered",
            num_bytes=len(row),
            line=0,
            base=row[:60],
            head=b"computed again",
        )
        for row in sorted(again)
    ]
    # Rows that found too little room are tried again, as they should be.
    num_on_disk = sum(RETRYABLE not in row for row in kept)
    num_kept = json.loads((resumed / STATS).read_bytes())["num_kept_rows"]
    if num_kept != num_on_disk:
        differences.append(
            Difference(
                "rows that were kept",
                num_bytes=1,
                line=0,
                base=f"{num_on_disk} on disk".encode(),
                head=f"{num_kept} kept".encode(),
            )
        )
    name = f"begun by BASE ({len(kept)} rows)"
    return Result(name, count_rows(final), differences, time.monotonic() - start)


def answer_half(tree: Path, folder: Path) -> list[bytes]:
    """Kill a run when half of the rows are on disk; return their records."""
    folder.mkdir()
    run = subprocess.Popen(
        command(RESUMED),
        cwd=folder,
        env=environment_of(tree),
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + RUN_S
        while len(read_journal(folder)) < NUM_LINES // 2:
            if run.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException("no run of BASE could be killed half-way")
            time.sleep(0.002)
    finally:
        run.kill()
        run.wait()
    return read_journal(folder)


def read_journal(folder: Path) -> list[bytes]:
    """Return the records of the whole lines of a journal."""
    journal = folder / f"{OUTPUT}.journal"
    if not journal.exists():
        return []
    lines = journal.read_bytes().splitlines(keepends=True)[1:]
    return [
        line[line.index(b'"record":') + 9 : -2]
        for line in lines
        if line.endswith(b"}\n")
    ]


def print_table(results: Sequence[Result]) -> None:
    print(f"\n{'options':<28}{'rows':>6}{'differing bytes':>18}{'seconds':>10}")
    for each in results:
        print(
            f"{each.name:<28}{each.num_rows:>6}{each.num_bytes:>18,}{each.seconds:>10.1f}"
        )


def choose_sets(num_sets: int | None, only: Sequence[str]) -> list[str]:
    """Return the names of the sets of options that are to be compared."""
    if unknown := [name for name in only if name not in SETS]:
        names = ", ".join(f'"{name}"' for name in SETS)
        raise click.UsageError(
            f"--only {unknown[0]!r} is no set of options; there are {names}"
        )
    return [name for name in SETS if not only or name in only][:num_sets]


@click.command()
@click.argument("base", default="HEAD~1")
@click.option(
    "--sets", "num_sets", type=click.IntRange(0), help="Compare the first N sets."
)
@click.option(
    "--only", multiple=True, help="Compare this set of options. May be repeated."
)
@click.option(
    "--without-resume", is_flag=True, help="Leave out the run that is killed."
)
def main(
    base: str, num_sets: int | None, only: tuple[str, ...], without_resume: bool
) -> None:
    """Compare the answers of the commit BASE with those of the files in this checkout.

    BASE is HEAD~1 by default. The exit status is 1 if anything differs; outputs then stay.
    """
    names = choose_sets(num_sets, only)
    folder = Path(tempfile.mkdtemp(prefix="fminfer-same-answers-"))
    write_lines(folder / "lines.jsonl")
    print(f"base: {name_commit(base)}\nhead: the files in {CHECKOUT}", flush=True)

    with open_commit(base) as base_tree:
        trees = (base_tree, CHECKOUT)
        for tree in trees:
            require_code_of(tree, folder)
        results = [compare_set(name, trees, folder) for name in names]
        if not without_resume:
            results.append(finish_what_base_began(trees, folder))

    print_table(results)
    differences = [each for result in results for each in result.differences]
    for each in differences:
        print(f"\n{each.describe()}")
    if differences:
        print(f"\nAll files are in {folder}")
    else:
        shutil.rmtree(folder)
    print(json.dumps(summarize(base, results)))
    sys.exit(1 if differences else 0)


def summarize(base: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return what the last line says."""
    sets = [
        {
            "options": each.name,
            "rows": each.num_rows,
            "differing_bytes": each.num_bytes,
            "seconds": round(each.seconds, 1),
        }
        for each in results
    ]
    return {
        "base": base,
        "is_same": not any(each.differences for each in results),
        "seconds": round(sum(each.seconds for each in results), 1),
        "sets": sets,
    }


if __name__ == "__main__":
    main()

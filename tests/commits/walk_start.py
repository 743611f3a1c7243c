"""Counts the functions and files between `open_model` and a built `Stage`: `scripts/walk_start`.

Two starts of one rank on the CPU are traced, both of the demo model: that of the Python API
(`Engine()`), and that of the command (`fminfer run` of one line). What is counted:

functions   named functions of ours, properties and nested ones too, each counted once
files       modules in which they stand
stops       pairs of a caller and a callee in two files, each counted once
climbs      stops whose callee stands in a higher package than its caller
calls       calls from one file into another, each time
plans       calls of `make_plan` in the whole process
scans       headers of safetensors files that the whole process parsed

The way begins where `open_model` is entered and ends where `Stage.__init__` returns. All threads
count. A function that another calls through a library counts as called by it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
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
from tests.test_imports import LAYER

TRACER = Path(__file__).with_name("start_tracer.py")
LINE = {
    "prompt": "Question: How do you go from the den to the porch?\nAnswer:",
    "temperature": 0,
}
STARTS = {"engine": "Engine()", "run": "fminfer run"}
FIGURES = ("functions", "files", "stops", "climbs", "calls", "plans", "scans")

Notes = Mapping[str, Any]  # as of StartTracer


def count_walk(notes: Notes) -> dict[str, int]:
    """Return the figures of one start."""
    crossing = [step for step in notes["steps"] if step[0] != step[2]]
    return {
        "functions": len(notes["functions"]),
        "files": len(count_functions(notes)),
        "stops": len(crossing),
        "climbs": sum(is_climb(step[0], step[2]) for step in crossing),
        "calls": sum(step[4] for step in crossing),
        "plans": len(notes["plans"]),
        "scans": len(notes["scans"]),
    }


def count_functions(notes: Notes) -> Counter[str]:
    """Return how many functions of each file were entered."""
    return Counter(file for file, _ in notes["functions"])


def is_climb(caller: str, callee: str) -> bool:
    """Tell whether a call goes to a higher package; of unknown packages it does not."""
    here, there = (LAYER.get(file.split("/")[0]) for file in (caller, callee))
    return here is not None and there is not None and there > here


def trace_start(start: str, tree: Path, folder: Path) -> Notes:
    """Trace a start with a tree's code, in a process of its own."""
    notes = folder / "notes.json"
    source = folder / "lines.jsonl"
    source.write_text(json.dumps(LINE) + "\n")
    paths = [notes, source, folder / "answers.jsonl"]
    done = subprocess.run(
        [sys.executable, str(TRACER), start, *map(str, paths)],
        cwd=folder,
        env=environment_of(tree),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise click.ClickException(f"{STARTS[start]} of {tree}: {done.stderr}")
    found: Notes = json.loads(notes.read_bytes())
    return found


def print_figures(figures: Mapping[str, Mapping[str, int]]) -> None:
    """Print a table with a column for each tree."""
    print(f"{'':<12}" + "".join(f"{name:>10}" for name in figures))
    for figure in FIGURES:
        print(
            f"{figure:<12}"
            + "".join(f"{each[figure]:>10,}" for each in figures.values())
        )


def print_files(found: Mapping[str, Notes]) -> None:
    """Print the files of each package, with the number of functions entered in each tree."""
    counts = {name: count_functions(notes) for name, notes in found.items()}
    files = sorted(set().union(*counts.values()))
    for package in sorted({file.split("/")[0] for file in files}):
        own = [file for file in files if file.split("/")[0] == package]
        numbers = (sum(file in each for file in own) for each in counts.values())
        print(
            f"\n{f'{package}: files':<52}"
            + "".join(f"{number:>8}" for number in numbers)
        )
        for file in own:
            print(
                f"  {file:<50}"
                + "".join(f"{each[file]:>8}" for each in counts.values())
            )


def print_callers(notes: Notes) -> None:
    """Print who made each plan, and who scanned each header."""
    for figure in ("plans", "scans"):
        print(f"\n{figure}:")
        for callers in notes[figure]:
            print("  " + " < ".join(callers))


@click.command()
@click.option("--base", help="Trace this commit as well, to compare the counts.")
@click.option(
    "--only", type=click.Choice([*STARTS]), help="Trace one of the two starts."
)
def main(base: str | None, only: str | None) -> None:
    """Count what a reader passes between open_model and a built Stage."""
    summary: dict[str, Any] = {"base": base}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {"head": CHECKOUT}
        if base is not None:
            print(f"base: {name_commit(base)}")
            trees = {"base": stack.enter_context(open_commit(base)), **trees}
        for tree in trees.values():
            require_code_of(tree, folder)

        for start in STARTS if only is None else [only]:
            found = {}
            for name, tree in trees.items():
                own = folder / f"{start}-{name}"
                own.mkdir()
                found[name] = trace_start(start, tree, own)
            figures = {name: count_walk(notes) for name, notes in found.items()}
            print(f"\n=== {STARTS[start]}, from open_model to a built Stage ===")
            print_figures(figures)
            print_files(found)
            print_callers(found["head"])
            summary[start] = figures
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

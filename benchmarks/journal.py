"""What journal and resume cost: the same work with a journal and without, in turns.

    python benchmarks/journal.py --repeats 3

The work is workload a of against_transformers.py: 64 rows on a random-init llama of 12 × 768.
With: `--output FILE`. Without: `--output -`, to /dev/null. Run time is that of
answering, loading left out. Then the journal alone: rows of 1 KB appended, and a
journal of them read again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import click
from against_transformers import SIZE, make_workload

from fminfer.files.journal import Journal
from fminfer.files.journal_rows import Row
from fminfer.files.ordered_output import write_ordered_output

NUM_ROWS = 100_000


def run_s(rows: Path, folder: Path, *, has_journal: bool) -> float:
    """Answer the workload once."""
    stats = folder / "stats.json"
    output = str(folder / "out.jsonl") if has_journal else "-"
    command = [
        sys.executable,
        "-m",
        "fminfer",
        "run",
        str(rows),
        "--random-init",
        SIZE,
        "-q",
    ]
    command += [
        "--output",
        output,
        "--restart",
        "--stats",
        str(stats),
        "--kernels",
        "off",
    ]
    subprocess.run(
        [*command, "--dtype", "float32"], check=True, stdout=subprocess.DEVNULL
    )
    return float(json.loads(stats.read_text())["wall_s"])


def time_journal(folder: Path) -> tuple[float, float, float]:
    """Return microseconds a row: appending, reading again, finishing."""
    record = json.dumps(
        {"request": {"prompt": "x" * 450}, "result": {"text": "y" * 500}}
    ).encode()
    output = folder / "rows.jsonl"
    times = [time.perf_counter()]
    journal = Journal(output, {})
    for number in range(1, NUM_ROWS + 1):
        journal.append(Row(number, False, (1, 0, 1), 5, record))
    journal.close()
    times.append(time.perf_counter())
    journal = Journal(output, {})
    assert journal.num_rows == NUM_ROWS
    times.append(time.perf_counter())
    write_ordered_output(journal)
    journal.remove()
    times.append(time.perf_counter())
    first, second, third = (
        (end - start) / NUM_ROWS * 1e6 for start, end in pairwise(times)
    )
    return first, second, third


@click.command()
@click.option("--repeats", default=3, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Part of the rows.")
def main(repeats: int, scale: float) -> None:
    """Measure both."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        append_us, read_us, finish_us = time_journal(folder)
        print(
            f"a row of 1 KB: append {append_us:.0f} µs, read {read_us:.0f}, order "
            f"{finish_us:.0f}"
        )
        rows = folder / "rows.jsonl"
        rows.write_text(
            "".join(json.dumps(row) + "\n" for row in make_workload("a", scale))
        )
        for turn in range(repeats):
            for has_journal in (True, False) if turn % 2 else (False, True):
                found[has_journal].append(run_s(rows, folder, has_journal=has_journal))
                print(
                    f"  journal {has_journal!s:5} {found[has_journal][-1]:6.1f} s",
                    flush=True,
                )
    medians = {side: statistics.median(times) for side, times in found.items()}
    ratio = medians[True] / medians[False]
    print(
        json.dumps(
            {"with_s": medians[True], "without_s": medians[False], "ratio": ratio}
        )
    )


if __name__ == "__main__":
    main()

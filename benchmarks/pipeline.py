#!/usr/bin/env python
"""A pipeline of several ranks beside one process with the same cores, the same work, in turns.

The work is workload a of against_transformers.py: 64 rows, prompts of 16–191 tokens, 16–128 new
tokens each, on a random-init llama of 12 layers × 768. Every run is the command, in processes
of its own; its time is that of answering, loading left out. `busy` is each stage's share of the
time between its first and its last step; with one micro-batch in flight
(`--micro-batches 1`) only one stage of P can work at a time, so it must come out at
about 1/P, which proves the measure.

    python benchmarks/pipeline.py --repeats 3

With 64 rows all run at once, and fewer and fewer are left. The steady state of a long
file, where a row enters as another leaves, needs more than the 256 that run at once;
and 13 layers with a vocabulary of 42,000 halve, since the head then costs as much as one:

    python benchmarks/pipeline.py --repeats 1 --layers 13 --vocabulary 42000 --times 6

A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from against_transformers import SIZE, make_workload

from fminfer.models.known_sizes import SIZES


def run_once(folder: Path, num_ranks: int, threads: int, more: list[str]) -> Any:
    """Answer the workload once and return what --stats says."""
    stats = folder / "stats.json"
    command = [
        sys.executable,
        "-m",
        "fminfer",
        "run",
        str(folder / "rows.jsonl"),
        "--restart",
    ]
    command += ["--random-init", str(folder / "config.json"), "--stats", str(stats)]
    command += ["--output", str(folder / "out.jsonl"), "--world-size", str(num_ranks)]
    command += ["--dtype", "float32", "--kernels", "off", "-q"]
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(command + more, env=environ, check=True)
    return json.loads(stats.read_text())


def busy_shares(stats: Any) -> list[float]:
    return [
        stage["busy_s"] / (stage["last_s"] - stage["first_s"])
        for stage in stats["engine"]["stages"]
    ]


def write_inputs(
    folder: Path, scale: float, times: int, layers: int, vocabulary: int
) -> None:
    """Write the workload, each time with other tokens, and the model's config."""
    config = SIZES[SIZE] | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(times):
            for row in make_workload("a", scale):
                other = row | {
                    "prompt": [(i + 977 * number) % 32000 for i in row["prompt"]]
                }
                file.write(json.dumps(other) + "\n")


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Part of the rows.")
@click.option("--times", default=1, show_default=True, help="Repeat them so often.")
@click.option("--layers", default=12, show_default=True, help="Of the model.")
@click.option("--vocabulary", default=32000, show_default=True, help="Of the model.")
@click.option(
    "--option", "options", multiple=True, help="More of the pipeline's, as --x=y."
)
def main(
    ranks: int,
    repeats: int,
    scale: float,
    times: int,
    layers: int,
    vocabulary: int,
    options: tuple[str, ...],
) -> None:
    sides = {
        "1 rank": (1, ranks, []),
        f"{ranks} ranks": (ranks, 1, list(options)),
        f"{ranks} ranks, 1 in flight": (ranks, 1, ["--micro-batches", "1", *options]),
    }
    results: dict[str, list[Any]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, scale, times, layers, vocabulary)
        for _ in range(repeats):
            for side, (num_ranks, threads, more) in sides.items():
                stats = run_once(folder, num_ranks, threads, more)
                results[side].append(stats)
                shares = ", ".join(f"{share:.1%}" for share in busy_shares(stats))
                print(
                    f"  {side:22} {stats['wall_s']:6.1f} s  busy {shares}", flush=True
                )
    print(
        f"\nworkload a × {times}, {layers} layers, vocabulary {vocabulary}, medians of {repeats}"
    )
    print(f"{'':24}{'run s':>8}{'tokens/s':>10}  busy, a stage each")
    summary = {}
    for side, runs in results.items():
        run_s = statistics.median(run["wall_s"] for run in runs)
        rate = statistics.median(run["tokens_per_s"] for run in runs)
        busy = [
            statistics.median(each)
            for each in zip(*map(busy_shares, runs), strict=True)
        ]
        summary[side] = {"run_s": run_s, "tokens_per_s": rate, "busy": busy}
        shown = ", ".join(f"{share:.1%}" for share in busy)
        print(f"{side:24}{run_s:8.1f}{rate:10.0f}  {shown}")
    one = summary["1 rank"]
    several = summary[f"{ranks} ranks"]
    ratio = several["tokens_per_s"] / one["tokens_per_s"]
    print(f"{ranks} ranks ÷ 1 rank: {ratio:.2f}")
    print(json.dumps({"ranks": ranks, "ratio": ratio, "sides": summary}))


if __name__ == "__main__":
    main()

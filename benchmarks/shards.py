#!/usr/bin/env python
"""Tensor parallelism on one machine: what a sum takes, and whole runs beside one process.

A sum is of (64, 768) numbers between processes that share memory. Runs are those
of against_transformers.py: T ranks of one thread each beside one process of T threads, in turns.

    python benchmarks/shards.py
    python benchmarks/shards.py --model llama-160m --model qwen3.json --workload a --repeats 3

A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent.resolve()
# the package beside this file, whether it is installed or not
sys.path.insert(0, str(HERE.parent))
ROWS = 64
WIDTH = 768
NUM_SUMS = 3000


def time_sums(dtype: str, count: int) -> list[float]:
    """Return the median and the 90th percentile of a sum, in µs, as the first rank sees it."""
    import torch

    from fminfer.compute.kernels.kernel_build import start_build
    from fminfer.compute.shards import SharedMemoryGroup

    library = start_build().wait_for_library()
    assert library is not None, start_build().error
    memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(library, count))
    torch.set_num_threads(1)
    index = next((number for number in range(1, count) if os.fork() == 0), 0)
    shards = SharedMemoryGroup(library, memory, index, count)
    x = torch.ones(ROWS, WIDTH, dtype=getattr(torch, dtype))
    times = []
    for _ in range(NUM_SUMS):
        started = time.perf_counter()
        shards.sum(x)
        times.append(time.perf_counter() - started)
        x.fill_(1.0)
    if index:
        os._exit(0)
    for _ in range(1, count):
        os.wait()
    times = sorted(1e6 * each for each in times[NUM_SUMS // 10 :])
    return [statistics.median(times), times[9 * len(times) // 10]]


def time_run(
    model: str, workload: str, dtype: str, size: int, count: int, scale: float
) -> float:
    """Answer a workload once, with `size` ranks of `count` / `size` threads; return the
    seconds."""
    from against_transformers import make_workload

    import fminfer

    rows = make_workload(workload, scale)
    options: dict[str, Any] = {
        "random_init": model,
        "dtype": dtype,
        "prefix_cache": False,
    }
    options |= {"tensor_parallel_size": size, "threads": count // size}
    with fminfer.Engine(**options) as engine:
        list(engine.run(rows[:4]))
        started = time.perf_counter()
        assert not [record.error for record in engine.run(rows) if record.error]
        return time.perf_counter() - started


def in_process(*arguments: object) -> Any:
    """Return what this script prints for one measurement."""
    command = [sys.executable, __file__, "--only", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@click.command()
@click.option(
    "--model", "models", multiple=True, default=["llama-160m"], help="As --random-init."
)
@click.option("--workload", "workloads", multiple=True, default=["a", "b"])
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--ranks", "count", default=2, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Part of the rows.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", "job", nargs=6, hidden=True)
def main(
    models: list[str],
    workloads: list[str],
    dtype: str,
    count: int,
    scale: float,
    repeats: int,
    job: tuple[str, ...] | None,
) -> None:
    """Time sums, then runs with ranks and without, in turns."""
    if job:
        what, workload, kind, size, num, part = job
        if what == "sums":
            print(json.dumps(time_sums(kind, int(num))))
        else:
            print(
                json.dumps(
                    time_run(what, workload, kind, int(size), int(num), float(part))
                )
            )
        return
    found: dict[str, Any] = {}
    what = f"a sum of {ROWS} × {WIDTH}, {count} processes"
    print(f"| {what} | median µs | of 10, 9 within µs |\n|---|---|---|")
    for kind in ("bfloat16", "float32"):
        turns = [in_process("sums", "-", kind, 0, count, 0) for _ in range(repeats)]
        median, most = (statistics.median(each) for each in zip(*turns, strict=True))
        found[f"sum {kind}"] = median
        print(f"| {kind} | {median:.0f} | {most:.0f} |", flush=True)
    print(
        f"\n| {dtype} | one process, s | {count} ranks, s | speed of ranks |\n|---|---|---|---|"
    )
    for model in models:
        for workload in workloads:
            times: dict[int, list[float]] = {1: [], count: []}
            for _ in range(repeats):
                for size, own in times.items():
                    own.append(in_process(model, workload, dtype, size, count, scale))
            medians = [statistics.median(own) for own in times.values()]
            ratio = medians[0] / medians[1]
            found[f"{Path(model).stem} {workload}"] = ratio
            shown = [
                ", ".join(f"{each:.2f}" for each in sorted(own))
                for own in times.values()
            ]
            print(
                f"| {Path(model).stem}, {workload} | {' | '.join(shown)} | {ratio:.2f} |",
                flush=True,
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

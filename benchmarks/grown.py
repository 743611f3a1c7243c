"""What a run over a file that has grown takes, by the number of rows that are known.

    python benchmarks/grown.py --rows 10000 --rows 1000000

A file of distinct requests without a seed, about 150 bytes each, has an answer to each
of its lines but for the last ten, which were added since. Timed is the whole command,
with the demo model: it takes the known answers, computes the others, and writes the
output. Memory is the largest resident memory of its life. No model has made the known
answers: they have the form of a run's, and its own journal has written them. `--shape
batch` takes lines of the OpenAI Batch form. `--edit shuffled` changes the order of all
lines, too. `--from journal` takes the answers from the journal of a run that was broken off.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import click

from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import Record
from fminfer.files.status_file import read_status
from fminfer.job.journaled_input import JournaledInput

NUM_NEW = 10
Shape = Literal["bare", "batch"]
RUN = [sys.executable, "-m", "fminfer", "run"]


def make_line(number: int, shape: Shape) -> bytes:
    """Return one distinct line."""
    words = " ".join(f"word{number * 7919 % (13 + place)}" for place in range(14))
    body = {"prompt": f"row {number}: {words}", "max_tokens": 4}
    if shape == "bare":
        return json.dumps(body).encode() + b"\n"
    line = {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    }
    return json.dumps(line).encode() + b"\n"


def write_lines(path: Path, shape: Shape, numbers: Iterable[int]) -> None:
    """Write a file without holding its lines: a process's peak memory counts its
    parent's, too."""
    with path.open("wb") as file:
        file.writelines(make_line(number, shape) for number in numbers)


def result_of(shape: Shape, number: int) -> dict[str, Any]:
    """Return an answer as short as those of a small model."""
    choice = {
        "text": f" answer {number}",
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
    }
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": 90, "completion_tokens": 4, "total_tokens": 94}
    result = {"choices": [choice], "usage": usage | {"prompt_tokens_details": details}}
    if shape == "batch":
        head = {
            "id": f"cmpl-{number:032x}",
            "object": "text_completion",
            "created": 1,
            "model": "m",
        }
        return head | result
    return result | {
        "request_time": {"batch_time": 0.5, "batch_size": 30.0, "queue_time": 0.25}
    }


def read_fingerprint(folder: Path) -> dict[str, str]:
    """Return the fingerprint of the command's runs, without an input's own."""
    path = folder / "one.jsonl"
    path.write_bytes(make_line(0, "bare"))
    subprocess.run([*RUN, str(path), "-q"], check=True)
    status = read_status(folder / "output_one.jsonl")
    assert status is not None, "the run was complete"
    return {
        name: value for name, value in status["metadata"].items() if name != "the input"
    }


def write_answers(
    path: Path, shape: Shape, fingerprint: dict[str, str], *, is_whole: bool
) -> None:
    """Answer all lines of a file but the last one, which is answered if the run is to
    be whole."""
    output = path.with_name(f"output_{path.name}")
    file = JournaledInput(path, 0, output, RunTerms("demo", fingerprint))
    file.begin()
    before = None
    for line in file.read_lines(lambda line: None):
        if before is not None:
            file.add(before)
        envelope = parse_envelope(line)
        before = Record(line, envelope, result_of(shape, line.number), None, 90, 0, 4)
    assert before is not None, "the file has lines"
    if is_whole:
        file.add(before)
    else:
        file.abandon(KeyboardInterrupt())
    assert file.is_finished == is_whole


def run(path: Path) -> tuple[float, float, dict[str, Any]]:
    """Time the command; return seconds, peak memory in MB, and its statistics."""
    stats = path.with_name("stats.json")
    started = time.perf_counter()
    process = subprocess.Popen([*RUN, str(path), "-q", "--stats", str(stats)])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, "the command failed"
    took_s = time.perf_counter() - started
    return took_s, usage.ru_maxrss / 1024, json.loads(stats.read_text())


def measure(
    num_rows: int, shape: Shape, edit: str, source: str, folder: Path
) -> dict[str, float | int | str]:
    """Make a file and its answers, change the file, and run over it."""
    path = folder / f"{shape}_{num_rows}_{edit}_{source}.jsonl"
    is_whole = source == "output"
    write_lines(path, shape, range(num_rows - NUM_NEW + (not is_whole)))
    write_answers(path, shape, read_fingerprint(folder), is_whole=is_whole)
    numbers = [*range(num_rows)]
    if edit == "shuffled":
        random.Random(1).shuffle(numbers)
    write_lines(path, shape, numbers)
    took_s, peak_mb, stats = run(path)
    assert (
        stats["num_taken_rows"] == num_rows - NUM_NEW and stats["num_rows"] == NUM_NEW
    ), stats
    with path.with_name(f"output_{path.name}").open("rb") as answers:
        assert sum(1 for _ in answers) == num_rows
    return {
        **{"rows": num_rows, "shape": shape, "edit": edit, "from": source},
        **{"run_s": round(took_s, 1), "peak_mb": round(peak_mb)},
    }


@click.command()
@click.option(
    "--rows", multiple=True, type=int, default=(10_000, 1_000_000), show_default=True
)
@click.option(
    "--shape", type=click.Choice(["bare", "batch"]), default="bare", show_default=True
)
@click.option(
    "--edit",
    type=click.Choice(["appended", "shuffled"]),
    default="appended",
    show_default=True,
)
@click.option(
    "--from",
    "source",
    type=click.Choice(["output", "journal"]),
    default="output",
    show_default=True,
)
def main(rows: tuple[int, ...], shape: Shape, edit: str, source: str) -> None:
    """Show time and memory for each number of rows."""
    found = []
    for num_rows in rows:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(num_rows, shape, edit, source, Path(folder)))
        each = found[-1]
        print(
            f"{num_rows:>10,} rows  {shape}, {edit}, from {source}  {each['run_s']:6.1f} s  "
            f"{each['peak_mb']:6} MB",
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

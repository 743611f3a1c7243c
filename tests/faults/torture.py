"""Kills runs at random moments, and sees that nothing is lost: `scripts/torture`.

Each round repeats one command. Three times it is killed with SIGKILL: rank 0, one of its
ranks, or all of them; while it loads, after some rows, or about when it finishes. The fourth is
left alone, and then every row must be there once, in the order of the input, with the
text of a run that was never disturbed; and every record that was on disk at a kill must
be in the output in the very same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

NUM_ROWS = 60
NUM_KILLS = 3
VICTIMS = ("first", "rank", "all")


def write_rows(path: Path) -> None:
    """Write rows of many kinds; equal unseeded ones draw by their number, so order matters."""
    with path.open("w") as file:
        for number in range(NUM_ROWS):
            row: dict[str, Any] = {
                "prompt": f"room {number % 5}",
                "max_tokens": 8 + number % 40,
            }
            row |= {"ignore_eos": True, "temperature": 0.9 if number % 2 else 0}
            if number % 7 == 3:
                rooms = {
                    "type": "array",
                    "items": {"enum": ["den", "attic"]},
                    "minItems": 9,
                }
                row |= {"ignore_eos": False, "guided_json": rooms}
            file.write(json.dumps(row) + "\n")
        file.write('{"prompt": 5}\n\nno json\n')


def command(source: Path, output: Path, num_ranks: int) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "fminfer",
        "run",
        str(source),
        "--output",
        str(output),
    ]
    return [
        *start,
        "--max-rows",
        "8",
        *(["--world-size", "2"] if num_ranks == 2 else []),
    ]


def texts(output: Path) -> list[Any]:
    records = map(json.loads, output.read_text().splitlines())
    return [
        (r["request"], [c["text"] for c in r["result"]["choices"]]) for r in records
    ]


def kept_records(output: Path) -> set[bytes]:
    """Return the records of the whole lines of a journal that a killed run has left."""
    journal = Path(f"{output}.journal")
    if not journal.exists():
        return set()
    lines = journal.read_bytes().splitlines(keepends=True)[1:]
    return {
        line[line.index(b'"record":') + 9 : -2]
        for line in lines
        if line.endswith(b"}\n")
    }


@dataclass(slots=True)
class Moment:
    """When a run is killed: so many seconds after so many rows are on disk."""

    phase: str
    num_rows: int
    wait_s: float


@dataclass(slots=True)
class Reference:
    """A run that was left alone."""

    source: Path
    output: Path
    took_s: float

    @property
    def errors(self) -> bytes:
        return self.output.with_name("whole.errors.jsonl").read_bytes()


def run_alone(folder: Path, num_ranks: int) -> Reference:
    source = folder / "rows.jsonl"
    output = folder / "whole.jsonl"
    write_rows(source)
    started = time.monotonic()
    done = subprocess.run(
        command(source, output, num_ranks), capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    return Reference(source, output, time.monotonic() - started)


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Tell whether a process is there, and not only waiting for the system to take note."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def kill(run: subprocess.Popen[bytes], victim: str, source: random.Random) -> None:
    """Kill a run's processes, and wait until none is left, as a machine that starts anew has."""
    ranks = children_of(run.pid)
    victims = {"first": [run.pid], "all": [*ranks, run.pid]}.get(victim, [run.pid])
    if victim == "rank" and ranks:
        victims = [source.choice(ranks)]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    run.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, f"a rank outlives rank 0: {ranks}"
        time.sleep(0.05)


def wait_for_phase(run: subprocess.Popen[bytes], moment: Moment, output: Path) -> None:
    """Wait until a run is where it is to be killed, or has ended."""
    while moment.num_rows and run.poll() is None and not output.exists():
        if len(kept_records(output)) >= moment.num_rows:
            break
        time.sleep(0.002)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(moment.wait_s)


def choose_moment(source: random.Random, num_kept: int, took_s: float) -> Moment:
    """Choose when to kill: while it loads, after a number of new rows, or about when
    all are in."""
    phase = source.choice(("loading", "answering", "finishing"))
    if phase == "loading":
        return Moment(phase, 0, source.uniform(0, took_s))
    most = NUM_ROWS + 2  # with the errors
    first = min(num_kept + 1, most)
    num_rows = source.randint(first, most) if phase == "answering" else most
    return Moment(
        phase, num_rows, source.uniform(0, 0.05 if phase == "answering" else 0.3)
    )


def one_round(
    number: int, whole: Reference, folder: Path, num_ranks: int, met: Counter[str]
) -> str:
    """Kill a run at moments that follow from the round's number; return what was done.

    Args:
        met: counts what each kill came upon.
    """
    source = random.Random(number)
    output = folder / f"out_{number}.jsonl"
    kept: set[bytes] = set()
    done = []
    for _ in range(NUM_KILLS):
        victim = source.choice(VICTIMS)
        moment = choose_moment(source, len(kept), whole.took_s)
        run = subprocess.Popen(
            command(whole.source, output, num_ranks), stderr=subprocess.DEVNULL
        )
        wait_for_phase(run, moment, output)
        phase = moment.phase if run.poll() is None else "over"
        kill(run, victim, source)
        kept |= kept_records(output)
        met[phase] += 1
        done.append(f"{victim} {phase}, {len(kept)} rows")
        if output.exists() and not Path(f"{output}.journal").exists():
            break  # it was complete
    last = subprocess.run(
        command(whole.source, output, num_ranks),
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = f"round {number}: {'; '.join(done)}"
    assert last.returncode == 3, f"{said}: {last.stderr}"
    errors = output.with_name(f"out_{number}.errors.jsonl").read_bytes()
    assert texts(output) == texts(whole.output), said
    assert errors == whole.errors, said
    finished = {*output.read_bytes().splitlines(), *errors.splitlines()}
    assert kept <= finished, f"{said}: a row that was on disk has changed"
    names = {path.name for path in folder.glob(f"out_{number}.*")}
    endings = ("jsonl", "errors.jsonl", "status.json")
    assert names == {f"out_{number}.{ending}" for ending in endings}, f"{said}: {names}"
    return said


@click.command()
@click.option("--rounds", default=100, show_default=True)
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1, 2))
@click.option(
    "--first", default=0, help="Number of the first round.", show_default=True
)
def main(rounds: int, ranks: int, first: int) -> None:
    """Kill runs at random moments; end with status 1 at the first row that is lost."""
    met: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole = run_alone(Path(folder), ranks)
        for number in range(first, first + rounds):
            print(one_round(number, whole, Path(folder), ranks, met), flush=True)
    print(f"{rounds} of {rounds} rounds lost nothing ({ranks} rank{'s' * (ranks > 1)})")
    print(
        "kills met runs that were "
        + "; ".join(f"{name}: {count}" for name, count in met.items())
    )


if __name__ == "__main__":
    main()

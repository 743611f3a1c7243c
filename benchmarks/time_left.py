#!/usr/bin/env python
"""How true the time left is that `fminfer run` shows: what it says in a run, against the truth.

    python benchmarks/time_left.py --model /models/SmolLM2-135M-Instruct --dtype float32

Each workload is a run of the command in a process of its own. What the bar knows is
noted at each update. The table shows the expected total at some shares of the run as a
multiple of the true one: 1.00 is right, 1.20 a fifth too long. One JSON line comes last.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

SHARES = (0.1, 0.25, 0.33, 0.5, 0.75)
Row = dict[str, Any]
WORDS = (
    "the ship",
    "sails over",
    "a wide sea",
    "of glass",
    "old men",
    "tell of",
    "lost gold",
)
ASK = "Tell me in a sentence or two about {}."
ASK_LONG = "List {} facts about {}, one a line."
THINGS = (
    "water",
    "wind",
    "iron",
    "bread",
    "horses",
    "music",
    "rivers",
    "clocks",
    "paper",
)


def text_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def row_of(rng: random.Random, num_words: int, max_tokens: int) -> Row:
    """Return a request that draws exactly max_tokens."""
    return {
        "prompt": text_of(rng, num_words),
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


def make_short(rng: random.Random, n: int) -> list[Row]:
    return [
        row_of(rng, rng.randint(20, 40), rng.randint(16, 32)) for _ in range(24 * n)
    ]


def make_few_long(rng: random.Random, n: int) -> list[Row]:
    """Make 12 rows, of which two draw ten times as much."""
    return [
        row_of(rng, 30, 30 * min(n, 3) * (10 if i in (3, 8) else 1)) for i in range(12)
    ]


def make_uneven(rng: random.Random, n: int) -> list[Row]:
    return [row_of(rng, 20, int(min(n, 8) * 2 ** rng.uniform(0, 6))) for _ in range(40)]


def make_prefixes(rng: random.Random, n: int) -> list[Row]:
    head = text_of(rng, 150) + " "
    rows = [row_of(rng, rng.randint(60, 120), 4) for _ in range(12 * n)]
    return [row | {"prompt": head + row["prompt"]} for row in rows]


def make_chats(rng: random.Random, n: int) -> list[Row]:
    """Make chats that end long before max_tokens."""
    texts = [
        ASK_LONG.format(rng.randint(2, 5), rng.choice(THINGS)) for _ in range(4 * n)
    ]
    texts += [ASK.format(rng.choice(THINGS)) for _ in range(8 * n)]
    rng.shuffle(texts)
    how = {"max_tokens": 1000, "temperature": 1.0}
    return [
        how | {"messages": [{"role": "user", "content": text}], "seed": seed}
        for seed, text in enumerate(texts)
    ]


def make_halves(rng: random.Random, n: int) -> list[Row]:
    """Make a file whose first half is short rows and whose second half is long ones."""
    half = 12 * n
    rows = [row_of(rng, 20, 8) for _ in range(half)]
    return rows + [row_of(rng, 60, 48) for _ in range(half)]


# Each with the flags of its run, the number of its files, and the lines that an earlier run has
# answered already.
WORKLOADS: dict[
    str, tuple[Callable[[random.Random, int], list[Row]], list[str], int, bool]
] = {
    "short": (make_short, [], 1, False),
    "few long": (make_few_long, [], 1, False),
    "uneven, 8 at once": (make_uneven, ["--max-rows", "8"], 1, False),
    "shared prefix": (make_prefixes, [], 1, False),
    "chats": (make_chats, [], 1, False),
    "chats, 16 at once": (make_chats, ["--max-rows", "16"], 1, False),
    "short, then long": (make_halves, ["--max-rows", "32"], 1, False),
    "resumed": (make_uneven, ["--max-rows", "8"], 1, True),
    "two files": (make_halves, ["--max-rows", "32"], 2, False),
    "two pipelines": (
        make_uneven,
        ["--data-group-size", "2", "--max-rows", "4"],
        1,
        False,
    ),
}


def run_command(arguments: list[str], note: Path | None) -> None:
    """Run the command here, and note what its bar knows at each update."""
    from fminfer.cli import app
    from fminfer.job import file_job
    from fminfer.job.progress import ProgressBar

    class WatchedBar(ProgressBar):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self.said: list[tuple[float, float | None]] = []
            self.started_s = self.noted_s = time.perf_counter()

        def update(self, *args: Any) -> None:
            super().update(*args)
            now_s = time.perf_counter()
            if now_s - self.noted_s > 0.1:
                self.noted_s = now_s
                self.said.append(
                    (now_s - self.started_s, self.predict_left_s(args[-1]))
                )

        def close(self) -> None:
            super().close()
            if note is not None:
                took_s = time.perf_counter() - self.started_s
                note.write_text(json.dumps({"took_s": took_s, "said": self.said}))

    file_job.ProgressBar = WatchedBar  # type: ignore[misc]
    app.main(["run", "-q", *arguments])


def start(arguments: list[str], note: Path) -> None:
    command = [sys.executable, __file__, "--note", str(note), "--", *arguments]
    done = subprocess.run(command, check=False)
    # 1: --limit left lines
    assert done.returncode in (0, 1), f"exit status {done.returncode}"


def measure(name: str, flags: list[str], scale: int, folder: Path) -> dict[str, Any]:
    """Run a workload; return how long it took, and what its bar said."""
    make, own_flags, num_files, is_resumed = WORKLOADS[name]
    rows = make(random.Random(7), scale)
    each = len(rows) // num_files
    files = [folder / f"rows{place}.jsonl" for place in range(num_files)]
    for place, file in enumerate(files):
        part = rows[place * each : (place + 1) * each]
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    note = folder / "note.json"
    arguments = [*map(str, files), *flags, *own_flags]
    if is_resumed:
        start([*arguments, "--limit", str(len(rows) // 2)], note)
    start(arguments, note)
    found: dict[str, Any] = json.loads(note.read_text())
    return found


def ratio_at(found: dict[str, Any], share: float) -> float | None:
    """Return the expected total, at a share of the run, over the true one; None: not known."""
    said = [each for each in found["said"] if each[0] >= share * found["took_s"]]
    if not said or said[0][1] is None:
        return None
    return float((said[0][0] + said[0][1]) / found["took_s"])


@click.command()
@click.option("--model", default="", help="Folder of a model; default: the demo model.")
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--scale", default=4, show_default=True, help="Of the number of rows, or of tokens."
)
@click.option(
    "--only", multiple=True, type=click.Choice([*WORKLOADS]), help="These workloads."
)
@click.option("--note", type=Path, hidden=True)
@click.argument("arguments", nargs=-1)
def main(
    model: str,
    dtype: str,
    scale: int,
    only: tuple[str, ...],
    note: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Show how true the time left is."""
    if note is not None:
        run_command([*arguments], note)
        return
    flags = ["--dtype", dtype, *(["--model-name", model] if model else [])]
    results: dict[str, Any] = {}
    print(
        f"{'workload':<20}{'seconds':>8}"
        + "".join(f"{share:>8.0%}" for share in SHARES)
    )
    for name in only or WORKLOADS:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, flags, scale, Path(folder))
        ratios = [ratio_at(found, share) for share in SHARES]
        shown = ["?" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        print(
            f"{name:<20}{found['took_s']:>8.1f}" + "".join(f"{s:>8}" for s in shown),
            flush=True,
        )
        results[name] = {"seconds": found["took_s"], "ratios": ratios}
    print(
        json.dumps(
            {"model": model, "dtype": dtype, "shares": SHARES, "workloads": results}
        )
    )


if __name__ == "__main__":
    main()

"""`fminfer bench` times what it says, over ranks too, and prints the BLOOM scripts' figures."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.core.errors import OutOfMemoryError
from fminfer.estimate.bench import TOO_SMALL, Figures, NoRoom, _Bench
from fminfer.pipeline.ranks import ALONE, Spread
from tests.forked import run_forked

# It lets each rank but rank 0 run out of memory in a step of four rows, as a full GPU would.
NO_MEMORY = """
import sys
from fminfer.core.errors import OutOfMemoryError
from fminfer.forward.stage import Stage

forward = Stage.forward

def fail(self, step, hidden):
    if len(step.draws) >= 4:
        raise OutOfMemoryError("there is no memory for a step of so many rows")
    return forward(self, step, hidden)

if "serve-part" in sys.orig_argv:
    Stage.forward = fail
"""


def bench(*arguments: object) -> tuple[int, str, dict[str, Any]]:
    """Return the exit status, what is printed, and the JSON at its end."""
    done = run_forked(["bench", *arguments])
    last = done.stdout.splitlines()[-1] if done.stdout else "{}"
    return done.returncode, done.stdout + done.stderr, json.loads(last)


def figures(output: str) -> list[dict[str, float]]:
    """Return the figures of each batch, as the scripts print them."""
    parts = output.split("*** Performance stats:")[1:]
    found = [re.findall(r"^(\w.*): ([\d.]+) m?secs$", part, re.M) for part in parts]
    return [{name: float(value) for name, value in each} for each in found]


@pytest.mark.parametrize("flag", ["", "--world-size", "--tp", "--data-group-size"])
def test_the_figures_of_the_scripts(flag: str) -> None:
    """One process only was timed; memory was that of rank 0, without its forecast."""
    flags = [flag, 2] if flag else []
    status, output, told = bench("--batch-sizes", "3,1", "--new-tokens", 7, *flags)
    assert status == 0, output
    num_pipelines = 2 if flag == "--data-group-size" else 1
    assert [row["batch_size"] for row in told["batches"]] == [1, 3], (
        "the smaller ones first"
    )
    for row, each in zip(told["batches"], figures(output), strict=True):
        size = row["batch_size"]
        tokens = row["num_tokens"]
        assert tokens == size * 7 * num_pipelines
        seconds = each[f"Tokenize and generate {tokens} (bs={size}) tokens"]
        assert seconds == pytest.approx(row["seconds"], abs=1e-3)
        ms = each["Throughput per token including tokenize"]
        assert ms == pytest.approx(1000 * row["seconds"] / tokens, abs=0.01)
        ready_s = each["Start to ready to generate"]
        finish_s = each["Start to finish"]
        assert finish_s == pytest.approx(ready_s + seconds, abs=2e-3)
    assert [each["rank"] for each in told["ranks"]] == [*range(len(told["ranks"]))]
    assert len(told["ranks"]) == (2 if flags else 1)
    for each in told["ranks"]:
        peak = each["peak"]["host_bytes"]
        foreseen = each["foreseen_bytes"]
        assert 2**26 < peak < 2**32 and foreseen / 2 < peak < 2 * foreseen
        row = rf"^ +{each['rank']} +{peak / 2**20:.0f} MiB +- +- +{foreseen / 2**20:.0f} MiB$"
        assert re.search(row, output, re.M), output


def test_a_batch_that_does_not_fit_is_oom_and_the_others_are_timed(
    tmp_path: Path,
) -> None:
    """The largest of the sizes ended the command before one was timed."""
    picture = tmp_path / "bench.svg"
    flags = [
        "--batch-sizes",
        "1,4",
        "--budget",
        96,
        "--new-tokens",
        20,
        "--plot",
        picture,
    ]
    status, output, told = bench(*flags)
    assert status == 0, output
    assert (
        f"*** oom (bs=4): {TOO_SMALL}\nIt takes a KV cache of 128 tokens; there are 96"
        in output
    )
    assert re.search(r"^batch size +1 +4\nmsecs a token +[\d.]+ +oom$", output, re.M)
    assert len(figures(output)) == 1
    no_room = told["batches"][1]
    assert no_room["is_oom"] and "is_oom" not in told["batches"][0]
    assert (no_room["needed_kv_tokens"], no_room["num_kv_tokens"]) == (128, 96)
    assert ">oom</text>" in picture.read_text() and "rank 0" in picture.read_text()


def test_status_1_if_no_batch_fits() -> None:
    status, output, told = bench("--batch-sizes", "2", "--new-tokens", 100000)
    assert status == 1 and "raise --budget" in output
    assert [row["is_oom"] for row in told["batches"]] == [True]


def test_a_rank_without_memory_is_oom_too(tmp_path: Path) -> None:
    """Rank 0 was told of a failed rank, not of why, and the process was aborted at its end."""
    (tmp_path / "sitecustomize.py").write_text(NO_MEMORY)
    command = [
        "bench",
        "--world-size",
        "2",
        "--new-tokens",
        "9",
        "--batch-sizes",
        "16,1,8",
    ]
    done = run_forked(command, environ=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert re.search(r"^msecs a token +[\d.]+ +oom +oom$", done.stdout, re.M), (
        done.stdout
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert "rank 1: there is no memory for" in told["batches"][1]["why"]
    assert told["batches"][2]["why"] == "a smaller batch ran out of memory"
    assert len(told["ranks"]) == 2


def time_all(engine: Any, sizes: list[int], spread: Spread = ALONE) -> list[Any]:
    """Time an engine of this process; it generates 7 tokens a row."""
    role = SimpleNamespace(spread=spread)
    run: Any = SimpleNamespace(role=role, elapsed_s=lambda: 1.0)
    return [*_Bench(engine, run, sizes, 7).time_all()]


def test_each_batch_is_generated_whole() -> None:
    """None ends early or is copied, after a row to warm up. By default 256 rows run at most."""
    with closing(fminfer.Engine(dtype="float32", max_rows=300)) as engine:
        before = engine.stats.num_generated_tokens
        counts = []
        for sizes in ([1], [3], [300]):
            time_all(engine, sizes)
            counts.append(engine.stats.num_generated_tokens - before)
            before += counts[-1]
        assert counts == [4 + 7, 4 + 21, 4 + 2100]
        assert engine.stats.max_rows_running == 300


def test_batches_larger_than_one_without_memory_are_not_tried() -> None:
    class Full(fminfer.Engine):
        num_runs = 0

        def run(self, requests: Any, read_ahead: int = 1) -> Any:
            self.num_runs += 1
            if len(requests) > 2:
                raise OutOfMemoryError("there is no memory for a step")
            return super().run(requests, read_ahead)

    with closing(Full(dtype="float32")) as engine:
        rows = time_all(engine, [8, 4, 2])
        assert [type(row) for row in rows] == [Figures, NoRoom, NoRoom]
        assert [row.why for row in rows[1:]] == [
            "there is no memory for a step",
            "a smaller batch ran out of memory",
        ]
        assert engine.num_runs == 3, "one to warm up, and two batches"


def test_each_pipeline_has_a_batch_of_its_own() -> None:
    """One of two pipelines was given all rows of a small batch: up to four that waited."""
    with closing(
        fminfer.Engine(dtype="float32", data_group_size=2, max_rows=8)
    ) as engine:
        assert [each.rank for each in engine.memory] == [0, 1], (
            "known before the first request"
        )
        for size in (1, 2, 8):
            before = [
                each.stats.num_generated_tokens for each in engine._core._pipelines
            ]  # type: ignore[attr-defined]
            time_all(engine, [size], Spread(num_pipelines=2))
            after = [
                each.stats.num_generated_tokens for each in engine._core._pipelines
            ]  # type: ignore[attr-defined]
            assert [b - a for a, b in zip(before, after, strict=True)] == [
                4 + 7 * size
            ] * 2


def test_vectors_over_ranks() -> None:
    flags = ["--random-init", "bert-base", "--max-layers", 2, "--max-model-len", 64]
    status, output, told = bench(*flags, "--batch-sizes", "1,2", "--world-size", 2)
    assert status == 0, output
    found = {(row["batch_size"], row["length"]) for row in told["batches"]}
    assert found == {(1, 16), (2, 16), (1, 64), (2, 64)}
    assert all(row["rows_per_s"] > 0 for row in told["batches"])
    assert len(told["ranks"]) == 2
    assert re.search(r"^batch size +1 +2\nrows/s of 16 .*\nrows/s of 64 ", output, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "0"], "must be 1 or more"),
        (["--batch-sizes", "4", "--max-rows", "2"], "--max-rows is 2"),
        (["--fp16", "--dtype", "float32"], "contradict"),
        (["--plot", "bench.png"], "must end with .svg"),
        (["--plot", "no/folder/bench.svg"], "there is no folder no/folder"),
        (["--calibrate", "--world-size", "2"], "leave out --world-size"),
        (["--calibrate", "--offload", "disk"], "leave --offload out"),
        (["--world-size", "99"], "layers"),
    ],
)
def test_what_cannot_be_timed_is_told(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(main, ["bench", *arguments])
    assert found.exit_code == 2 and message in found.output

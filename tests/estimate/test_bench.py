"""`fminfer bench` times what it says, and prints the figures of the BLOOM scripts."""

from __future__ import annotations

import json
import re
import resource

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.estimate import bench


def test_each_batch_is_generated_whole_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    engine_class = bench.Engine

    class Watched(engine_class):  # type: ignore[misc, valid-type]
        def run(self, requests):  # type: ignore[no-untyped-def]
            before = self.stats.num_generated_tokens
            yield from super().run(requests)
            runs.append((len(requests), self.stats.num_generated_tokens - before))

    monkeypatch.setattr(bench, "Engine", Watched)
    found = CliRunner().invoke(main, ["bench", "--batch-sizes", "1,3", "--new-tokens", "7"])
    assert found.exit_code == 0, found.output
    assert runs == [(1, 4), (1, 7), (3, 21)], "one to warm up; none ends early or is copied"
    summary = json.loads(found.output.splitlines()[-1])
    for row, text in zip(summary["batches"], found.output.split("***")[1:], strict=True):
        figures = {k: float(v) for k, v in re.findall(r"^(\w.*): ([\d.]+) m?secs$", text, re.M)}
        tokens, size = row["num_tokens"], row["batch_size"]
        generate_s = figures[f"Tokenize and generate {tokens} (bs={size}) tokens"]
        assert generate_s == pytest.approx(row["generate_s"], abs=1e-3)
        ms = figures["Throughput per token including tokenize"]
        assert ms == pytest.approx(1000 * row["generate_s"] / tokens, abs=0.01)
        ready_s, finish_s = figures["Start to ready to generate"], figures["Start to finish"]
        assert finish_s == pytest.approx(ready_s + generate_s, abs=2e-3)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # so far, by all tests
        assert used / 4 < row["host_bytes"] <= used
        memory = f"CPU {row['host_bytes'] / 2**30:.2f} GiB, GPU 0.00 GiB"
        assert re.search(rf"^Memory of the process: {memory}$", text, re.M)


def test_a_batch_may_be_larger_than_a_run_takes_at_once() -> None:
    found = CliRunner().invoke(main, ["bench", "--batch-sizes", "300", "--new-tokens", "2"])
    assert found.exit_code == 0, found.output
    (batch,) = json.loads(found.output.splitlines()[-1])["batches"]
    assert batch["num_tokens"] == 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "0"], "must be 1 or more"),
        (["--batch-sizes", "2", "--new-tokens", "100000"], "raise --budget"),
        (["--batch-sizes", "4", "--max-rows", "2"], "--max-rows is 2"),
        (["--batch-sizes", "4", "--budget", "96", "--new-tokens", "20"], "a KV cache of 128"),
        (["--fp16", "--dtype", "float32"], "contradict"),
    ],
)
def test_what_cannot_be_timed_is_told(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(main, ["bench", *arguments])
    assert found.exit_code in (1, 2) and message in found.output

"""A run without input makes requests up where the command line names hyperparameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.job.synthetic import Hyperparameters, Synthetic
from tests.forked import run_forked

FLAGS = ["--dtype", "float32", "--kernels", "off", "--device", "cpu"]
BATCHES = ["--batch-size", "3", "--num-iters", "2", "--input-seq-length", "20"]
BATCHES += ["--generate-seq-length", "4"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["run", *FLAGS, *map(str, arguments)])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_without_input_and_flags_is_wrong_usage() -> None:
    """A forgotten file must not be answered with made-up requests."""
    found = run()
    assert found.exit_code == 2
    assert "no input" in found.stderr and "--batch-size" in found.stderr


def test_one_batch_of_one_request_is_told_in_the_singular() -> None:
    """It was told as "1 batches of 1 requests"."""
    told = Synthetic(Hyperparameters(batch_size=1), 1).describe(2.0)
    assert told.startswith("1 batch of 1 request, each a prompt of 128 random tokens")


def test_requests_are_made_up_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a command line was told that there is no input."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    found = run(*BATCHES, "--stats", "stats.json")
    assert found.exit_code == 0, found.output
    assert "Loading fminfer-demo (" in found.stderr and "Ready after " in found.stderr
    told = (
        "made up   2 batches of 3 requests, each a prompt of 20 random tokens and 4 "
        "new ones; "
    )
    assert (
        told in found.stderr
        and "24 generated" in found.stderr
        and "output " not in found.stderr
    )
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert (
        stats["num_rows"] == 6
        and stats["outputs"] == []
        and told in "made up   " + stats["made_up"]
    )
    assert stats["engine"]["max_rows_running"] == 3
    left = sorted(
        p.name for p in tmp_path.rglob("*") if not p.name.startswith("torchinductor")
    )
    assert left == ["stats.json", "tmp"]


def test_every_flag_reaches_the_requests(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    flags = [
        "--temperature",
        "1",
        "--top-p",
        "0.9",
        "--top-k",
        "7",
        "--num-completions",
        "2",
    ]
    flags += ["--best-of", "3"]
    flags += ["--stop", "a", "--stop", "b", "--echo-prompt", "--top-k-per-token", "2"]
    found = run(*BATCHES, *flags, "--output", output)
    assert found.exit_code == 0, found.output
    rows = records(output)
    asked = {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 7,
        "n": 2,
        "best_of": 3,
    }
    asked |= {"stop": ["a", "b"], "echo": True, "logprobs": 2, "ignore_eos": True}
    assert len(rows) == 6
    for row in rows:
        prompt = row["request"].pop("prompt")
        assert row["request"] == asked and len(prompt) == 20
        first = row["result"]["choices"][0]
        assert (
            len(row["result"]["choices"]) == 2
            and len(first["logprobs"]["tokens"]) >= 20
        )
    again = run(*BATCHES, *flags, "--output", output)
    assert again.exit_code == 0 and "6 kept" in again.stderr, "the same requests"


def test_best_of_counts_among_the_sequences_that_run() -> None:
    """Greedy candidates would be equal, so that one runs; room for n let more requests run."""
    flags = Hyperparameters(batch_size=4, num_completions=2, temperature=1.0)
    assert Synthetic(flags).num_rows == 8
    assert Synthetic(replace(flags, best_of=5)).num_rows == 20
    assert Synthetic(replace(flags, best_of=5, temperature=None)).num_rows == 4


def test_what_cannot_be_asked_for_is_told_once(tmp_path: Path) -> None:
    found = run("--input-seq-length", 5000, "--generate-seq-length", 100)
    assert found.exit_code == 2 and "this model's context is" in found.stderr
    found = run("--temperature", "-1")
    assert found.exit_code == 2 and found.stderr.count("temperature") == 1
    with pytest.raises(UsageError, match="too many to be made up"):
        Synthetic(Hyperparameters(batch_size=8), 99999999999999)


def test_twenty_million_tokens_are_made_up_and_no_more() -> None:
    assert (
        Synthetic(
            Hyperparameters(batch_size=1, input_seq_length=20_000_000), 1
        ).num_rows
        == 1
    )
    with pytest.raises(UsageError, match="at most 20,000,000 tokens are"):
        Synthetic(Hyperparameters(batch_size=1, input_seq_length=6_666_667), 3)


def test_lines_keep_their_own_hyperparameters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": [5], "max_tokens": 2, "temperature": 0}\n')
    found = run(path, "--temperature", "1", "--stop", "x")
    assert found.exit_code == 0
    assert "--temperature, --stop: only for requests that are made up" in found.stderr
    assert records(tmp_path / "output_a.jsonl")[0]["request"]["temperature"] == 0


def test_a_flag_of_zero_is_given() -> None:
    """--temperature 0 was neither followed nor told of: 0 equals False."""
    flags = Hyperparameters(temperature=0.0, top_k=0, top_k_per_token=0)
    assert flags.flags == ["--temperature", "--top-k", "--top-k-per-token"]
    assert Hyperparameters().flags == []


def test_what_says_nothing_of_a_line_is_told_where_others_replace_its_own(
    tmp_path: Path,
) -> None:
    """--batch-size beside --overwrite-request-args meant nothing, and nobody said so."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": [5], "max_tokens": 2}\n')
    found = run(
        path, "--overwrite-request-args", "--temperature", "0", "--batch-size", "3"
    )
    assert (
        "\n--batch-size: only for requests that are made up.\n" in "\n" + found.stderr
    )


def test_ranks_answer_made_up_requests(tmp_path: Path) -> None:
    found = run_forked(["run", *FLAGS, *BATCHES, "--world-size", "2"], folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "made up   2 batches" in found.stderr and "stages busy" in found.stderr
    assert not [*tmp_path.iterdir()]

"""`fminfer run --result-cache`, from the command line to the summary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fminfer.answers.answer_store import FILE
from fminfer.cli.app import main
from tests.forked import run_forked

GREEDY = {
    "prompt": "Question: How do you go from the den to the porch?\nAnswer:",
    "temperature": 0,
}
REQUESTS: list[dict[str, Any]] = [
    *(GREEDY | {"max_tokens": number} for number in range(4, 10)),
    GREEDY | {"temperature": 1, "max_tokens": 5},  # drawn anew
    GREEDY | {"n": 0},  # wrong
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["run", "--dtype", "float32", *map(str, words)])


def choices(path: Path) -> list[Any]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    return [answer["result"]["choices"] for answer in answers]


@pytest.mark.parametrize("flags", [[], ["--data-group-size", 2]])
def test_another_run_takes_the_answers(
    source: Path, tmp_path: Path, flags: list[Any]
) -> None:
    """Also over several pipelines, of which only the first process has the folder."""
    cache = tmp_path / "cache"
    outputs = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    stats = tmp_path / "stats.json"
    for output, num_kept in zip(outputs, (0, 6), strict=True):
        words = [
            source,
            "--result-cache",
            cache,
            "--output",
            output,
            "--stats",
            stats,
            *flags,
        ]
        done = run_forked(["run", "--dtype", "float32", *words])
        assert done.returncode == 3, done.stderr
        assert f"cache     {num_kept} requests had an answer in {cache}" in done.stderr
        told = json.loads(stats.read_text())
        assert told["result_cache"] == str(cache) and told["cache_trouble"] == ""
        assert told["engine"]["num_kept_requests"] == num_kept
    assert choices(outputs[0]) == choices(outputs[1])


def test_a_damaged_cache_costs_no_row(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert (
        run(
            source, "--result-cache", cache, "--output", tmp_path / "one.jsonl"
        ).exit_code
        == 3
    )
    (cache / FILE).write_bytes(os.urandom(5000))
    done = run(source, "--result-cache", cache, "--output", tmp_path / "two.jsonl")
    assert done.exit_code == 3 and f"{FILE} is damaged" in done.stderr
    assert choices(tmp_path / "one.jsonl") == choices(tmp_path / "two.jsonl")


def test_a_cache_that_cannot_be_made_costs_a_warning(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    stats = tmp_path / "stats.json"
    done = run(source, "--result-cache", tmp_path / "file" / "cache", "--stats", stats)
    assert done.exit_code == 3 and done.stderr.count("Warning: --result-cache") == 1
    assert "warning   --result-cache was given up" in done.stderr
    assert json.loads(stats.read_text())["cache_trouble"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--batch-size 2 --result-cache .", "--result-cache with made-up requests"),
        (
            "in.jsonl --result-cache-size 1G",
            "has no effect without --result-cache FOLDER",
        ),
        ("in.jsonl --result-cache s3://b/c", "--result-cache s3://b/c is a URL"),
        ("in.jsonl --result-cache in.jsonl", "--result-cache in.jsonl is a file"),
        ("in.jsonl --result-cache . --result-cache-size 9K", "give at least 1 MiB"),
        ("in.jsonl --result-cache . --result-cache-size 9", "'9' is no size"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: str, says: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    done = run(*flags.split())
    assert done.exit_code == 2 and says in done.stderr, done.stderr

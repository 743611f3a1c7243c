"""What answers cost: over runs that a status file names, and those before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fminfer.client.costs import BILLED_BEFORE, Costs, Tokens, read_billed_tokens
from fminfer.client.remote_options import RemoteOptions
from fminfer.core.errors import UsageError
from fminfer.engine.stats import EngineStats
from fminfer.files.status_file import status_path

PRICES = RemoteOptions(
    engine="http://a/v1", price_in=1.0, price_out=2.0, stop_at_cost=10.0
)


def run_entry(
    run_id: str, before: tuple[int, int], num_in: int, num_out: int
) -> dict[str, Any]:
    return {
        "id": run_id,
        BILLED_BEFORE: [*before],
        "stats": {"num_prompt_tokens": num_in, "num_generated_tokens": num_out},
    }


def save_status(output: Path, *runs: dict[str, Any]) -> Path:
    counts = {"total": 1, "completed": 1, "failed": 0}
    status = {"request_counts": counts, "fminfer": {"runs": [*runs]}}
    status_path(output).write_text(json.dumps(status))
    return output


def test_nothing_was_billed_before_the_first_run(tmp_path: Path) -> None:
    assert read_billed_tokens([tmp_path / "answers.jsonl"]) == Tokens()


def test_runs_of_an_output_are_added_up_with_those_that_its_status_no_longer_names(
    tmp_path: Path,
) -> None:
    output = save_status(
        tmp_path / "answers.jsonl",
        run_entry("a", (100, 10), 5, 1),
        run_entry("b", (105, 11), 7, 2),
    )
    assert read_billed_tokens([output]) == Tokens(112, 13)


def test_a_run_that_wrote_two_outputs_is_counted_once(tmp_path: Path) -> None:
    outputs = [
        save_status(tmp_path / name, run_entry("a", (0, 0), 5, 1))
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert read_billed_tokens(outputs) == Tokens(5, 1)


@pytest.mark.parametrize("damage", [None, "x", [], {"id": 3, BILLED_BEFORE: ["x", 1]}])
def test_a_damaged_status_counts_as_nothing(tmp_path: Path, damage: Any) -> None:
    output = tmp_path / "answers.jsonl"
    runs = damage if isinstance(damage, list) else [damage]
    save_status(output, *runs)
    assert read_billed_tokens([output]) in (Tokens(), Tokens(0, 1))


def test_a_limit_ends_a_run_by_what_all_runs_have_cost() -> None:
    costs = Costs.of_options(PRICES, Tokens(4_000_000, 1_000_000))
    assert costs is not None
    stats = EngineStats(
        num_prompt_tokens=1_500_000,
        num_cached_tokens=500_000,
        num_generated_tokens=500_000,
    )
    assert costs.find_end(stats) is None  # 4 + 2 + 2 + 1
    stats.num_generated_tokens += 500_000
    end = costs.find_end(stats)
    assert end is not None and end.reason == "out_of_time"
    assert "cost 10" in str(end) and "--stop-at-cost is 10" in str(end)
    assert costs.describe(stats) == "4; all runs of these outputs 10"


def test_without_prices_nothing_is_said() -> None:
    assert Costs.of_options(RemoteOptions(engine="http://a/v1"), Tokens()) is None
    with pytest.raises(UsageError, match="--price-in or --price-out"):
        RemoteOptions(engine="http://a/v1", stop_at_cost=1.0)


def test_files_that_ended_at_other_times_are_not_counted_twice(tmp_path: Path) -> None:
    """A folder's first file names runs that the later ones' `billed_before` has in it."""
    outputs = [
        save_status(tmp_path / "a.jsonl", run_entry("a", (0, 0), 100, 10)),
        save_status(
            tmp_path / "b.jsonl",
            run_entry("b", (100, 10), 50, 5),
            run_entry("c", (150, 15), 7, 1),
        ),
    ]
    assert read_billed_tokens(outputs) == Tokens(157, 16)


def test_runs_beside_each_other_are_added(tmp_path: Path) -> None:
    outputs = [
        save_status(tmp_path / f"{name}.jsonl", run_entry(name, (0, 0), 100, 10))
        for name in "ab"
    ]
    assert read_billed_tokens(outputs) == Tokens(200, 20)

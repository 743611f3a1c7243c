"""The simulated pipeline keeps to arithmetic: what must be busy is, and what must wait waits."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
# scripts, not a package: they find each other like this
sys.path.insert(0, str(BENCHMARKS))

from pipeline_clock import (  # noqa: E402
    Driver,
    Engine,
    Outcome,
    SimulatedPipeline,
    Workload,
    run_engine,
)
from pipeline_costs import MACHINES, SHAPES, Link, StageCost, Work, build_stages, split  # noqa: E402
from simulate_pipeline import main  # noqa: E402

from tests.conftest import more  # noqa: E402

NUM_ROWS = 24
NUM_DRAWS = 200


def simulate(
    stage_s: list[float],
    micro_batches: int,
    *,
    latency_s: float = 0.0,
    is_by_token: bool = False,
    driver: Driver = Driver(0.0, 0.0),  # noqa: B008
) -> Outcome:
    """Let rows of one prompt token, all of one length, run over stages of given times.

    Args:
        stage_s: seconds of each stage's work on a step, or if `is_by_token` on a token.
    """
    stages = [
        lambda work, each=each: each * (work.num_tokens if is_by_token else 1)
        for each in stage_s
    ]
    hops = [Link(latency_s, 1e30)] * len(stages)
    pipeline = SimulatedPipeline(stages, hops, driver, token_bytes=2)
    engine = Engine(100_000, micro_batches, max_rows=NUM_ROWS, min_share=1)
    return run_engine(pipeline, engine, Workload(NUM_ROWS, 1, NUM_DRAWS, spread=0.0))


def test_one_stage_is_always_busy() -> None:
    assert simulate([1.0], 2).busy == pytest.approx([1.0], abs=0.01)


@pytest.mark.parametrize("num_stages", [2, 4, pytest.param(8, marks=more)])
def test_one_micro_batch_keeps_one_stage_of_p_busy(num_stages: int) -> None:
    found = simulate([1.0] * num_stages, 1)
    assert found.busy == pytest.approx([1 / num_stages] * num_stages, abs=0.01)
    assert found.round_s == pytest.approx(num_stages)
    assert found.generated_per_s == pytest.approx(NUM_ROWS / num_stages, rel=0.02)


@pytest.mark.parametrize("num_stages", [2, 4, pytest.param(8, marks=more)])
def test_as_many_micro_batches_as_stages_keep_all_busy(num_stages: int) -> None:
    found = simulate([1.0] * num_stages, num_stages)
    assert min(found.busy) > 0.98
    assert found.round_s == pytest.approx(num_stages)


def test_a_step_that_reads_all_weights_costs_the_same_with_fewer_rows() -> None:
    """So one micro-batch more than stages makes the round longer, and hides nothing."""
    assert simulate([1.0] * 4, 4).round_s == pytest.approx(4.0)
    assert simulate([1.0] * 4, 8).round_s == pytest.approx(8.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    found = simulate([1.0, 2.0, 1.0], 4)
    assert found.busy == pytest.approx([0.5, 1.0, 0.5], abs=0.02)
    assert found.generated_per_s == pytest.approx(NUM_ROWS / 4 / 2.0, rel=0.02)


def test_one_micro_batch_more_hides_latency() -> None:
    """Work a token: P micro-batches wait for P links each round, P + 1 compute meanwhile."""
    num_stages = 3
    latency_s = 1.0
    whole_s = NUM_ROWS * 1.0  # of all rows on one stage
    exact = simulate([1.0] * 3, num_stages, latency_s=latency_s, is_by_token=True)
    more = simulate([1.0] * 3, num_stages + 1, latency_s=latency_s, is_by_token=True)
    assert exact.round_s == pytest.approx(whole_s + num_stages * latency_s, rel=0.02)
    assert more.round_s == pytest.approx(whole_s, rel=0.02)
    assert min(more.busy) > 0.98 > statistics.fmean(exact.busy)


def test_a_link_carries_one_message_at_a_time() -> None:
    """Two messages of a second each follow one another, though the stages take no time."""
    pipeline = SimulatedPipeline(
        [lambda work: 0.0, lambda work: 0.0],
        [Link(0.0, 2.0), Link(0.0, 2.0)],
        Driver(0, 0),
        2,
    )
    run_engine(
        pipeline,
        Engine(100, 2, max_rows=4, chunk_size=1, min_share=1),
        Workload(2, 1, 1, 0.0),
    )
    assert [step.collected for step in pipeline.steps] == [1.0, 2.0]


def test_the_engine_itself_can_set_the_pace() -> None:
    """A round cannot be shorter than the engine needs for its rows' tokens and its steps."""
    found = simulate([0.001] * 4, 4, driver=Driver(0.5, 0.25))
    assert found.generated_per_s == pytest.approx(
        NUM_ROWS / (4 * 0.5 + NUM_ROWS * 0.25), rel=0.02
    )


def test_weights_and_kv_cache_of_known_models() -> None:
    for name, billions in {
        "opt-175b": 174.6,
        "bloom-176b": 176.2,
        "llama-70b": 70.6,
    }.items():
        shape = SHAPES[name]
        tables = 1 if shape.is_tied else 2
        params = shape.num_layers * shape.layer_params + tables * shape.vocab_params
        assert params / 1e9 == pytest.approx(billions, abs=0.1), name
    assert SHAPES["opt-175b"].kv_size * 96 * 2 == 4_718_592  # bytes a token, all layers


def test_a_stage_takes_the_longer_of_reading_and_computing() -> None:
    machine = MACHINES["a100-80gb"]
    shape = SHAPES["opt-175b"]
    stage = StageCost(shape, machine, 12, is_first=False, is_last=False)
    fixed_s = machine.step_s + 12 * machine.layer_s
    weights_s = 12 * 12 * 12288**2 * 2 / (2.0e12 * 0.8)
    assert stage.time_s(Work(1, 1, 0, 0)) - fixed_s == pytest.approx(weights_s)
    assert stage.time_s(Work(107, 1, 0, 0)) - fixed_s == pytest.approx(weights_s)
    assert stage.time_s(Work(215, 1, 0, 0)) - fixed_s == pytest.approx(
        2 * weights_s, rel=0.01
    )


@pytest.mark.parametrize("rule", ["even", "time", "memory"])
@pytest.mark.parametrize("num_stages", [1, 2, 8, 33, 64])
def test_splits_give_out_all_layers(rule: str, num_stages: int) -> None:
    for shape in SHAPES.values():
        if num_stages <= shape.num_layers:
            counts = split(shape, MACHINES["h200"], num_stages, rule)
            assert len(counts) == num_stages and min(counts) >= 1
            build_stages(shape, MACHINES["h200"], counts)  # checks the sum


def test_a_split_by_memory_holds_more_tokens_than_one_by_time() -> None:
    shape = SHAPES["bloom-176b"]
    machine = MACHINES["a100-80gb"]
    held = {
        rule: min(
            s.kv_tokens
            for s in build_stages(shape, machine, split(shape, machine, 8, rule))
        )
        for rule in ("even", "time", "memory")
    }
    assert split(shape, machine, 8, "even") == [9, 9, 9, 9, 9, 9, 9, 7]
    assert held["memory"] > 1.2 * held["even"] >= 1.2 * held["time"]


def test_the_command_prints_a_table_and_one_json_line() -> None:
    flags = ["--model", "opt-175b", "--machine", "h200", "--prompt-tokens", "8"]
    flags += ["--max-tokens", "8", "--rows", "16", "--min-share", "1"]
    result = CliRunner().invoke(main, [*flags, "--stages", "4"], catch_exceptions=False)
    summary = json.loads(result.output.splitlines()[-1])
    (found,) = summary["results"]
    assert found["stages"] == 4 and found["micro_batches"] == 5
    assert found["layers"] == [24, 24, 24, 24] and found["max_rows_running"] == 16
    result = CliRunner().invoke(main, [*flags, "--stages", "2"])
    assert result.exit_code == 1 and "do not fit" in result.output

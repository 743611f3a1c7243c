"""The bytes that a plan expects are those that loading takes, on one rank and on several."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import fminfer
from fminfer.core.config import EngineConfig
from fminfer.models.checkpoint import Checkpoint, open_model
from fminfer.models.layer_source import LayerSource, open_weights
from fminfer.plan.expected_bytes import layer_bytes
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan
from fminfer.plan.run_plan import RankPlan, RunPlan

GIB = 1 << 30
FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantize": "int8"},
    {"dtype": "float32", "quantize": "int4"},
    {"dtype": "bfloat16", "quantize": "int8"},
    {"dtype": "bfloat16", "quantize": "int4"},
]


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig(kernels="off", device="cpu", **options)


def plan_demo(num_stages: int = 1, num_shards: int = 1, **options: Any) -> RunPlan:
    """Plan a run of the demo model, without kernels and without packing."""
    config = config_of(**options)
    machine = Machine(
        free=64 * GIB,
        num_stages=num_stages,
        num_shards=num_shards,
        local_size=num_stages * num_shards,
    )
    return make_plan(config, open_model(config), machine)


def open_source(plan: RunPlan, rank: RankPlan) -> LayerSource:
    return open_weights(
        plan.checkpoint,
        rank.part,
        holding=plan.holding,
        device=torch.device("cpu"),
        seed=1,
        share=rank.share,
    )


def loaded_bytes(plan: RunPlan, rank: RankPlan) -> int:
    """Load a rank's weights, and return the bytes that they take."""
    source = open_source(plan, rank)
    for number in source.numbers:
        source.load_layer(number)
    source.load_exit(source.load_entry())
    return source.num_bytes


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_an_engine_holds_what_was_expected(options: dict[str, Any]) -> None:
    """Weights and a token of KV cache, to the byte."""
    takes = plan_demo(**options).this_rank.takes
    with fminfer.Engine(kernels="off", device="cpu", budget=64, **options) as engine:
        facts = engine.facts
        cache = engine.pipeline.stages._run.__self__.cache  # type: ignore[attr-defined]
        kv_bytes = cache._kv.nbytes
    assert (
        takes.weights
        == takes.held_weights + takes.mapped
        == facts.measured.weight_bytes
    )
    assert kv_bytes == takes.kv_token * facts.plan.num_kv_tokens


@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_each_rank_loads_what_was_expected_of_it(
    num_stages: int, num_shards: int, options: dict[str, Any]
) -> None:
    plan = plan_demo(num_stages, num_shards, **options)
    assert len(plan.ranks) == num_stages * num_shards
    for rank in plan.ranks:
        assert rank.takes.weights == loaded_bytes(plan, rank), rank.rank


def test_fewer_bits_never_take_more() -> None:
    sizes = {
        str(options): plan_demo(**options).this_rank.takes.weights
        for options in FORMATS
    }
    float32, bfloat16, int8, int4, *narrow = sizes.values()
    assert float32 == 2 * bfloat16
    assert bfloat16 > int8 > int4 and int8 >= narrow[0] and int4 >= narrow[1]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_model(config_of(random_init="llama-160m"))


def test_more_ranks_never_take_more_on_each(checkpoint: Checkpoint) -> None:
    """Of weights, KV cache and a step; together they hold all layers once."""
    config = config_of(random_init="llama-160m", dtype="float32")

    def plan(**facts: int) -> RunPlan:
        return make_plan(config, checkpoint, Machine(free=64 * GIB, **facts))

    for name, counts in (
        ("num_stages", (1, 2, 3, 4, 6, 12)),
        ("num_shards", (1, 2, 4)),
    ):
        plans = [plan(**{name: count}) for count in counts]
        for field in ("weights", "kv_token", "work"):
            most = [max(getattr(t, field) for t in each.takes) for each in plans]
            assert most == sorted(most, reverse=True), (name, field)
        assert len({max(t.weights for t in each.takes) for each in plans}) > 2
        kv_tokens = {sum(takes.kv_token for takes in each.takes) for each in plans}
        assert kv_tokens == {4 * 12 * 2 * 768}

    sums = [sum(t.weights for t in plan(num_stages=n).takes) for n in (1, 3, 12)]
    assert sums == [4 * 162_417_408] * 3


def test_a_process_takes_more_with_each_token_of_its_cache() -> None:
    takes = plan_demo(dtype="float32").this_rank.takes
    sizes = [takes.total(count) for count in (0, 1, 32, 1000)]
    assert [b - a for a, b in pairwise(sizes)] == [
        count * takes.kv_token for count in (1, 31, 968)
    ]
    assert sizes[0] == takes.libraries + takes.weights + takes.work


def test_a_larger_step_needs_more_room_for_its_work(checkpoint: Checkpoint) -> None:
    config = config_of(random_init="llama-160m", dtype="float32")
    sizes = (1, 64, 512, 4096)
    takes = [
        make_plan(
            replace(config, chunk_size=size), checkpoint, Machine(free=64 * GIB)
        ).this_rank.takes
        for size in sizes
    ]
    for (size, few), (larger, many) in pairwise(zip(sizes, takes, strict=True)):
        assert many.work - few.work >= (larger - size) * few.work_token > 0
        assert (many.weights, many.kv_token) == (few.weights, few.kv_token)


def test_a_cache_of_16_bits_takes_half(checkpoint: Checkpoint) -> None:
    wide, narrow = (
        make_plan(
            config_of(random_init="llama-160m", dtype="float32", kv_dtype=kv_dtype),
            checkpoint,
            Machine(free=64 * GIB),
        ).this_rank.takes
        for kv_dtype in ("float32", "bfloat16")
    )
    assert wide.kv_token == 2 * narrow.kv_token > 0
    assert wide.weights == narrow.weights


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_a_layer_takes_its_part_of_the_weights(options: dict[str, Any]) -> None:
    """A shard holds half of what is cut; a matrix cut by its inputs is read whole."""
    plan = plan_demo(**options)
    layers = [layer_bytes(plan, None, n) for n in plan.this_rank.part.layer_numbers]
    source = open_source(plan, plan.this_rank)
    for number, layer in enumerate(layers):
        weights = source.load_layer(number)
        assert layer.held == sum(weight.num_bytes for weight in weights.values())
    assert all(layer.read == layer.whole for layer in layers)

    halves = plan_demo(num_shards=2, **options)
    for number, whole in enumerate(layers):
        shards = [layer_bytes(halves, rank.share, number) for rank in halves.ranks]
        held = sum(shard.held for shard in shards)
        assert whole.held <= held < 1.1 * whole.held, "norms are on both"
        assert all(whole.whole / 2 < each.read < whole.whole for each in shards)
        assert {each.whole for each in shards} == {whole.whole}

"""Predicted times of steps: what bounds them, beside what was measured and published."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fminfer.compute.values.weights import DEQUANTIZED_AT_ONCE, DEQUANTIZED_BYTES
from fminfer.core.config import EngineConfig
from fminfer.forward.decode_graphs import choose_graph_sizes, count_input_bytes
from fminfer.models.checkpoint import open_model
from fminfer.plan.expected_bytes import GRAPH_LAYER_BYTES
from fminfer.plan.machine_facts import Machine
from fminfer.plan.pass_time import (
    LEAST_RATES,
    START_S,
    StepLoad,
    describe_passes,
    limit_step,
    measure_rank,
    predict_load,
    predict_run,
    time_step,
)
from fminfer.plan.planning import make_plan
from fminfer.plan.roofs import KINDS, Roofs
from fminfer.plan.run_plan import RunPlan

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
H200 = KINDS["h200"]
A100 = KINDS["a100-80gb"]
GIB = 1 << 30


def plan_of(size: str, roofs: Roofs, local_size: int = 1, **options: Any) -> RunPlan:
    config = EngineConfig(random_init=size, dtype="bfloat16", **options)
    machine = Machine(
        device_bytes=roofs.device_bytes,
        host_free=roofs.host_bytes,
        num_stages=config.num_stages,
        num_shards=config.tensor_parallel_size,
        num_pipelines=config.data_group_size,
        local_size=local_size,
    )
    return make_plan(config, open_model(config, has_weights=False), machine)


def decode(rows: int, keys: int) -> StepLoad:
    return StepLoad(rows, rows, rows * keys, rows * keys, rows)


def step_of(plan: RunPlan, load: StepLoad, roofs: Roofs) -> tuple[float, str]:
    """Return the predicted seconds of one step, all stages busy, and what bounds it."""
    return predict_run(plan, [(load, 1.0)], math.inf, roofs)


@pytest.mark.parametrize(
    ("rows", "keys", "measured_ms"),
    [(64, 450, 9.0), (256, 450, 18.9), (1024, 250, 63.3)],
)
def test_decode_steps_take_about_what_an_h200_took(
    rows: int, keys: int, measured_ms: float
) -> None:
    """The figures are those of docs/performance.md."""
    seconds, _ = step_of(plan_of("llama-8b", H200), decode(rows, keys), H200)
    assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.25)


def test_prompts_take_about_what_an_h200_took_and_arithmetic_bounds_them() -> None:
    load = StepLoad(16 * 512, 0, 16 * 512, 16 * 512 * 257, 16)
    seconds, bound = step_of(plan_of("llama-8b", H200), load, H200)
    assert 1e3 * seconds == pytest.approx(182, rel=0.25) and bound == "arithmetic"


def test_each_roof_alone_sets_the_pace() -> None:
    """A time follows the roof that bounds it, and no other one."""
    plan = plan_of("llama-8b", H200)
    work = measure_rank(plan, plan.this_rank)
    few = decode(1, 1)
    many = StepLoad(4096, 0, 4096, 4096 * 2048, 1)
    for load, roof, bound in (
        (few, "memory_rate", "memory"),
        (many, "arithmetic_rate", "arithmetic"),
    ):
        base = time_step(plan, work, load, H200)
        slow = time_step(
            plan, work, load, replace(H200, **{roof: getattr(H200, roof) / 10})
        )
        assert max(base, key=base.__getitem__) == bound
        assert slow.pop(bound) == pytest.approx(10 * base.pop(bound))
        assert slow == base
    # 16 bits of 8.03 billion parameters, without the embedding, which is looked up.
    assert work.weight_bytes + work.head_bytes == pytest.approx(2 * 7.5e9, rel=0.01)


def test_streamed_layers_take_their_bytes_through_the_disk_or_the_link() -> None:
    roofs = replace(A100, host_bytes=512 * GIB)
    load = decode(8, 100)
    plan = plan_of("bloom-176b", roofs, offload="cpu")
    streamed = plan.this_rank.streamed
    assert streamed is not None and len(streamed.numbers) == 70
    seconds, bound = step_of(plan, load, roofs)
    assert bound == "host memory"
    assert seconds == pytest.approx(streamed.num_bytes / (32e9 * 0.8), rel=0.01)
    plan = plan_of("bloom-176b", roofs, offload="disk")
    seconds, bound = step_of(plan, load, roofs)
    assert bound == "disk" and seconds == pytest.approx(
        streamed.num_bytes / 7e9, rel=0.01
    )


def test_ranks_of_a_node_share_its_disk() -> None:
    roofs = replace(A100, num_devices=4)
    plan = plan_of(
        "bloom-176b", A100, offload="disk", pipeline_group_size=2, data_group_size=2
    )
    assert plan.this_rank.streamed is not None
    seconds, bound = step_of(plan, decode(8, 100), roofs)
    most = max(rank.streamed.num_bytes for rank in plan.ranks if rank.streamed)
    assert bound == "disk" and seconds == pytest.approx(4 * most / 7e9, rel=0.01)


def test_stages_that_take_turns_read_a_layer_once_and_add_their_times() -> None:
    """The disk sets the pace, at its whole speed; with two steps in flight it has twice
    as much."""
    roofs = replace(A100, num_devices=2)
    load = decode(64, 100)
    shared, apart = (
        plan_of("bloom-176b", A100, here, offload="disk", pipeline_group_size=2)
        for here in (2, 1)
    )
    total = sum(rank.streamed.num_bytes for rank in shared.ranks if rank.streamed)
    seconds, bound = step_of(shared, load, roofs)
    assert bound == "disk" and seconds == pytest.approx(total / 7e9, rel=0.01)
    half = replace(load, num_tokens=32, num_rows=32, num_logits=32)
    twice = 2 * step_of(apart, half, roofs)[0]  # the same tokens
    assert twice == pytest.approx(2 * total / 7e9, rel=0.01)
    one, eight = (predict_run(shared, [(load, 1.0)], n, roofs)[0] for n in (1, 8))
    assert one == eight, "no stage waits for rows"


def test_tensor_parallelism_reads_less_and_pays_for_sums_and_launches() -> None:
    roofs = replace(A100, num_devices=8)
    one = plan_of("llama-8b", roofs)
    eight = plan_of("llama-8b", roofs, tensor_parallel_size=8)
    alone = time_step(one, measure_rank(one, one.this_rank), decode(8, 100), roofs)
    shard = time_step(
        eight, measure_rank(eight, eight.this_rank), decode(8, 100), roofs
    )
    assert shard["memory"] == pytest.approx(alone["memory"] / 8, rel=0.02)
    assert alone["other ranks"] == alone["launches"] == 0  # a graph has its launches
    assert shard["other ranks"] > 2 * 32 * 30e-6 and shard["launches"] > 0


def test_hidden_states_of_shards_go_through_the_host() -> None:
    """A hop of 64 MB was predicted at the rate of the link between two GPUs."""
    roofs = replace(A100, num_devices=4, link_rate=1e15)
    sizes = {"pipeline_group_size": 2, "tensor_parallel_size": 2}
    plan = plan_of("llama-70b", roofs, chunk_size=4096, **sizes)
    load = StepLoad(4096, 0, 4096, 4096 * 100, 0)
    seconds = time_step(plan, measure_rank(plan, plan.this_rank), load, roofs)[
        "other ranks"
    ]
    assert 30e-3 < seconds - 80 * 30e-6 < 60e-3


def test_stages_wait_where_there_are_fewer_rows_than_stages() -> None:
    roofs = replace(A100, num_devices=8)
    plan = plan_of("llama-8b", roofs, pipeline_group_size=8)
    loads = [(decode(1, 100), 10.0)]
    alone, _ = predict_run(plan, loads, 1, roofs)
    full, _ = predict_run(plan, loads, 8, roofs)
    assert alone == pytest.approx(8 * full)


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    plan = plan_of("deepseek-v3", H200, offload="disk")
    work = measure_rank(plan, plan.this_rank)
    assert work.token_operations == pytest.approx(
        2 * 37e9, rel=0.05
    )  # 37 of 671 billion are active
    one, many = (
        time_step(plan, work, decode(n, 10), H200)["memory"] for n in (1, 2000)
    )
    assert many > 15 * one
    assert work.streamed_bytes > 0.99 * (work.weight_bytes + work.expert_bytes)


@pytest.mark.parametrize(
    ("quantize", "moved_bytes"), [("int8", 19 + 1), ("int4", 34 + 0.6)]
)
def test_blocks_that_become_floats_at_each_use_cost_what_is_moved(
    quantize: Any, moved_bytes: float
) -> None:
    """They counted as one copy that is written and read. They save memory and cost time."""
    small_gpu = replace(H200, device_bytes=16 * GIB)
    plain = plan_of("llama-8b", H200)
    small = plan_of("llama-8b", small_gpu, quantize=quantize)
    assert small.this_rank.takes.weights < 0.6 * plain.this_rank.takes.weights
    load = decode(8, 100)
    seconds, bound = step_of(small, load, H200)
    num_weights = 32 * 218e6  # of layers
    assert bound == "memory"
    assert seconds == pytest.approx(
        num_weights * moved_bytes / (H200.memory_rate * 0.7), rel=0.1
    )
    assert seconds > 6 * step_of(plain, load, H200)[0]
    wide = plan_of("llama-8b", H200, quantize=quantize)  # floats fit
    assert step_of(wide, load, H200)[0] < 1.3 * step_of(plain, load, H200)[0]


def test_blocks_have_no_graphs_and_memory_for_the_floats_of_a_piece() -> None:
    """A graph of an 8B would have had tens of thousands of nodes, and ten a layer were
    counted."""
    small_gpu = replace(H200, device_bytes=16 * GIB)
    plain = plan_of("llama-8b", small_gpu)
    small = plan_of("llama-8b", small_gpu, quantize="int4")
    assert plain.may_capture and not small.may_capture
    load = decode(8, 100)
    temporary = DEQUANTIZED_AT_ONCE["cuda"] * DEQUANTIZED_BYTES
    launches = time_step(small, measure_rank(small, small.this_rank), load, H200)[
        "launches"
    ]
    pieces = 1 + 1 + 4 + 2  # of qkv, out, up and down, 2 ** 25 numbers each
    assert launches == pytest.approx(32 * (0.7e-3 + 12 * pieces * 10e-6))
    rows = small.sizes.max_decode_rows
    graphs = 32 * len(choose_graph_sizes(rows)) * GRAPH_LAYER_BYTES + count_input_bytes(
        rows
    )
    of_rows = rows * small.this_rank.takes.work_token
    assert (
        small.this_rank.takes.work
        == plain.this_rank.takes.work - graphs - of_rows + temporary
    )


@pytest.mark.parametrize(
    ("fields", "rows", "expected_ms"),
    [
        ("MIXTRAL", 8, 50),
        ("MIXTRAL", 64, 55),
        ("QWEN3_30B", 8, 290),
        ("QWEN3_30B", 64, 630),
    ],
)
def test_experts_on_a_gpu_are_launched_one_by_one(
    fields: str, rows: int, expected_ms: float, tmp_path: Path
) -> None:
    """Predictions were ten times too short: they knew bytes alone."""
    (tmp_path / "config.json").write_text(json.dumps(globals()[fields]))
    config = EngineConfig(
        model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True
    )
    machine = Machine(device_bytes=H200.device_bytes)
    plan = make_plan(config, open_model(config, has_weights=False), machine)
    seconds, bound = step_of(plan, decode(rows, 450), H200)
    assert 1e3 * seconds == pytest.approx(expected_ms, rel=0.2) and bound == "launches"


def test_loading_reads_a_node_s_part_of_the_model_once() -> None:
    eight = replace(A100, num_devices=8, host_bytes=512 * GIB)
    size = 2 * 176.2e9
    one = plan_of("bloom-176b", eight, tensor_parallel_size=8)
    assert predict_load(one, eight) == pytest.approx(START_S + size / 7e9, rel=0.01)
    two = plan_of("bloom-176b", eight, tensor_parallel_size=8, pipeline_group_size=2)
    nodes = replace(eight, num_nodes=2)
    assert predict_load(two, nodes) == pytest.approx(START_S + size / 2 / 7e9, rel=0.01)
    # Of streamed layers none is loaded, though each shard reads what is cut by its inputs whole.
    streamed = plan_of("llama-70b", eight, tensor_parallel_size=8, offload="disk")
    assert START_S < predict_load(streamed, eight) < START_S + 1


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_streamed_shards_are_left_out_of_loading_once(quantize: Any) -> None:
    """What is cut by columns is read whole by each of eight ranks, and was subtracted so."""
    eight = replace(A100, num_devices=8, host_bytes=64 * GIB)
    sharded = plan_of(
        "llama-405b", eight, tensor_parallel_size=8, offload="disk", quantize=quantize
    )
    others = 2 * 2 * 128256 * 16384  # embedding and head, in 16 bits
    assert predict_load(sharded, eight) >= START_S + others / 7e9


def test_quantizing_takes_its_time() -> None:
    """In each pass, if layers are streamed; the host's cores do it."""
    one = {
        q: plan_of("bloom-176b", A100, offload="disk", quantize=q)
        for q in (None, "int8")
    }
    load = decode(64, 100)
    slow, bound = step_of(one["int8"], load, A100)
    assert bound == "quantizing" and slow > step_of(one[None], load, A100)[0]
    many = replace(A100, num_cores=1024)
    assert step_of(one["int8"], load, many)[1] == "disk"
    kept = [plan_of("llama-8b", A100, quantize=q) for q in (None, "int8", "int4")]
    few = replace(A100, num_cores=2, disk_rate=100e9)
    times = [predict_load(plan, few) - START_S for plan in kept]
    assert (
        times[0] < 2
        and times[1] > 30
        and times[2] == pytest.approx(2 * times[1], rel=0.05)
    )


@pytest.mark.parametrize(("quantize", "published"), [(None, 42.88), ("int8", 21.68)])
@pytest.mark.parametrize("unit", [1e9, GIB])
def test_memory_of_bloom_176b_on_8_gpus_is_what_energonai_published(
    quantize: Any, published: float, unit: float
) -> None:
    """The most that was allocated on a GPU, so without the context of CUDA and what is
    kept free.

    We count weights, a step of 512 tokens and their keys and values. Their figures have
    no prompt length, and may be GB or GiB: both hold. On 80 GB ours would hold floats of int8.
    """
    roofs = KINDS["a100-40gb"] if quantize else A100
    plan = plan_of(
        "bloom-176b", roofs, tensor_parallel_size=8, quantize=quantize, chunk_size=512
    )
    for rank in plan.ranks:
        takes = rank.takes
        counted = takes.total(512) - takes.libraries
        assert counted / unit == pytest.approx(published, rel=0.10)


def test_what_is_told_of_passes() -> None:
    plan = plan_of("bloom-176b", A100, offload="auto")
    first, second = describe_passes(plan, A100)
    assert first.startswith(
        "64 of 70 layers, 294.02 GiB, are read from the disk in each pass. A "
    )
    assert second.startswith("predicted: ") and second.endswith("bound by disk")
    assert describe_passes(plan, None) == [first]
    assert describe_passes(plan_of("opt-125m", A100, offload="auto"), A100) == [
        "all layers stay in memory"
    ]
    assert describe_passes(plan_of("opt-125m", A100), A100) == []


def test_no_step_of_a_slow_machine_is_taken_for_one_that_hangs() -> None:
    """A CPU or a disk may need hours for one step of a large model, and a GPU half an hour."""
    assert 1800 < limit_step(plan_of("llama-8b", H200)) < 1900
    streamed = plan_of("bloom-176b", A100, offload="disk")
    assert limit_step(streamed) > 2 * 176.2e9 / 25e6, "a disk of 25 MB/s"
    config = EngineConfig(random_init="llama-70b", dtype="float32", device="cpu")
    plan = make_plan(config, open_model(config, has_weights=False), Machine())
    assert limit_step(plan) > 2 * 70e9 * plan.sizes.chunk_size / 20e9, (
        "a core of 20 GFLOP/s"
    )


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("llama-8b", {}),
        ("llama-8b", {"quantize": "int4"}),
        ("llama-70b", {"offload": "auto"}),
        ("llama-8b", {"tensor_parallel_size": 2, "pipeline_group_size": 2}),
        ("deepseek-v3", {"offload": "disk"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", [field.name for field in fields(StepLoad)])
def test_a_step_with_more_to_do_never_takes_less(
    size: str, options: dict[str, Any], field: str
) -> None:
    """Each part of its time is positive or nothing, and grows or stays."""
    roofs = replace(A100, num_devices=4)
    plan = plan_of(size, roofs, **options)
    work = measure_rank(plan, plan.ranks[-1])  # which has the head
    load = StepLoad(2048, 16, 10_000, 4_000_000, 16)
    before = time_step(plan, work, load, roofs)
    assert all(seconds >= 0 for seconds in before.values())
    for factor in (2, 3, 10):
        more = replace(load, **{field: factor * getattr(load, field)})
        after = time_step(plan, work, more, roofs)
        assert all(after[name] >= seconds for name, seconds in before.items()), factor
        assert sum(after.values()) > sum(before.values())
        before = after


def test_the_seconds_of_equal_and_of_other_steps_add_up() -> None:
    for options in ({}, {"pipeline_group_size": 4}, {"offload": "disk"}):
        plan = plan_of("llama-8b", A100, **options)
        first = (decode(64, 100), 5.0)
        second = (StepLoad(2048, 0, 2048, 2048 * 1024, 1), 3.0)
        one, two, both, thrice = (
            predict_run(plan, loads, 64, A100)[0]
            for loads in ([first], [second], [first, second], [(first[0], 15.0)])
        )
        assert both == pytest.approx(one + two) and thrice == pytest.approx(3 * one)
        assert one > 0 and two > 0
        assert predict_run(plan, [], 64, A100) == (0, "")


def test_loading_never_takes_less_of_a_larger_model_or_from_a_slower_disk() -> None:
    sizes = ("llama-160m", "llama-8b", "llama-70b", "llama-405b")
    times = [predict_load(plan_of(size, H200), H200) for size in sizes]
    assert times == sorted(times) and times[0] > START_S
    plan = plan_of("llama-70b", H200)
    slow = replace(H200, disk_rate=H200.disk_rate / 10, host_rate=1e15)
    read_s = predict_load(plan, replace(H200, host_rate=1e15)) - START_S
    assert predict_load(plan, slow) - START_S == pytest.approx(10 * read_s)
    assert read_s == pytest.approx(2 * 70.55e9 / 7e9, rel=0.01)


def test_the_limit_of_a_step_grows_with_its_tokens() -> None:
    """By the arithmetic of the tokens that are added, at the slowest rate that works."""
    limits = [
        limit_step(plan_of("llama-8b", H200, chunk_size=n)) for n in (1024, 2048, 8192)
    ]
    assert limits == sorted(limits)
    added = 2.0 * 8.03e9 * 6144 / LEAST_RATES["cuda"]
    assert limits[2] - limits[1] == pytest.approx(added, rel=0.01)
    assert limit_step(plan_of("llama-8b", H200, offload="disk")) - limits[0] > 1000

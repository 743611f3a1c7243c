"""What does not fit is refused with figures that add up, and with remedies that work."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fminfer.core.config import EngineConfig
from fminfer.core.quantities import describe_bytes
from fminfer.models.checkpoint import Checkpoint, open_model
from fminfer.plan.expected_bytes import GPU_CONTEXT, GPU_RESERVE, RUN_BYTES
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan
from fminfer.plan.run_plan import RunPlan
from fminfer.plan.shortage import (
    CPU_SHARE,
    auto_budget,
    cache_error,
    count_kv_tokens,
    find_rank_shortage,
    find_room,
    fit_kv_tokens,
)

GIB = 1 << 30
PROCESS_BYTES = 100 << 20  # of this process, in a machine that is made up
NUM_PARAMETERS = 162_417_408  # of llama-160m
KV_NUMBERS = 12 * 2 * 768  # keys and values of one of its tokens
ON_CPU = EngineConfig(
    random_init="llama-160m", dtype="float32", kernels="off", device="cpu"
)
ON_GPU = replace(ON_CPU, device="cuda")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_model(ON_CPU)


def machine_with(room: int, **facts: Any) -> Machine:
    """Return a machine whose processes have so much memory, with what this one has of it."""
    return Machine(free=room - PROCESS_BYTES, process_bytes=PROCESS_BYTES, **facts)


def planned_gpu(room: int, **facts: Any) -> Machine:
    return Machine(device_bytes=room, **facts)


def least_room(plan_in: Callable[[int], RunPlan]) -> int:
    """Return the least memory with which nothing is short."""
    sizes = range(PROCESS_BYTES, 64 * GIB)
    return sizes[bisect_left(sizes, True, key=lambda n: not plan_in(n).shortage)]


@pytest.mark.parametrize(
    ("config", "machine", "facts"),
    [
        (ON_CPU, machine_with, {}),
        (ON_CPU, machine_with, {"num_stages": 3, "local_size": 3}),
        (ON_CPU, machine_with, {"num_pipelines": 2}),
        (ON_GPU, planned_gpu, {}),
        (ON_GPU, planned_gpu, {"num_stages": 3}),
        (replace(ON_GPU, budget=50_000), planned_gpu, {"num_shards": 2}),
        (ON_GPU, machine_with, {"num_gpus": 1}),
    ],
    ids=["cpu", "3 stages", "2 pipelines", "gpu", "3 gpus", "2 shards", "gpu here"],
)
def test_a_message_names_the_least_memory_and_what_there_is(
    config: EngineConfig, machine: Callable[..., Machine], facts: Any, checkpoint: Any
) -> None:
    """In exactly so much a run fits; with one byte less it does not."""

    def plan_in(room: int) -> RunPlan:
        return make_plan(config, checkpoint, machine(room, **facts))

    least = least_room(plan_in)
    short = plan_in(least - 1)
    fitting = plan_in(least)
    assert short.num_kv_tokens == 0 and fitting.num_kv_tokens >= 32
    said = re.search(r"would take (.*?) \(.*, and (?:its device has )?(.*?)(?: are free)?\. ",
                     plan_in(least // 2).shortage)  # fmt: skip
    assert said is not None, short.shortage
    assert said.groups() == (describe_bytes(least), describe_bytes(least // 2))


def test_a_cpu_needs_its_weights_a_block_and_libraries(checkpoint: Checkpoint) -> None:
    """A second process adds its libraries, and a second pipeline adds everything."""

    def least(**facts: Any) -> int:
        return least_room(
            lambda room: make_plan(ON_CPU, checkpoint, machine_with(room, **facts))
        )

    tables = 2 * 4 * 32 * checkpoint.context_length  # cosines and sines
    libraries = PROCESS_BYTES + RUN_BYTES + tables
    model = 4 * NUM_PARAMETERS + 32 * 4 * KV_NUMBERS
    assert least() == libraries + model
    assert least(num_stages=2, local_size=2) == 2 * libraries + model
    assert least(num_pipelines=2) == 2 * (libraries + model)
    assert least(swap=GIB // 4) == libraries + model - GIB // 4, "it goes on in swap"


def test_a_planned_gpu_needs_a_step_and_its_libraries_too(
    checkpoint: Checkpoint,
) -> None:
    least = least_room(lambda room: make_plan(ON_GPU, checkpoint, planned_gpu(room)))
    takes = make_plan(ON_GPU, checkpoint, planned_gpu(least)).this_rank.takes
    tables = 2 * 4 * 32 * checkpoint.context_length
    model = 4 * NUM_PARAMETERS + 32 * 4 * KV_NUMBERS
    assert least == GPU_CONTEXT + GPU_RESERVE + tables + takes.work + model


CPU_REMEDIES: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"quantize": "int8"},
    {"quantize": "int4"},
    {"offload": "auto"},
]


@pytest.mark.parametrize("remedy", CPU_REMEDIES, ids=str)
@pytest.mark.parametrize("facts", [{}, {"num_stages": 2, "local_size": 2}], ids=str)
def test_each_remedy_of_a_cpu_lets_the_run_fit(
    remedy: dict[str, Any], facts: Any, checkpoint: Checkpoint
) -> None:
    least = least_room(
        lambda room: make_plan(ON_CPU, checkpoint, machine_with(room, **facts))
    )
    machine = machine_with(least - 1, **facts)
    short = make_plan(ON_CPU, checkpoint, machine).shortage
    [(flag, value)] = remedy.items()
    assert re.search(rf"--{flag} (int8 or )?{value}", short), short
    mended = make_plan(replace(ON_CPU, **remedy), checkpoint, machine)
    assert not mended.shortage and mended.num_kv_tokens >= 32


def test_only_remedies_that_are_left_are_named(checkpoint: Checkpoint) -> None:
    """Nobody is told to use what the run uses already."""
    machine = machine_with(PROCESS_BYTES + (80 << 20))

    def flags(**options: Any) -> list[str]:
        said = make_plan(replace(ON_CPU, **options), checkpoint, machine).shortage
        named = re.findall(r"--([a-z-]+)", said.partition(" Use ")[2])
        assert [*named[-3:]] == ["world-size", "world-size", "device-memory"]
        return [*named[:-3]]

    assert flags() == ["dtype", "quantize", "offload"]
    assert flags(dtype="bfloat16") == ["quantize", "offload"]
    assert flags(quantize="int8") == ["offload"]
    assert flags(offload="auto") == ["dtype", "quantize"]


@pytest.mark.parametrize("room_share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    ("size", "facts"),
    [
        ("bloom-7b1", {}),
        ("bloom-7b1", {"num_pipelines": 2}),
        ("llama-8b", {"num_shards": 2}),
        ("opt-6.7b", {"num_stages": 2}),
    ],
    ids=str,
)
def test_so_many_ranks_as_a_gpus_message_names_are_enough(
    size: str, facts: dict[str, int], room_share: float
) -> None:
    config = EngineConfig(random_init=size, dtype="bfloat16")
    model = open_model(config, has_weights=False)
    least = least_room(
        lambda room: make_plan(config, model, planned_gpu(room, **facts))
    )
    room = int(least * room_share)
    said = make_plan(config, model, planned_gpu(room, **facts)).shortage
    named = re.search(r"--world-size (\d+) or above(.*?);", said)
    assert named is not None, said
    pipelines = facts.get("num_pipelines", 1)
    group = f" with --data-group-size {pipelines}" if pipelines > 1 else ""
    assert named[2] == group
    stages = int(named[1]) // pipelines // facts.get("num_shards", 1)
    machine = planned_gpu(room, **facts | {"num_stages": stages})
    assert not make_plan(config, model, machine).shortage


def test_no_more_ranks_are_named_than_there_are_layers() -> None:
    """--world-size 175 was named for a model of 30 layers, and refused."""
    config = EngineConfig(random_init="bloom-7b1", dtype="bfloat16")
    model = open_model(config, has_weights=False)
    least = least_room(lambda room: make_plan(config, model, planned_gpu(room)))
    said = make_plan(config, model, planned_gpu(int(least * 0.3))).shortage
    assert "--offload" in said and "--world-size" not in said


@pytest.mark.parametrize("room_gib", [9, 12, 16])
def test_offload_lets_a_run_fit_a_gpu(room_gib: int) -> None:
    config = EngineConfig(random_init="bloom-7b1", dtype="bfloat16")
    model = open_model(config, has_weights=False)
    machine = planned_gpu(room_gib * GIB)
    said = make_plan(config, model, machine).shortage
    assert "use --offload auto, which streams the layers" in said.lower()
    assert not make_plan(replace(config, offload="auto"), model, machine).shortage


def test_more_memory_never_gives_less_cache_and_more_tokens_never_need_less(
    checkpoint: Checkpoint,
) -> None:
    cases: list[tuple[EngineConfig, Callable[..., Machine], int]] = [
        (ON_CPU, machine_with, GIB // 2),
        (ON_GPU, planned_gpu, 5 * GIB),
    ]
    for config, machine, first in cases:
        counts = [
            make_plan(config, checkpoint, machine(first + n * GIB // 16)).num_kv_tokens
            for n in range(20)
        ]
        assert counts == sorted(counts) and len({*counts}) > 5 and counts[0] == 0, (
            counts
        )
        assert all(count % config.block_size == 0 for count in counts)

    def least(budget: int) -> int:
        config = replace(ON_GPU, budget=budget)
        return least_room(lambda room: make_plan(config, checkpoint, planned_gpu(room)))

    budgets = [32, 64, 1000, 1024, 30_000]
    sizes = [least(budget) for budget in budgets]
    assert sizes == sorted(sizes)
    assert sizes[1] - sizes[0] == 32 * 4 * KV_NUMBERS


def test_the_cache_of_a_plan_fits_beside_the_rest(checkpoint: Checkpoint) -> None:
    """A block more would be more than the part that the cache may take."""
    plan = make_plan(ON_CPU, checkpoint, machine_with(4 * GIB))
    takes = plan.this_rank.takes
    left = plan.room_bytes - takes.libraries - takes.weights
    most = int(left * CPU_SHARE) // takes.kv_token
    assert most <= plan.num_kv_tokens < most + plan.config.block_size
    assert count_kv_tokens(plan) == plan.num_kv_tokens

    on_gpu = make_plan(ON_GPU, checkpoint, planned_gpu(7 * GIB))
    takes = on_gpu.this_rank.takes
    spare = on_gpu.room_bytes - takes.total(on_gpu.num_kv_tokens)
    assert -on_gpu.config.block_size * takes.kv_token < spare < takes.kv_token
    given = replace(plan, config=replace(plan.config, budget=1000))
    assert count_kv_tokens(given) == 1024, "in whole blocks"


def test_an_automatic_budget() -> None:
    """Half of what a CPU has left; on a GPU all but a step's work and a reserve."""
    assert auto_budget(1000, 10**9, 10**9, 0, "cpu") == 500_000
    assert auto_budget(1000, 10**9, 10**9, 10**8, "cpu") == 500_000
    free = GPU_RESERVE + 3000
    assert auto_budget(1000, 10**9, free, 0, "cuda") == 3
    assert auto_budget(1000, 10**9, free, 1001, "cuda") == 1
    assert auto_budget(1000, 2, free, 0, "cuda") == 2, "more is of no use"
    assert auto_budget(1000, 10**9, 0, 0, "cuda") == 1, "never none"
    assert auto_budget(0, 77, 10**9, 0, "cpu") == 77, "an encoder caches nothing"


def test_ranks_that_share_a_memory_share_its_cache(checkpoint: Checkpoint) -> None:
    facts = {"num_stages": 2, "local_size": 2}
    plan = make_plan(ON_CPU, checkpoint, machine_with(4 * GIB, **facts))
    shared = [find_room(plan, rank, "the host", GIB // 2) for rank in plan.ranks]
    apart = [find_room(plan, rank, f"{rank.rank}", GIB // 2) for rank in plan.ranks]
    sizes = [rank.takes.kv_token for rank in plan.ranks]
    assert sum(sizes) == 4 * KV_NUMBERS and max(sizes) < sum(sizes)
    for rooms, kv_token in ((shared, sum(sizes)), (apart, max(sizes))):
        most = GIB // 4 // kv_token  # half of what is free
        assert most <= fit_kv_tokens(plan, rooms) < most + plan.config.block_size

    poorer = [replace(apart[0], free=GIB // 8), apart[1]]
    most = GIB // 16 // sizes[0]
    assert most <= fit_kv_tokens(plan, poorer) < most + plan.config.block_size


def test_ranks_fit_a_memory_to_the_byte(checkpoint: Checkpoint) -> None:
    facts = {"num_stages": 2, "local_size": 2}
    plan = make_plan(ON_CPU, checkpoint, machine_with(4 * GIB, **facts))
    need = sum(find_room(plan, rank, "the host", 0).least for rank in plan.ranks)
    assert need == 4 * NUM_PARAMETERS + 32 * 4 * KV_NUMBERS
    for free, is_short in ((need, False), (need - 1, True)):
        rooms = [find_room(plan, rank, "the host", free) for rank in plan.ranks]
        said = find_rank_shortage(plan, rooms)
        assert bool(said) == is_short
    assert f"ranks 0, 1 together would take {describe_bytes(need)} of the host" in said
    assert f"{describe_bytes(need - 1)} are free" in said


@pytest.mark.parametrize(
    ("kv_dtype", "gib", "is_narrower"),
    [("float32", 3.5, True), ("bfloat16", 1.8, False)],
)
def test_a_cache_without_memory_is_told_with_its_size(
    kv_dtype: Any, gib: float, is_narrower: bool, checkpoint: Checkpoint
) -> None:
    config = replace(ON_CPU, kv_dtype=kv_dtype)
    plan = make_plan(config, checkpoint, machine_with(4 * GIB))
    said = str(cache_error(plan, 51_200, 2 * GIB))
    assert f"51200 tokens takes {gib} GiB" in said and "2.0 GiB are free" in said
    assert ("--kv-dtype bfloat16" in said) == is_narrower

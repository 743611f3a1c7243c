"""Which layers are streamed, from where, and how large a pass is."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.plan import machine_facts
from fminfer.plan.expected_bytes import layer_bytes
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan, plan_ahead
from fminfer.plan.run_plan import RunPlan
from fminfer.plan.shortage import find_room, fit_kv_tokens
from fminfer.plan.streaming import LEAST_CACHE, STREAMED_CACHE, describe_streaming
from fminfer.runtime.load.agreement import agree_step_size
from tests.conftest import make_model

GB = 10**9


def plan_of(
    size: str, gpu: float | None, *, on_host: float = 0, **options: Any
) -> RunPlan:
    """Plan a run on GPUs of so many GB, or on a CPU with `on_host` GB."""
    names = ("num_pipelines", "num_shards", "num_stages", "local_size")
    where = {name: options.pop(name) for name in names if name in options}
    if gpu is not None:
        machine = Machine(
            device_bytes=int(gpu * GB), host_free=int(on_host * GB), **where
        )
    else:
        machine = Machine(free=int(on_host * GB), has_library=True, **where)
    device = "cpu" if gpu is None else "cuda"
    config = EngineConfig(random_init=size, device=device, dtype="bfloat16", **options)
    return make_plan(config, open_random_checkpoint(size), machine)


def num_streamed(plan: RunPlan) -> int:
    return (
        0 if plan.this_rank.streamed is None else len(plan.this_rank.streamed.numbers)
    )


@pytest.mark.parametrize("offload", ["auto", "off"])
def test_what_fits_stays(offload: str) -> None:
    plan = plan_of("llama-7b", 80, offload=offload)
    assert num_streamed(plan) == 0 and not plan.chunk_size and not plan.shortage


def test_auto_streams_only_what_does_not_fit() -> None:
    """Part of the memory is left to the KV cache; with less memory, more layers are streamed."""
    counts = []
    for gpu in (160, 120, 80, 40, 24):
        plan = plan_of("llama-70b", gpu, on_host=512, offload="auto")
        takes = plan.this_rank.takes
        numbers = plan.this_rank.streamed and plan.this_rank.streamed.numbers
        assert not plan.shortage and plan.num_kv_tokens > 0
        used = takes.libraries + takes.weights + takes.work
        share = STREAMED_CACHE if numbers else LEAST_CACHE
        assert used <= gpu * GB * (1 - share) or num_streamed(plan) == 80
        counts.append(num_streamed(plan))
        # at most every second layer: none follow each other
        if numbers and len(numbers) <= 40:
            assert min(b - a for a, b in pairwise(numbers)) > 1
    assert counts == sorted(counts) and counts[0] == 0 < counts[1] < counts[-2] < 80, (
        counts
    )


@pytest.mark.parametrize(("on_host", "place"), [(512, "cpu"), (100, "disk")])
def test_layers_wait_in_the_host_if_they_fit_there(on_host: int, place: str) -> None:
    plan = plan_of("llama-70b", 24, on_host=on_host, offload="auto")
    streamed = plan.this_rank.streamed
    assert streamed is not None and streamed.place == place
    if place == "cpu":
        assert plan.this_rank.takes.host == streamed.num_bytes
    else:  # two slots
        assert 0 < plan.this_rank.takes.host < 5 * GB


def test_pipelines_share_one_copy_in_the_host() -> None:
    alone = plan_of("llama-70b", 80, on_host=512, offload="cpu")
    several = plan_of("llama-70b", 80, on_host=512, offload="cpu", num_pipelines=8)
    assert alone.this_rank.takes.host > 100 * GB
    assert (
        several.this_rank.streamed is not None and several.this_rank.streamed.is_shared
    )
    assert several.this_rank.takes.host < 5 * GB


def test_shards_stream_their_parts() -> None:
    whole = plan_of("llama-70b", 80, on_host=512, offload="cpu").this_rank.streamed
    half = plan_of(
        "llama-70b", 80, on_host=512, offload="cpu", num_shards=2
    ).this_rank.streamed
    assert whole is not None and half is not None
    # what is cut by inputs is read whole
    assert 0.5 < half.num_bytes / whole.num_bytes < 0.7
    assert half.is_shared  # one copy for both


def test_a_run_knows_its_host_before_it_looks_at_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--offload cpu was refused: fingerprints were planned with 128 GiB, whatever is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine_facts, "is_fast_in_bfloat16", lambda device: True)
    monkeypatch.setattr(machine_facts, "measure_free_host_bytes", lambda: 512 * GB)
    config = EngineConfig(random_init="llama-70b", device="cuda", offload="cpu")
    plan = plan_ahead(config, open_random_checkpoint("llama-70b"))
    assert (
        plan.this_rank.streamed is not None and plan.this_rank.streamed.place == "cpu"
    )


def test_layers_that_come_to_another_rank_alone_are_told() -> None:
    """It was told that all stay, as rank 0's do."""
    plan = plan_of("llama-7b", 11, on_host=512, offload="auto", num_stages=2)
    assert plan.ranks[0].streamed is None and plan.ranks[1].streamed is not None
    assert describe_streaming(plan).startswith("rank 1: ")


def test_a_host_without_room_is_told() -> None:
    with pytest.raises(UsageError, match=r"GiB are free. Use --offload disk"):
        plan_of("llama-70b", 80, on_host=64, offload="cpu")


def test_a_cpu_streams_from_the_disk_what_its_memory_does_not_hold() -> None:
    plan = plan_of("llama-7b", None, on_host=8, offload="auto")
    assert (
        plan.this_rank.streamed is not None and plan.this_rank.streamed.place == "disk"
    )
    assert 0 < num_streamed(plan) < 32 and not plan.shortage
    assert "does not fit" in plan_of("llama-7b", None, on_host=8).shortage
    assert "--offload auto" in plan_of("llama-7b", None, on_host=8).shortage


def test_experts_behind_a_dense_layer_count_as_what_is_made_of_them(
    tmp_path: Path,
) -> None:
    """The first layer is used as it lies in its file; that was taken for all of them."""
    make_model("dots1").save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", offload="disk"
    )
    machine = Machine(free=GB, has_library=True)
    plan = make_plan(config, open_checkpoint(str(tmp_path)), machine)
    experts = layer_bytes(plan, None, 1).held
    assert plan.this_rank.takes.passing >= 3 * experts  # read, made, and packed


def test_a_pass_is_as_large_as_memory_allows() -> None:
    sizes = [
        plan_of("llama-7b", None, on_host=n, offload="disk").sizes for n in (3, 8, 64)
    ]
    assert [each.chunk_size for each in sizes] == sorted(
        each.chunk_size for each in sizes
    )
    assert sizes[0].chunk_size < sizes[-1].chunk_size == 4096
    assert {each.max_rows for each in sizes} == {1024}
    assert {each.micro_batches for each in sizes} == {1}
    asked = plan_of(
        "llama-7b", None, on_host=64, offload="disk", chunk_size=100, max_rows=3
    )
    assert (asked.sizes.chunk_size, asked.sizes.max_rows) == (100, 3)


def test_stages_take_turns_at_a_disk_that_they_share() -> None:
    """Two stages with two steps in flight read all layers twice in the time of one pass."""
    how = {"num_stages": 2, "on_host": 512}
    found = {
        (place, here): plan_of(
            "llama-70b", 24, local_size=here, offload=place, **how
        ).sizes
        for place in ("disk", "cpu")
        for here in (1, 2)
    }
    assert {key: each.micro_batches for key, each in found.items()} == {
        ("disk", 2): 1,
        ("disk", 1): 2,  # a node each
        ("cpu", 2): 2,  # each GPU has a link of its own
        ("cpu", 1): 2,
    }


def test_a_step_is_as_large_as_each_rank_has_room_for() -> None:
    """Rank 0 made steps as large as its own memory allowed."""
    plan = plan_of("llama-70b", 80, on_host=512, offload="cpu", num_stages=2)
    small: Any = SimpleNamespace(gather=lambda name, value: [value, 1024])
    assert (
        agree_step_size(plan) == plan.chunk_size > 1024 == agree_step_size(plan, small)
    )
    stays = plan_of("llama-7b", 80, num_stages=2)
    assert agree_step_size(stays, small) == agree_step_size(stays) == 0


def test_check_foresees_the_cache_that_a_run_finds_room_for() -> None:
    """What passes was counted twice before weights are loaded."""
    plan = plan_of("llama-7b", None, on_host=16, offload="disk")
    takes = plan.this_rank.takes
    loaded = takes.libraries + takes.weights - takes.mapped - takes.passing
    found = find_room(plan, plan.this_rank, "all", plan.room_bytes - loaded)
    assert takes.passing and plan.num_kv_tokens == fit_kv_tokens(plan, [found])


def test_the_plan_is_told() -> None:
    plan = plan_of("llama-7b", None, on_host=64, offload="disk")
    told = describe_streaming(plan, 2 * 2**30)
    assert told.startswith(
        "32 of 32 layers, 12.06 GiB, are read from the disk in each pass, which"
    )
    assert "which takes about 6.0 s at 2.00 GiB/s. A pass" in told
    assert "A pass computes up to 1,024 rows, or 4,096 tokens" in told
    plan = plan_of("llama-70b", 80, on_host=512, offload="cpu")
    assert "wait in the host's memory" in describe_streaming(plan)
    assert describe_streaming(plan_of("llama-7b", 80)) == ""

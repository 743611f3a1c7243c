"""Which device a rank takes; no GPU is needed to decide it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fminfer
from fminfer.core.config import EngineConfig, StepSizes
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.machine.device import is_fast_in_bfloat16, use_device
from fminfer.models.checkpoint import open_model, open_random_checkpoint
from fminfer.pipeline import ring
from fminfer.pipeline.group import _choose_interface
from fminfer.pipeline.wire import LinkSpec
from fminfer.plan.expected_bytes import GPU_RESERVE
from fminfer.plan.machine_facts import (
    Machine,
    choose_device,
    count_sharers,
    find_machine,
)
from fminfer.plan.planning import make_plan
from fminfer.plan.shortage import auto_budget
from fminfer.runtime.load.agreement import connect_neighbours, count_blocks
from fminfer.runtime.load.builder import build_stage
from fminfer.runtime.load.one_pipeline import _build_pipeline


def device_of(
    name: str, cuda_ids: tuple[int, ...] = (), rank: int = 0, **facts: Any
) -> torch.device:
    """Return the device of a rank of eight on one machine."""
    machine = Machine(**{"num_gpus": 4, "local_size": 8, "num_stages": 8} | facts)
    return choose_device(EngineConfig(device=name, cuda_ids=cuda_ids), machine, rank)


def test_ranks_take_the_gpus_in_turn() -> None:
    for name in ("auto", "cuda"):
        assert [device_of(name, rank=rank).index for rank in range(5)] == [
            0,
            1,
            2,
            3,
            0,
        ]
        assert [device_of(name, (2, 1), rank).index for rank in range(3)] == [2, 1, 2]
    assert device_of("cuda:3", rank=1) == torch.device("cuda:3")
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="contradict each other"):
        device_of("cuda:3", (1, 2))
    with pytest.raises(UsageError, match="torch sees 4 GPUs"):
        device_of("auto", (4,))


def test_ranks_on_another_machine_take_its_gpus_in_turn() -> None:
    """As they would here: rank 6 is the third of the second machine with four ranks."""
    facts = {"num_stages": 8, "local_size": 4}
    machine = Machine(num_gpus=4, rank=6, local_rank=2, **facts)
    devices = [choose_device(EngineConfig(), machine, rank) for rank in range(8)]
    assert [device.index for device in devices] == [0, 1, 2, 3] * 2


def test_a_planned_gpu_has_no_number_and_need_not_be_here() -> None:
    """`check --device-memory 80G --device what` planned for a GPU, and said nothing."""
    facts = {"num_gpus": 0, "device_bytes": 1 << 30}
    for name in ("auto", "cuda", "cuda:5"):
        assert device_of(name, **facts) == torch.device("cuda")
    assert device_of("cpu", **facts) == torch.device("cpu")
    with pytest.raises(UsageError, match="'what' is unknown"):
        device_of("what", **facts)


def test_engines_of_a_machine_take_gpus_in_turn_and_share_those_they_have_to() -> None:
    """The forecast asked GPU 0 for every engine, and each took an eighth of its own card."""
    for num_engines, local_size, shares in (
        (4, 1, 1),
        (2, 2, 1),
        (8, 1, 2),
        (4, 2, 2),
        (2, 4, 2),
    ):
        found = []
        for number in range(num_engines):
            for rank in range(local_size):
                machine = Machine(
                    num_engines=num_engines,
                    engine_number=number,
                    num_gpus=4,
                    num_stages=local_size,
                    local_size=local_size,
                    rank=rank,
                    local_rank=rank,
                )
                found.append(choose_device(EngineConfig(), machine, rank).index)
                assert count_sharers(EngineConfig(), machine) == shares
        assert found == [turn % 4 for turn in range(num_engines * local_size)]
    shared = EngineConfig(device="cuda:1")
    machine = Machine(num_gpus=4, num_engines=3, engine_number=2)
    assert choose_device(shared, machine, 0) == torch.device("cuda:1")
    assert count_sharers(shared, machine) == 3
    assert count_sharers(EngineConfig(), Machine(num_engines=3)) == 3


def test_each_engine_looks_at_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight cards each engine had 3 GiB of KV cache instead of 58."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked: list[torch.device] = []

    def free(device: torch.device) -> int:
        asked.append(device)
        return 10 << 30

    for module in ("plan.machine_facts", "runtime.load.agreement"):
        monkeypatch.setattr(f"fminfer.{module}.measure_free_bytes", free)
    monkeypatch.setattr(
        "fminfer.runtime.load.agreement.make_memory_name", lambda *given: "a card"
    )
    checkpoint = open_random_checkpoint("llama-160m")
    config = EngineConfig()
    place = Machine(num_engines=8, engine_number=5)
    found = make_plan(config, checkpoint, find_machine(config, place))
    assert found.device == torch.device("cuda:5") and not found.shortage
    alone = EngineConfig(device="cuda:5")
    assert count_blocks(found) == count_blocks(
        make_plan(alone, checkpoint, find_machine(alone))
    )
    assert {*asked} == {torch.device("cuda:5")}


def test_checkpoints_of_float16_stay_so_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were rounded to bfloat16, which has three bits less and is no faster."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert all(is_fast_in_bfloat16(torch.device(name)) for name in ("cuda:0", "cuda"))
    checkpoint = open_random_checkpoint("llama-160m")
    options = {}

    def dtype_of(stored: torch.dtype | None, **facts: Any) -> torch.dtype:
        checkpoint.config.dtype = stored
        machine = Machine(num_gpus=1, is_fast_in_bfloat16=True, **facts)
        return make_plan(EngineConfig(**options), checkpoint, machine).dtype

    for stored, chosen in (
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (None, torch.bfloat16),
    ):
        assert dtype_of(stored) == chosen
        assert dtype_of(stored, device_bytes=1 << 40) == chosen, "one that is planned"
    options["dtype"] = "bfloat16"
    assert dtype_of(torch.float16) == torch.bfloat16


def test_the_thread_of_steps_works_on_its_own_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On cuda:1 its events were recorded on GPU 0, which is every thread's at first."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: chosen.append((threading.current_thread().name, device)),
    )
    device = torch.device("cuda:1")
    stage: Any = SimpleNamespace(
        run=lambda step: SimpleNamespace(spans=(), place=len(chosen))
    )
    loaded: Any = SimpleNamespace(device=device)
    step: Any = "a step"
    with closing(_build_pipeline(stage, loaded, None)) as alone:
        alone.submit(step)
        result: Any = alone.collect()
    assert result.place == 1
    part = Part(0, 2, 0, 1)
    form = LinkSpec(8, torch.float32, device, None)
    for name in ("_Sender", "_Receiver"):
        neighbour = SimpleNamespace(put=lambda message: None, join=lambda *limit: None)
        monkeypatch.setattr(ring, name, lambda *given, neighbour=neighbour: neighbour)
    ring.RingPipeline(stage, part, form, explain=str).close()
    assert chosen == [("stage-0", device)] * 2


def test_a_card_that_cannot_be_used_ends_the_steps_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of steps ended without a word, and whoever waited for a step waited
    for ever."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    stage: Any = SimpleNamespace(run=lambda step: None)
    loaded: Any = SimpleNamespace(device=torch.device("cuda:1"))
    step: Any = "a step"
    with closing(_build_pipeline(stage, loaded, None)) as pipeline:
        with pytest.raises(RuntimeError, match="invalid device"):
            pipeline.submit(step)  # which may hear of it already
            pipeline.collect()
        pipeline.drop_steps()


def test_a_run_is_planned_whose_other_gpus_are_elsewhere() -> None:
    """The fingerprint of a run over two machines asked this one for the other's GPU."""
    config = EngineConfig(cuda_ids=(0, 1))
    machine = Machine(num_gpus=1, num_stages=2, local_size=2)
    assert make_plan(config, open_model(config), machine).device == torch.device(
        "cuda:0"
    )


def test_a_gpu_compiles_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a model's own widths were compiled in the first step."""
    warmed: list[str] = []
    for kind in ("cpu", "cuda"):
        stage = SimpleNamespace(warm_up=lambda kind=kind: warmed.append(kind))
        monkeypatch.setattr(
            "fminfer.runtime.load.builder.make_stage",
            lambda *given, stage=stage: stage,
        )
        loaded: Any = SimpleNamespace(device=torch.device(kind))
        assert build_stage(loaded) is stage
    assert warmed == ["cuda"]


def test_without_a_gpu() -> None:
    found = device_of("auto", (3,), num_gpus=0)
    assert found == torch.device("cpu"), "which is told, see run_engine.py"
    with pytest.raises(UsageError, match="is not here"):
        device_of("cuda", num_gpus=0)


def test_steps_are_as_large_as_suits_the_device() -> None:
    config = EngineConfig()
    assert (
        config.choose_step_sizes("cpu", 1)
        == config.choose_step_sizes("cpu", 4)
        == StepSizes(512, 256)
    )
    sizes = [
        config.choose_step_sizes("cuda", num_stages) for num_stages in (1, 2, 8, 100)
    ]
    assert sizes == [StepSizes(chunk, 1024) for chunk in (4096, 2048, 512, 512)]
    asked = EngineConfig(chunk_size=7, max_rows=9)
    assert (
        asked.choose_step_sizes("cuda", 1)
        == asked.choose_step_sizes("cpu", 1)
        == StepSizes(7, 9)
    )


def test_an_engine_has_the_sizes_of_its_device() -> None:
    with closing(fminfer.Engine(budget=4096)) as engine:
        assert engine.facts.plan.sizes.max_rows == 256
        most: list[int] = []
        engine.follow(on_step=lambda trace: most.append(trace.step.num_tokens))
        ids = [3 + i % 20 for i in range(300)]
        rows = [{"prompt": [3 + n, *ids], "max_tokens": 1} for n in range(4)]
        assert not any(record.error for record in engine.run(rows))
        assert max(most) == 512


def test_a_gpus_memory_is_for_the_cache_but_for_a_steps_work() -> None:
    """A GPU's fifth was left, whatever a step took: draws from 64 M logits need 2.5 GB."""
    assert auto_budget(10, 10**9, 10_000, 99_999, "cpu") == 500
    free = 10 * 2**30
    work = 3 * 2**30
    assert (
        auto_budget(10, 10**9, free, work, "cuda") == (free - work - GPU_RESERVE) // 10
    )
    assert auto_budget(10, 300, free, work, "cuda") == 300, "no more is of use"
    assert auto_budget(10, 300, work, work, "cuda") == 1


def test_the_work_of_draws_on_a_gpu_is_counted() -> None:
    checkpoint = open_random_checkpoint("llama-160m")
    sizes = {}
    for kind in ("cpu", "cuda"):
        config = EngineConfig(dtype="bfloat16", device=kind)
        sizes[kind] = make_plan(
            config, checkpoint, Machine(device_bytes=80 << 30)
        ).this_rank.takes.work
    assert 2.5e9 < sizes["cuda"] < 3.5e9
    assert sizes["cpu"] < 0.2e9


def test_threads_that_loading_used_do_not_compete_with_those_of_steps() -> None:
    """Torch's OpenMP keeps helpers for each thread that computes; while there are more
    of them than cores they sleep between any two products."""
    code = """
import os, torch, fminfer
def count_new(work):
    before = len(os.listdir("/proc/self/task"))
    work()
    return len(os.listdir("/proc/self/task")) - before
torch.set_num_threads(3)
work = lambda: torch.ones(1 << 22).exp()
first = count_new(work)
engine = fminfer.Engine()
print(first, count_new(work))
engine.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "3"},  # so many on any number of cores
    )
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_bfloat16_is_asked_of_the_device_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch was asked for its current device, which is another one's until it is set."""
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    assert [is_fast_in_bfloat16(torch.device("cuda", i)) for i in (0, 1)] == [
        False,
        True,
    ]


def test_a_gpus_products_round_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16-bit products' sums were added in 16 bits, as torch does by default.

    A program that has an engine may have allowed tf32, by torch's old names or its new ones.
    """
    matmul = torch.backends.cuda.matmul
    chosen = []
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    try:
        use_device(torch.device("cpu"))
        assert [getattr(matmul, name) for name in names] == before and not chosen
        for name, value in (("fp32_precision", "tf32"), ("allow_tf32", True)):
            setattr(matmul, name, value)
            use_device(torch.device("cuda:1"))
            assert [getattr(matmul, name) for name in names] == [False, False]
            assert (
                torch.get_float32_matmul_precision() == "highest"
                and not matmul.allow_tf32
            )
        assert chosen == [torch.device("cuda:1")] * 2
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def test_neighbours_connect_pair_after_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's connections were made by two threads of a rank, whenever each had something."""
    said: list[tuple[int, str, int]] = []
    for rank in range(3):
        for name in ("send", "recv"):
            monkeypatch.setattr(
                torch.distributed,
                name,
                lambda word, other, group, rank=rank, name=name: said.append(
                    (rank, name, other)
                ),
            )
        group: Any = SimpleNamespace(rank=rank, world_size=3)
        connect_neighbours(group, group, torch.device("cpu"))
    assert said == [(0, "send", 1), (1, "recv", 0), (1, "send", 2), (2, "recv", 1)]


def test_gloo_and_nccl_meet_on_one_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL was left to choose, and could take one on which the others are not reached."""
    monkeypatch.setattr(
        "fminfer.pipeline.group.list_interfaces", lambda: {"ib0": "10.0.0.7"}
    )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    mine = {"host": "b", "store": "10.0.0.1", "own": "10.0.0.7"}
    _choose_interface(
        mine, [{"host": "a", "store": "10.0.0.1", "own": "10.0.0.1"}, mine]
    )
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ib0"

"""Which device a rank takes; no GPU is needed to decide it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fminfer
from fminfer.core.config import EngineConfig, StepSizes
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.machine.device import choose_device, is_fast_in_bfloat16, use_device
from fminfer.models.checkpoint import open_random
from fminfer.pipeline.group import _choose_interface
from fminfer.worker.agreement import connect_neighbours
from fminfer.worker.step_memory import GPU_RESERVE, auto_budget, step_bytes


def test_ranks_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("auto", "cuda"):
        assert [choose_device(name, (), rank).index for rank in range(5)] == [0, 1, 2, 3, 0]
        assert [choose_device(name, (2, 1), rank).index for rank in range(3)] == [2, 1, 2]
    assert choose_device("cuda:3", (), 1) == torch.device("cuda:3")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="contradict each other"):
        choose_device("cuda:3", (1, 2))
    with pytest.raises(UsageError, match="torch sees 4 GPUs"):
        choose_device("auto", (4,))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", (3,)) == torch.device("cpu"), "which is told, see running.py"
    with pytest.raises(UsageError, match="is not here"):
        choose_device("cuda")


def test_steps_are_as_large_as_suits_the_device() -> None:
    config = EngineConfig()
    assert config.step_sizes("cpu", 1) == config.step_sizes("cpu", 4) == StepSizes(512, 256)
    sizes = [config.step_sizes("cuda", num_stages) for num_stages in (1, 2, 8, 100)]
    assert sizes == [StepSizes(chunk, 1024) for chunk in (4096, 2048, 512, 512)]
    asked = EngineConfig(chunk_size=7, max_rows=9)
    assert asked.step_sizes("cuda", 1) == asked.step_sizes("cpu", 1) == StepSizes(7, 9)


def test_an_engine_has_the_sizes_of_its_device() -> None:
    with closing(fminfer.Engine(budget=4096)) as engine:
        assert engine.facts.max_rows == 256
        most: list[int] = []
        engine.follow(on_step=lambda trace: most.append(trace.step.num_tokens))
        ids = [3 + i % 20 for i in range(300)]
        rows = [{"prompt": [3 + n, *ids], "max_tokens": 1} for n in range(4)]
        assert not any(record.error for record in engine.run(rows))
        assert max(most) == 512


def test_a_gpus_memory_is_for_the_cache_but_for_a_steps_work() -> None:
    """A GPU's fifth was left, whatever a step took: draws from 64 M logits need 2.5 GB."""
    assert auto_budget(10, 10**9, 10_000, 99_999, "cpu") == 500
    free, work = 10 * 2**30, 3 * 2**30
    assert auto_budget(10, 10**9, free, work, "cuda") == (free - work - GPU_RESERVE) // 10
    assert auto_budget(10, 300, free, work, "cuda") == 300, "no more is of use"
    assert auto_budget(10, 300, work, work, "cuda") == 1


def test_the_work_of_draws_on_a_gpu_is_counted() -> None:
    part, model = Part(0, 1, 0, 12), open_random("llama-160m").model
    sizes = {
        kind: step_bytes(EngineConfig(), model, torch.bfloat16, torch.device(kind), part)
        for kind in ("cpu", "cuda")
    }
    assert 2.5e9 < sizes["cuda"] < 3.5e9
    assert sizes["cpu"] < 0.2e9


def test_threads_that_loading_used_do_not_compete_with_those_of_steps() -> None:
    """Torch's OpenMP keeps helpers for each thread that computes; while there are more of them than
    cores they sleep between any two products."""
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_bfloat16_is_asked_of_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch was asked for its current device, which is another one's until it is set."""
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    assert [is_fast_in_bfloat16(torch.device("cuda", i)) for i in (0, 1)] == [False, True]


def test_a_gpus_products_round_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16-bit products' sums were added in 16 bits, as torch does by default."""
    matmul, chosen = torch.backends.cuda.matmul, []
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    names.append("allow_tf32")
    before = [getattr(matmul, name) for name in names]
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    try:
        use_device(torch.device("cpu"))
        assert [getattr(matmul, name) for name in names] == before and not chosen
        use_device(torch.device("cuda:1"))
        assert not any(getattr(matmul, name) for name in names)
        assert chosen == [torch.device("cuda:1")]
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
                lambda word, other, group, rank=rank, name=name: said.append((rank, name, other)),
            )
        group: Any = SimpleNamespace(rank=rank, world_size=3)
        connect_neighbours(group, group, torch.device("cpu"))
    assert said == [(0, "send", 1), (1, "recv", 0), (1, "send", 2), (2, "recv", 1)]


def test_gloo_and_nccl_meet_on_one_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL was left to choose, and could take one on which the others are not reached."""
    monkeypatch.setattr("fminfer.pipeline.group.interfaces", lambda: {"ib0": "10.0.0.7"})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    mine = {"host": "b", "store": "10.0.0.1", "own": "10.0.0.7"}
    _choose_interface(mine, [{"host": "a", "store": "10.0.0.1", "own": "10.0.0.1"}, mine])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ib0"


def test_a_gpus_peak_is_told_beside_what_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(fminfer.Engine(budget=1024, kernels="off")) as engine:
        assert engine.gpu_memory == {}
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 12345)
        engine.pipeline._device = torch.device("cuda")
        told = engine.gpu_memory
        kv = 1024 * engine.facts.kv_bytes_per_token
        assert told["peak_bytes"] == 12345
        assert told["foreseen_bytes"] > engine.facts.weight_bytes + kv

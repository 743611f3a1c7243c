"""Which device a rank takes; no GPU is needed to decide it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest
import torch

import fminfer
from fminfer.config import EngineConfig, StepSizes
from fminfer.errors import UsageError
from fminfer.placement import auto_budget, choose_device


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
        assert engine.max_rows == 256
        most: list[int] = []
        engine.trace(lambda trace: most.append(trace.step.num_tokens))
        ids = [3 + i % 20 for i in range(300)]
        rows = [{"prompt": [3 + n, *ids], "max_tokens": 1} for n in range(4)]
        assert not any(record.error for record in engine.run(rows))
        assert max(most) == 512


def test_a_gpus_memory_is_for_the_cache_but_for_a_steps_work() -> None:
    assert auto_budget(10, 10**9, 10_000, "cpu") == 500
    assert auto_budget(10, 10**9, 10_000, "cuda") == 800
    assert auto_budget(10, 300, 10_000, "cuda") == 300, "no more is of use"


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

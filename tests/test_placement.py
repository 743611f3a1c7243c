"""Which device a rank takes; no GPU is needed to decide it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fminfer.errors import UsageError
from fminfer.placement import choose_device


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

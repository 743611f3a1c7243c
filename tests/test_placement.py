"""Which device a rank takes; no GPU is needed to decide it."""

from __future__ import annotations

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

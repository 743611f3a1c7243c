"""What goes to a GPU goes in one copy, in which columns of several types lie side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fminfer.machine import device

COLUMNS = [
    np.array([-1, 2**62], np.int64),
    np.array([], np.int64),
    np.array([0.5], np.float32),
    np.array([7, 8, -9], np.int32),
]


def test_columns_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column was a copy of its own, and the GPU was waited for at each."""
    together = device.pin_columns(COLUMNS, torch.device("cpu"))
    num_copies = 0

    class Pinned:
        def to(self, where: torch.device, *, non_blocking: bool) -> torch.Tensor:
            nonlocal num_copies
            num_copies += 1
            assert non_blocking
            return together

    there: Any = torch.device("cuda")
    monkeypatch.setattr(device, "pin_columns", lambda columns, where: Pinned())
    for where in (there, torch.device("cpu")):
        found = device.send_columns(COLUMNS, where)
        for tensor, column in zip(found, COLUMNS, strict=True):
            assert torch.equal(tensor, torch.from_numpy(column))
            assert tensor.dtype == torch.from_numpy(column).dtype
    assert num_copies == 1

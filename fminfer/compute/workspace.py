"""Memory that calls work in, one after another."""

from __future__ import annotations

import torch


class Workspace:
    """Memory that one has used is near, and need not be had again from the system."""

    def __init__(self) -> None:
        self._bytes = _nothing()

    def take(self, size: int) -> torch.Tensor:
        """Return so many bytes; the next call may return the same."""
        if len(self._bytes) < size:
            self.drop()  # not both at once
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes

    def drop(self) -> None:
        """Give it back."""
        self._bytes = _nothing()


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")

"""What the ranks that share a stage's layers tell each other within a step.

Each has a shard of every layer, and computes a part of each sum. On the CPU they add
these parts up in memory that all of them map (`sums.cpp`), in the order of the ranks: no result
depends on timing.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import torch

from fminfer.compute.kernels.library_calls import SumsStruct
from fminfer.compute.values.weights import KERNEL_TYPES
from fminfer.core.errors import PipelineError

CAPACITY = 1 << 20  # bytes that a rank shares at once; larger tensors go in parts
DIFFER = 3  # of sums.h


class ShardGroup(Protocol):
    """This rank's connection to the other ranks of its stage."""

    @property
    def index(self) -> int:
        """This rank's number among them."""

    @property
    def count(self) -> int:
        """How many ranks the stage has."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, the same on each; x may be overwritten."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each rank has, (ranks, *x.shape)."""

    def stop(self) -> None:
        """End this process's waits with a PipelineError: a rank has failed."""


class SharedMemoryGroup:
    """Ranks of one machine that map the same memory of `num_bytes`, all zeros at first."""

    def __init__(
        self, library: ctypes.CDLL, memory: mmap.mmap, index: int, count: int
    ) -> None:
        self._sum = library.fminfer_sum
        self._gather = library.fminfer_gather
        self.index = index
        self.count = count
        self._memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.struct = SumsStruct(address, CAPACITY, index, count, 0, 0)
        # for kernels that add up by themselves
        self.address = ctypes.addressof(self.struct)

    @staticmethod
    def num_bytes(library: ctypes.CDLL, count: int) -> int:
        """Return the bytes that so many ranks need."""
        return int(library.fminfer_sums_bytes(count, CAPACITY))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in KERNEL_TYPES:
            return self.sum(x.float()).to(x.dtype)
        x = x.contiguous()
        settings = KERNEL_TYPES[x.dtype], torch.get_num_threads()
        raise_group_failure(self._sum(self.address, x.data_ptr(), x.numel(), *settings))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        gathered = x.new_empty((self.count, *x.shape))
        raise_group_failure(
            self._gather(self.address, x.data_ptr(), gathered.data_ptr(), x.nbytes)
        )
        return gathered

    def stop(self) -> None:
        self.struct.is_over = 1


def raise_group_failure(failed: int) -> None:
    """Raise what a call of the library says of the other ranks; 0: all is well.

    Raises:
        PipelineError: one of them has failed, or computes another step.
    """
    if failed == DIFFER:
        raise PipelineError(
            "the ranks of a stage have tensors of different sizes; please report this"
        )
    if failed:
        raise PipelineError("another rank of this stage has failed")

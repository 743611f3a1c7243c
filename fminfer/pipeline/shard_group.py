"""Connects the ranks that share a stage's layers: over shared memory, NCCL, or gloo."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fminfer.compute.shards import ShardGroup, SharedMemoryGroup
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.core.quantities import describe_bytes
from fminfer.machine.device import make_memory_name
from fminfer.pipeline.group import FOREVER, Group

Transport = Literal["memory", "nccl", "gloo"]


def connect_shards(
    group: Group, part: Part, device: torch.device, library: ctypes.CDLL | None
) -> ShardGroup | None:
    """Connect the ranks of this one's stage; None: it is alone.

    All of them use the same transport: NCCL if each has a GPU of its own, memory that all of
    them map if each has the CPU's kernels, and otherwise gloo.

    Raises:
        UsageError: they are on several machines, or there is no memory that they can share.
    """
    if part.num_shards == 1:
        return None
    _check_one_machine(group, part)
    can_map = library is not None and hasattr(os, "memfd_create")
    kind = "nccl" if device.type == "cuda" else "memory" if can_map else "gloo"
    offers = group.gather(
        "sums", [kind, make_memory_name(device, socket.gethostname())]
    )
    kinds = {each for each, _ in offers}
    devices = {name for _, name in offers}
    transport: Transport = next(
        (each for each in get_args(Transport) if kinds == {each}), "gloo"
    )
    if transport == "nccl" and len(devices) < group.world_size:
        transport = "gloo"
    if transport == "memory":
        assert library is not None, "every rank has it"
        return _map_memory(group, part, library)
    for stage in range(part.num_stages):  # torch has all ranks make each group
        made = dist.new_group(
            [*replace(part, stage=stage).ranks], timeout=FOREVER, backend=transport
        )
        if stage == part.stage:
            shards = TorchGroup(
                made, part.shard, part.num_shards, is_nccl=transport == "nccl"
            )
    # NCCL connects here, before there is work
    shards.sum(torch.zeros(1, device=device))
    return shards


class TorchGroup:
    """Ranks that add up by torch.distributed."""

    def __init__(
        self, group: dist.ProcessGroup, index: int, count: int, *, is_nccl: bool
    ) -> None:
        self._group = group
        self.index = index
        self.count = count
        self._is_nccl = is_nccl

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_nccl:
            x = x.contiguous()
            dist.all_reduce(x, group=self._group)
            return x
        total = torch.zeros(x.shape, device=x.device)
        for each in self.gather(x):  # in the order of ranks, as in shared memory
            total += each.float()
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._is_nccl:
            gathered = x.new_empty((self.count, *x.shape))
            dist.all_gather_into_tensor(gathered, x, group=self._group)
            return gathered
        if not x.numel():
            return x.new_empty((self.count, *x.shape))
        data = x.cpu().view(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.count)]
        dist.all_gather(parts, data, group=self._group)
        return torch.stack(parts).view(x.dtype).view(self.count, *x.shape).to(x.device)

    def stop(self) -> None:
        """End what waits on a GPU; over gloo it ends when a connection breaks."""
        if self._is_nccl:
            with suppress(Exception):  # a rank is gone, and so may be the group
                self._group.abort()


def _check_one_machine(group: Group, part: Part) -> None:
    for stage in range(part.num_stages):
        ranks = replace(part, stage=stage).ranks
        places = [(rank, group.hosts[rank]) for rank in ranks]
        if len({host for _, host in places}) > 1:
            hosts = ", ".join(f"rank {rank} on {host}" for rank, host in places)
            raise UsageError(
                f"ranks {ranks[0]} to {ranks[-1]} share each layer "
                f"(--tensor-parallel-size {part.num_shards}) and must be on one "
                f"machine, but there is {hosts}. Number the ranks machine by machine, a "
                f"multiple of {part.num_shards} on each (srun --distribution=block, "
                "mpirun --map-by slot); or give a smaller --tensor-parallel-size"
            )


def _map_memory(group: Group, part: Part, library: ctypes.CDLL) -> ShardGroup:
    """Map memory that the leader makes. It has no name that could outlive its processes.

    The others find it among the leader's open files. A mark at its end tells that it is
    this very memory, and not that of a process with the same number on another machine.
    """
    size = SharedMemoryGroup.num_bytes(library, part.num_shards)
    made, mark = _allocate_memory(size) if part.is_leader else (-1, "")
    path = f"/proc/{os.getpid()}/fd/{made}"
    path, mark = group.gather("shared memory", [path, mark])[part.ranks[0]]
    why = f"{path} is of another process"
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size + len(mark))
        if memory[size:] == mark.encode():
            why = ""
    except (OSError, ValueError) as error:
        why = str(error)
    finally:
        group.gather("mapped memory", True)
        if made >= 0:
            os.close(made)
    if why:
        raise UsageError(
            f"rank {part.rank} cannot map the memory of rank {part.ranks[0]} ({why}). "
            "Ranks that share layers must see each other's processes: in containers, "
            "start them in one, or with --pid=host; or leave --tensor-parallel-size out"
        )
    return SharedMemoryGroup(library, memory, part.shard, part.num_shards)


def _allocate_memory(size: int) -> tuple[int, str]:
    """Return memory of zeros as a file without a name, and the mark behind them."""
    mark = secrets.token_hex(16)
    descriptor = os.memfd_create("fminfer")
    try:
        # now, where a lack is an error
        os.posix_fallocate(descriptor, 0, size + len(mark))
    except OSError as error:
        os.close(descriptor)
        raise UsageError(
            f"ranks that share layers need {describe_bytes(size)} of shared memory, "
            "and the system "
            f"refuses it ({error}). Free memory, or raise the limit of the job or container"
        ) from error
    os.pwrite(descriptor, mark.encode(), size)
    return descriptor, mark

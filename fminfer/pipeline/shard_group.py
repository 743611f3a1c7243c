"""Connects the ranks that share a stage's layers: over shared memory, NCCL, or gloo."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fminfer.compute.shards import Shards, SharedMemoryShards
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.core.quantities import show_bytes
from fminfer.machine.device import memory_name
from fminfer.pipeline.group import FOREVER, Group

SHARED_MEMORY = Path("/dev/shm")
Way = Literal["memory", "nccl", "gloo"]


def connect_shards(
    group: Group, part: Part, device: torch.device, library: ctypes.CDLL | None
) -> Shards | None:
    """Meet the other ranks of this one's stage; None: it has none.

    All of them take the same way: NCCL if each has a GPU of its own, memory that all of them map if
    each has the CPU's kernels, and otherwise gloo.

    Raises:
        UsageError: they are on several machines, or there is no memory that they can share.
    """
    if part.num_shards == 1:
        return None
    _refuse_distance(group, part)
    kind = "nccl" if device.type == "cuda" else "gloo" if library is None else "memory"
    told = group.gather("sums", [kind, memory_name(device, socket.gethostname())])
    kinds, devices = {each for each, _ in told}, {name for _, name in told}
    way: Way = next((each for each in get_args(Way) if kinds == {each}), "gloo")
    if way == "nccl" and len(devices) < group.world_size:
        way = "gloo"
    if way == "memory":
        assert library is not None, "every rank has it"
        return _map_memory(group, part, library)
    for stage in range(part.num_stages):  # torch has all ranks make each group
        ranks = [*replace(part, stage=stage).ranks]
        made = dist.new_group(ranks, timeout=FOREVER, backend=way)
        own = made if stage == part.stage else None
        if own is not None:
            shards = TorchShards(own, part.shard, part.num_shards, is_nccl=way == "nccl")
    shards.sum(torch.zeros(1, device=device))  # NCCL connects here, before there is work
    return shards


class TorchShards:
    """Ranks that add up by torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, index: int, count: int, *, is_nccl: bool) -> None:
        self._group, self.index, self.count, self._is_nccl = group, index, count, is_nccl

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_nccl:
            x = x.contiguous()
            dist.all_reduce(x, group=self._group)
            return x
        total = torch.zeros(x.shape, device=x.device)
        for each in self.share(x):  # in the order of ranks, as in shared memory
            total += each.float()
        return total.to(x.dtype)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._is_nccl:
            found = x.new_empty((self.count, *x.shape))
            dist.all_gather_into_tensor(found, x, group=self._group)
            return found
        own = x.cpu().view(-1).view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(parts, own, group=self._group)
        return torch.stack(parts).view(x.dtype).view(self.count, *x.shape).to(x.device)

    def stop(self) -> None:
        """Nothing: whoever waits ends with its process."""


def _refuse_distance(group: Group, part: Part) -> None:
    for stage in range(part.num_stages):
        ranks = replace(part, stage=stage).ranks
        places = [(rank, group.hosts[rank]) for rank in ranks]
        if len({host for _, host in places}) > 1:
            told = ", ".join(f"rank {rank} on {host}" for rank, host in places)
            raise UsageError(
                f"ranks {ranks[0]} to {ranks[-1]} share each layer (--tensor-parallel-size "
                f"{part.num_shards}) and must be on one machine; there is {told}. Number ranks "
                f"machine by machine, a multiple of {part.num_shards} on each (srun "
                "--distribution=block, mpirun --map-by slot); or give a smaller "
                "--tensor-parallel-size"
            )


def _map_memory(group: Group, part: Part, library: ctypes.CDLL) -> Shards:
    """Map memory that the leader makes. It has no name any more once all have it."""
    size = SharedMemoryShards.num_bytes(library, part.num_shards)
    made = _make_file(size) if part.is_leader else None
    path = group.gather("shared memory", str(made or ""))[part.ranks[0]]
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UsageError(
            f"rank {part.rank} cannot map {path}, which rank {part.ranks[0]} has made ({error}). "
            "Ranks that share layers need the same /dev/shm: in containers, --ipc=host"
        ) from error
    finally:
        group.gather("mapped memory", True)
        if made is not None:
            made.unlink(missing_ok=True)
    return SharedMemoryShards(library, memory, part.shard, part.num_shards)


def _make_file(size: int) -> Path:
    """Make a file of zeros in memory, under a name that no other machine has."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())
    path = folder / f"fminfer-{host}-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, where a lack of it is an error
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(
            f"ranks that share layers need {show_bytes(size)} in {folder} ({error}). Make it "
            "larger (docker: --shm-size 1g, or --ipc=host), or remove what other programs left "
            "there"
        ) from error
    return path

"""Checks that all ranks have the same run, and connects their GPUs."""

from __future__ import annotations

import hashlib
import json
import socket

import torch
import torch.distributed as dist

from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError
from fminfer.core.partition import Part
from fminfer.core.version import __version__
from fminfer.machine.device import memory_name
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.fingerprint import name_differences
from fminfer.pipeline.group import Group


def agree(
    group: Group,
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    parts: list[Part],
) -> None:
    """Check that every rank was started for the same run as rank 0."""
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)  # each machine may have its own copy
    text = json.dumps(fields, sort_keys=True, default=str)
    mine = {
        "fminfer's version": __version__,
        "the model's config": hashlib.sha256(text.encode()).hexdigest()[:12],
        "the dtype": str(dtype).removeprefix("torch."),
        "the KV cache's dtype": str(kv_dtype).removeprefix("torch."),
        "the layers of each rank": [part.num_layers for part in parts],
        "--budget": config.budget,
        "the block size": config.block_size,
        "--max-rows": config.max_rows,
        "--seed": config.seed,
    }
    theirs = group.gather("options", mine)[0]
    for name, value in mine.items():
        if theirs[name] != value:
            raise PipelineError(
                f"{name} is {value} on rank {group.rank} and {theirs[name]} on rank 0; start every "
                "rank with the same model and options"
            )


def compare_weights(group: Group, mine: dict[str, str]) -> None:
    """Check that every rank finds the same weights as rank 0: each may have its own copy."""
    theirs = group.gather("weights", mine)[0]
    if differences := name_differences(mine, theirs):
        raise PipelineError(
            f"the weights of rank {group.rank} are not those of rank 0: {differences} differ; give "
            "every rank the same model"
        )


def connect_gpus(group: Group, device: torch.device) -> dist.ProcessGroup | None:
    """Return NCCL's group if each rank has a GPU of its own, which is when it works."""
    names = group.gather("device", memory_name(device, socket.gethostname()))
    if any(name.endswith("/cpu") for name in names) or len(set(names)) < len(names):
        return None
    gpus: dist.ProcessGroup = dist.new_group(backend="nccl")
    connect_neighbours(gpus, group, device)
    return gpus


def connect_neighbours(gpus: dist.ProcessGroup, group: Group, device: torch.device) -> None:
    """Send a message from each rank to the next, pair after pair.

    NCCL connects two ranks at their first message. If a receiving and a sending thread did this at
    once, two ranks could wait for each other for ever.
    """
    word = torch.zeros(1, device=device)
    for first in range(group.world_size - 1):
        if group.rank == first:
            dist.send(word, first + 1, group=gpus)
        elif group.rank == first + 1:
            dist.recv(word, first, group=gpus)
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""How much memory each process of a run takes, from the model's config alone.

The model is built without memory (meta device) and cut as a run cuts it; no weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fminfer.config import EngineConfig
from fminfer.head import layer_left_unpacked
from fminfer.loading import kv_token_bytes, most_kv_tokens, split_model
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.slicing import cut
from fminfer.models.weights import build_on_meta
from fminfer.packed_linear import find_packable
from fminfer.partition import Part
from fminfer.placement import free_bytes, is_fast_in_bfloat16
from fminfer.step_memory import auto_budget, step_bytes

# Measured on CPUs with models of 125 to 560 million parameters; see docs/performance.md.
RUN_BYTES = 30 << 20  # of a run's process beside a check's: threads, journal, rows
# What the allocator cannot use again of each weight that was replaced by its packed form.
HOLE_BYTES = {torch.float32: 5 << 19, torch.bfloat16: 1 << 20}
EXPERT_HOLE_BYTES = {torch.float32: 1 << 20}  # of each product of an expert; in bfloat16 none


@dataclass(slots=True, frozen=True)
class Footprint:
    """What one process takes, in bytes."""

    rank: int
    num_layers: int
    libraries: int  # Python, torch and transformers, on the host
    weights: int
    work: int  # of a step
    kv_token: int  # a token's keys and values

    def total(self, num_kv_tokens: int) -> int:
        """Return the peak, if so many tokens of KV cache are used."""
        return self.libraries + self.weights + self.work + num_kv_tokens * self.kv_token


def measure_footprints(
    config: EngineConfig,
    checkpoint: Checkpoint,
    num_stages: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Footprint]:
    """Return what each process of a run takes.

    Raises:
        UsageError: layers that cannot be split so.
    """
    libraries = own_bytes() + RUN_BYTES
    return [
        _measure(config, checkpoint, part, device, dtype, libraries)
        for part in split_model(config, checkpoint, num_stages)
    ]


def choose_budget(
    config: EngineConfig,
    checkpoint: Checkpoint,
    footprints: Sequence[Footprint],
    device: torch.device,
) -> int:
    """Return how many blocks of KV cache a run has, all processes being on this machine.

    An automatic budget goes by the memory that is free now, less what is to be loaded.
    """
    budget = config.budget
    if budget is None:
        shares_memory = device.type == "cpu"
        taken = [f.weights + (f.libraries if shares_memory else 0) for f in footprints]
        kv = [f.kv_token for f in footprints]
        load, each = (sum(taken), sum(kv)) if shares_memory else (max(taken), max(kv))
        free = max(0, free_bytes(device) - load + (own_bytes() if shares_memory else 0))
        most = most_kv_tokens(config, checkpoint, device)
        work = max(f.work for f in footprints)
        budget = auto_budget(each, most, free, work, device.type)
    return -(-budget // config.block_size)


def own_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _measure(
    config: EngineConfig,
    checkpoint: Checkpoint,
    part: Part,
    device: torch.device,
    dtype: torch.dtype,
    libraries: int,
) -> Footprint:
    model = build_on_meta(checkpoint)
    cut(model, checkpoint.family, part, device)
    is_fast = is_fast_in_bfloat16(device)
    packable: list[torch.Tensor] = []
    if device.type == "cpu":
        left = layer_left_unpacked(model, dtype)
        packable = find_packable(model, dtype, is_fast_in_bfloat16=is_fast, left=left)
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    # Of files in this very dtype the system keeps what was read, for it is mapped and not copied.
    is_mapped = checkpoint.folder is not None and checkpoint.config.dtype == dtype
    twice = packable if is_mapped else [w for w in packable if _is_tied(model, w)]
    weights += sum(weight.numel() for weight in twice) * dtype.itemsize
    weights += len(packable) * HOLE_BYTES.get(dtype, 0)
    num_products = sum(len(weight) for weight in packable if weight.dim() == 3)
    weights += num_products * EXPERT_HOLE_BYTES.get(dtype, 0)
    return Footprint(
        part.stage,
        part.num_layers,
        libraries,
        weights,
        step_bytes(config, checkpoint, model, device, dtype, part),
        kv_token_bytes(checkpoint, part, dtype),
    )


def _is_tied(model: Any, weight: torch.Tensor) -> bool:
    return weight is getattr(model.get_input_embeddings(), "weight", None)

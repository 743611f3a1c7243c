"""Loads one rank's part of the model and builds its stage; alone or agreeing with other ranks.

It knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fminfer import __version__
from fminfer.attention import AttentionKernel
from fminfer.config import EngineConfig
from fminfer.draw_kernel import DrawKernel
from fminfer.errors import PipelineError, UsageError
from fminfer.fused_layers import fuse_layers
from fminfer.kernel_choice import find_attention, find_layers, find_library
from fminfer.memory import is_out_of_memory
from fminfer.models.checkpoint import Checkpoint, open_checkpoint, open_random
from fminfer.models.slicing import head_cost
from fminfer.models.weights import build_on_meta, load_model
from fminfer.packed_experts import pack_experts
from fminfer.packed_linear import pack_linears
from fminfer.partition import Part, split_layers
from fminfer.pipeline.group import Group
from fminfer.pipeline.stage import Stage, kv_shape
from fminfer.pipeline.transport import HiddenForm
from fminfer.placement import (
    auto_budget,
    choose_device,
    choose_dtype,
    free_bytes,
    is_fast_in_bfloat16,
    memory_name,
    why_slow,
)
from fminfer.product_kernel import ProductKernel
from fminfer.sampling import draw, rank
from fminfer.score_kernel import ScoreKernel
from fminfer.threads import choose_num_threads
from fminfer.whole_layers import join_layers


@dataclass(slots=True)
class LoadedPart:
    """One rank's part of a model, in memory."""

    checkpoint: Checkpoint
    part: Part
    network: nn.Module
    dtype: torch.dtype
    device: torch.device
    form: HiddenForm
    library: ctypes.CDLL | None  # the CPU's kernels
    attention: AttentionKernel | None  # None: plain torch
    why_slower: str  # why it is slower than it could be

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.network.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token's keys and values take on this rank."""
        return kv_token_bytes(self.checkpoint, self.part, self.dtype)


def kv_token_bytes(checkpoint: Checkpoint, part: Part, dtype: torch.dtype) -> int:
    """Return what one token's keys and values take in the layers of a part."""
    kv_heads, head_dim = kv_shape(checkpoint.config)
    return 2 * part.num_layers * kv_heads * head_dim * dtype.itemsize


def most_kv_tokens(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> int:
    """Return the tokens of KV cache beyond which more is of no use."""
    size = config.block_size
    return config.step_sizes(device.type, 1).max_rows * -(-checkpoint.context_length // size) * size


def open_model(config: EngineConfig, *, has_weights: bool = True) -> Checkpoint:
    """Find the model that a run is to use.

    Args:
        has_weights: otherwise a model of the hub is fetched without its weights.

    Raises:
        CheckpointError: there is none, or it does not run.
        UsageError: --model-type says it is another.
    """
    if config.random_init is not None:
        checkpoint = open_random(config.random_init)
    else:
        checkpoint = open_checkpoint(config.model, has_weights=has_weights)
    _check_model_type(config.model_type, str(checkpoint.config.model_type))
    return checkpoint


def load_part(
    config: EngineConfig,
    checkpoint: Checkpoint,
    group: Group | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedPart:
    """Load this rank's layers.

    Args:
        group: the ranks; None: this process alone runs the model.
        on_progress: called with (bytes read, bytes in all) while weights load.

    Raises:
        CheckpointError: the model cannot be loaded.
        PipelineError: the ranks were started with different options.
        UsageError: an option that cannot be.
    """
    local_rank, local_size = (group.local_rank, group.local_size) if group else (0, 1)
    local_rank += config.engine_number * local_size
    device = choose_device(config.device, config.cuda_ids, local_rank)
    dtype = choose_dtype(config.dtype, checkpoint.config.dtype, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parts = split_model(config, checkpoint, group.world_size if group else 1)
    part = parts[group.rank if group else 0]
    hidden_group = None
    num_processes = local_size * config.num_engines
    torch.set_num_threads(
        choose_num_threads(config.threads, torch.get_num_threads(), num_processes)
    )
    if group is not None:
        _agree(group, config, checkpoint, dtype, parts)
        hidden_group = _gpu_group(group, device)
    network = load_model(
        checkpoint, dtype=dtype, device=device, seed=config.seed, part=part, on_progress=on_progress
    )
    library = find_library(config.attention, device)
    layers, no_layers = find_layers(config.attention, library, dtype=dtype, device=device)
    if layers is not None:
        fuse_layers(network, layers)
    if device.type == "cpu":
        kernel = None if library is None else ProductKernel(library)
        is_fast = is_fast_in_bfloat16(device)
        pack_linears(network, is_fast_in_bfloat16=is_fast, kernel=kernel)
        pack_experts(network, is_fast_in_bfloat16=is_fast, kernel=kernel, layers=layers)
        if library is not None:
            join_layers(network, library)
    attention, no_attention = find_attention(
        config.attention,
        library,
        checkpoint.config,
        config.block_size,
        dtype=dtype,
        device=device,
    )
    form = HiddenForm(checkpoint.config.hidden_size, dtype, device, hidden_group)
    reasons = (no_attention or no_layers, why_slow(dtype, device))
    why_slower = "; ".join(filter(None, reasons))
    if group is not None:
        why_slower = next(filter(None, group.gather("why slower", why_slower)), "")
    return LoadedPart(
        checkpoint, part, network, dtype, device, form, library, attention, why_slower
    )


def count_blocks(config: EngineConfig, loaded: LoadedPart, group: Group | None = None) -> int:
    """Return the size of the KV cache in blocks, the same on every rank.

    Of an automatic budget each rank allows what a part of its memory, which it may share with other
    ranks, holds beside the weights; the least counts.
    """
    budget, size = config.budget, config.block_size
    if budget is None:
        if group is not None:
            group.gather("loaded", True)  # every rank's weights are in memory
        mine: dict[str, Any] = {
            "memory": memory_name(loaded.device, socket.gethostname()),
            "device": loaded.device.type,
            "free": free_bytes(loaded.device) // config.num_engines,
            "kv_bytes_per_token": loaded.kv_bytes_per_token,
            "most": most_kv_tokens(config, loaded.checkpoint, loaded.device),
        }
        ranks = [mine] if group is None else group.gather("memory", mine)
        budget = min(
            auto_budget(
                sum(r["kv_bytes_per_token"] for r in ranks if r["memory"] == rank["memory"]),
                rank["most"],
                rank["free"],
                rank["device"],
            )
            for rank in ranks
        )
    return -(-budget // size)


def build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    """Give a loaded part its KV cache.

    Raises:
        UsageError: there is no memory for it.
    """
    try:
        return _build_stage(config, loaded, num_blocks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        num_tokens = num_blocks * config.block_size
        size = num_tokens * loaded.kv_bytes_per_token
        raise UsageError(
            f"a KV cache of {num_tokens} tokens takes {size / 2**30:.1f} GiB beside the weights, "
            f"and {free_bytes(loaded.device) / 2**30:.1f} GiB are free; give a smaller --budget"
        ) from error


def _build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    return Stage(
        loaded.network,
        loaded.checkpoint.family,
        dtype=loaded.dtype,
        device=loaded.device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        kernel=loaded.attention,
        ranker=rank if loaded.library is None else ScoreKernel(loaded.library),
        drawer=draw if loaded.library is None else DrawKernel(loaded.library),
    )


def split_model(config: EngineConfig, checkpoint: Checkpoint, num_stages: int) -> list[Part]:
    """Return each stage's layers.

    Raises:
        UsageError: a split that cannot be.
    """
    cost = 0.0
    if num_stages > 1 and config.num_layers is None and config.stage_layers is None:
        cost = head_cost(build_on_meta(checkpoint), checkpoint.family)
    return split_layers(
        checkpoint.config.num_hidden_layers,
        num_stages,
        head_cost=cost,
        each=config.num_layers,
        most=config.max_layers,
        counts=config.stage_layers,
    )


def _agree(
    group: Group,
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    parts: list[Part],
) -> None:
    """See that every rank was started for the same run as rank 0."""
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)  # each machine may have its own copy
    text = json.dumps(fields, sort_keys=True, default=str)
    mine = {
        "fminfer's version": __version__,
        "the model's config": hashlib.sha256(text.encode()).hexdigest()[:12],
        "the dtype": str(dtype).removeprefix("torch."),
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


def _gpu_group(group: Group, device: torch.device) -> dist.ProcessGroup | None:
    """Return NCCL's group if each rank has a GPU of its own, which is when it works."""
    names = group.gather("device", memory_name(device, socket.gethostname()))
    if any(name.endswith("/cpu") for name in names) or len(set(names)) < len(names):
        return None
    gpus: dist.ProcessGroup = dist.new_group(backend="nccl")
    return gpus


def _check_model_type(name: str | None, of_config: str) -> None:
    """Refuse a model type that is not the config's; old spellings (gptneox, gpt-j) are known."""
    plain = (name or "").replace("_", "").replace("-", "").lower()
    if name is not None and plain != of_config.replace("_", ""):
        raise UsageError(
            f"--model-type {name} clashes with the model's config, which says {of_config}; "
            "leave the flag out"
        )

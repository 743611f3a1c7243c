"""Loads one rank's part of the model and builds its stage; alone or agreeing with other ranks.

It knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fminfer.agreement import agree, compare_weights, connect_gpus
from fminfer.attention import AttentionKernel
from fminfer.compute.parts import KernelParts, Parts
from fminfer.compute.products import PackedProducts, Products
from fminfer.config import EngineConfig
from fminfer.draw_kernel import DrawKernel
from fminfer.errors import UsageError
from fminfer.fingerprint import digest_files
from fminfer.fused_layers import fuse_layers
from fminfer.head import layer_left_unpacked
from fminfer.head_kernel import HeadKernel
from fminfer.kernel_choice import find_attention, find_layers, find_library, why_plain
from fminfer.memory import is_out_of_memory
from fminfer.models.architectures import architecture_of
from fminfer.models.checkpoint import Checkpoint, open_checkpoint, open_random
from fminfer.models.load import load_tensors
from fminfer.models.slicing import head_cost
from fminfer.models.transformer import Bodies, Transformer
from fminfer.models.weights import build_on_meta, load_model
from fminfer.packed_experts import pack_experts
from fminfer.packed_linear import pack_linears
from fminfer.partition import Part, split_layers
from fminfer.pipeline.group import Group
from fminfer.pipeline.stage import Stage, kv_shape
from fminfer.pipeline.transport import HiddenForm
from fminfer.placement import (
    choose_device,
    choose_dtype,
    free_bytes,
    is_fast_in_bfloat16,
    memory_name,
    use_device,
    why_slow,
)
from fminfer.product_kernel import ProductKernel
from fminfer.sampling import draw, rank
from fminfer.score_kernel import ScoreKernel
from fminfer.step_memory import auto_budget, step_bytes
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
    num_fused: int  # modules that have parts in kernels
    why_slower: str  # why it is slower than it could be
    file_digests: dict[str, str]  # of its weight files, if others must have the same

    @property
    def weight_bytes(self) -> int:
        if isinstance(self.network, Transformer):
            return 0
        return sum(parameter.nbytes for parameter in self.network.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token's keys and values take on this rank."""
        return kv_token_bytes(self.checkpoint, self.part, self.dtype)

    def step_bytes(self, config: EngineConfig) -> int:
        """What the largest step takes on this rank."""
        return step_bytes(config, self.checkpoint, self.network, self.device, self.dtype, self.part)


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
        UsageError: --model-type says it is another, or --max-model-len is beyond its context.
    """
    if config.random_init is not None:
        checkpoint = open_random(config.random_init)
    else:
        checkpoint = open_checkpoint(config.model, has_weights=has_weights)
    _check_model_type(config.model_type, str(checkpoint.config.model_type))
    if config.max_model_len is None:
        return checkpoint
    if config.max_model_len > checkpoint.context_length:
        raise UsageError(
            f"--max-model-len is {config.max_model_len}, and the context of {checkpoint.name} is "
            f"{checkpoint.context_length} tokens; give a smaller one, or leave the flag out"
        )
    return replace(checkpoint, max_model_len=config.max_model_len)


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
        PipelineError: the ranks were started with different options, or have different weights.
        UsageError: an option that cannot be.
    """
    local_rank, local_size = (group.local_rank, group.local_size) if group else (0, 1)
    local_rank += config.engine_number * local_size
    device = choose_device(config.device, config.cuda_ids, local_rank)
    use_device(device)
    dtype = choose_dtype(config.dtype, checkpoint.config.dtype, device)
    parts = split_model(config, checkpoint, group.world_size if group else 1)
    part = parts[group.rank if group else 0]
    hidden_group = None
    num_processes = local_size * config.num_engines
    torch.set_num_threads(
        choose_num_threads(config.threads, torch.get_num_threads(), num_processes)
    )
    is_alone = group is None and config.num_engines == 1
    digests = {} if is_alone else digest_files(checkpoint)
    if group is not None:
        agree(group, config, checkpoint, dtype, parts)
        compare_weights(group, digests)
        hidden_group = connect_gpus(group, device)
    library = find_library(config.attention, device)
    if os.environ.get("FMINFER_SPEC"):
        return _load_own(config, checkpoint, part, library, group, hidden_group, digests)
    network = load_model(
        checkpoint, dtype=dtype, device=device, seed=config.seed, part=part, on_progress=on_progress
    )
    layers, no_layers = find_layers(config.attention, library, dtype=dtype, device=device)
    num_fused, unfused = 0, ""
    if layers is not None:
        fused = fuse_layers(network, layers)
        num_fused = fused.num_modules
        for name, error in fused.failures.items():
            unfused = unfused or why_plain(config.attention, name, error)
    if device.type == "cpu":
        kernel = None if library is None else ProductKernel(library)
        is_fast = is_fast_in_bfloat16(device)
        left = layer_left_unpacked(network, dtype)
        pack_linears(network, is_fast_in_bfloat16=is_fast, kernel=kernel, left=left)
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
    reasons = (no_attention or no_layers or unfused, why_slow(dtype, device))
    why_slower = "; ".join(filter(None, reasons))
    if group is not None:
        why_slower = next(filter(None, group.gather("why slower", why_slower)), "")
    return LoadedPart(
        checkpoint,
        part,
        network,
        dtype,
        device,
        form,
        library,
        attention,
        num_fused,
        why_slower,
        digests,
    )


def _load_own(
    config: EngineConfig,
    checkpoint: Checkpoint,
    part: Part,
    library: ctypes.CDLL | None,
    group: Group | None,
    hidden_group: Any,
    digests: dict[str, str],
) -> LoadedPart:
    device = choose_device(
        config.device, config.cuda_ids, group.local_rank if group is not None else 0
    )
    dtype = choose_dtype(config.dtype, checkpoint.config.dtype, device)
    architecture = architecture_of(checkpoint.config)
    tensors = load_tensors(
        checkpoint, architecture, part, dtype=dtype, device=device, seed=config.seed
    )
    layers, no_layers = find_layers(config.attention, library, dtype=dtype, device=device)
    products = Products()
    if device.type == "cpu":
        kernel = None if library is None else ProductKernel(library)
        is_fast = is_fast_in_bfloat16(device)
        products = PackedProducts(is_fast_in_bfloat16=is_fast, kernel=kernel)
    has_parts = layers is not None and dtype in layers.types
    parts = KernelParts(layers, dtype) if has_parts and layers is not None else Parts()
    bodies = Bodies(parts, products, checkpoint.context_length)
    network = Transformer(architecture.model, tensors, first=part.first, bodies=bodies)
    attention, no_attention = find_attention(
        config.attention,
        library,
        checkpoint.config,
        config.block_size,
        dtype=dtype,
        device=device,
    )
    form = HiddenForm(checkpoint.config.hidden_size, dtype, device, hidden_group)
    why_slower = "; ".join(filter(None, (no_attention or no_layers, why_slow(dtype, device))))
    if group is not None:
        why_slower = next(filter(None, group.gather("why slower", why_slower)), "")
    return LoadedPart(
        *(checkpoint, part, network, dtype, device, form, library, attention, 1),  # type: ignore[arg-type]
        why_slower=why_slower,
        file_digests=digests,
    )


def count_blocks(config: EngineConfig, loaded: LoadedPart, group: Group | None = None) -> int:
    """Return the size of the KV cache in blocks, the same on every rank.

    Of an automatic budget each rank allows what its memory, which it may share with other ranks,
    has room for beside the weights; the least counts.
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
            "work": loaded.step_bytes(config),
            "most": most_kv_tokens(config, loaded.checkpoint, loaded.device),
        }
        ranks = [mine] if group is None else group.gather("memory", mine)
        budget = min(
            auto_budget(
                _total(ranks, rank, "kv_bytes_per_token"),
                rank["most"],
                rank["free"],
                _total(ranks, rank, "work"),
                rank["device"],
            )
            for rank in ranks
        )
    return -(-budget // size)


def _total(ranks: list[dict[str, Any]], rank: dict[str, Any], what: str) -> int:
    """Return the sum over the ranks that share a rank's memory."""
    return sum(each[what] for each in ranks if each["memory"] == rank["memory"])


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
        head_kernel=None if loaded.library is None else HeadKernel(loaded.library),
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


def _check_model_type(name: str | None, of_config: str) -> None:
    """Refuse a model type that is not the config's; old spellings (gptneox, gpt-j) are known."""
    plain = (name or "").replace("_", "").replace("-", "").lower()
    if name is not None and plain != of_config.replace("_", ""):
        raise UsageError(
            f"--model-type {name} clashes with the model's config, which says {of_config}; "
            "leave the flag out"
        )

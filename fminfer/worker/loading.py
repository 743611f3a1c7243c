"""Loads one rank's part of the model and builds its stage, alone or together with other ranks."""

from __future__ import annotations

import ctypes
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.kernel_choice import (
    find_attention,
    find_drawer,
    find_head,
    find_layers,
    find_library,
)
from fminfer.compute.layers.bodies import KernelParts, PartKernels, Parts
from fminfer.compute.layers.expert_kernel import ExpertKernel
from fminfer.compute.layers.experts import KernelExperts
from fminfer.compute.linear.product_kernel import ProductKernel
from fminfer.compute.linear.products import PackedProducts, Products
from fminfer.compute.sampling.head_kernel import HeadKernel
from fminfer.compute.sampling.sampler import Drawer, rank
from fminfer.compute.sampling.score_kernel import ScoreKernel
from fminfer.core.config import EngineConfig, Kernels
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part, split_layers
from fminfer.machine.device import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    free_bytes,
    is_fast_in_bfloat16,
    memory_name,
    use_device,
    why_slow,
)
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.machine.threads import ThreadCount
from fminfer.models.checkpoint import Checkpoint, open_checkpoint, open_random
from fminfer.models.fingerprint import digest_files
from fminfer.models.part_tensors import PartTensors, load_tensors
from fminfer.models.stage import Stage
from fminfer.models.tensor_shapes import head_cost
from fminfer.models.transformer import Bodies, Transformer
from fminfer.models.whole_layers import WholeLayers
from fminfer.pipeline.group import Group
from fminfer.pipeline.transport import HiddenForm
from fminfer.worker.agreement import agree, compare_weights, connect_gpus
from fminfer.worker.step_memory import auto_budget, step_bytes


@dataclass(slots=True)
class LoadedPart:
    """One rank's part of a model, in memory."""

    checkpoint: Checkpoint
    part: Part
    network: Transformer
    weight_bytes: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    form: HiddenForm
    library: ctypes.CDLL | None  # the CPU's kernels
    attention: AttentionKernel | None  # None: plain torch
    head: HeadKernel | None  # None: plain torch
    drawer: Drawer
    why_plain: str  # why a kernel that was to be used is not
    why_slower: str  # that, and why else it is slower than it could be
    threads: ThreadCount
    file_digests: dict[str, str]  # of its weight files, if others must have the same

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token's keys and values take on this rank."""
        return kv_token_bytes(self.checkpoint, self.part, self.kv_dtype)

    def step_bytes(self, config: EngineConfig) -> int:
        """What the largest step takes on this rank."""
        return step_bytes(config, self.checkpoint.model, self.dtype, self.device, self.part)


def kv_token_bytes(checkpoint: Checkpoint, part: Part, kv_dtype: torch.dtype) -> int:
    """Return what one token's keys and values take in the layers of a part."""
    shape = checkpoint.model.layers[0].attention.cache_shape
    return part.num_layers * math.prod(shape) * kv_dtype.itemsize


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
        checkpoint = open_random(config.random_init, tokenizer=config.tokenizer)
    else:
        checkpoint = open_checkpoint(
            config.model,
            has_weights=has_weights,
            model_config=config.model_config,
            tokenizer=config.tokenizer,
            revision=config.revision,
        )
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
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype)
    parts = split_model(config, checkpoint, group.world_size if group else 1)
    part = parts[group.rank if group else 0]
    hidden_group = None
    num_processes = local_size * config.num_engines
    threads = ThreadCount(
        config.threads, torch.get_num_threads(), num_processes, torch.set_num_threads
    )
    is_alone = group is None and config.num_engines == 1
    digests = {} if is_alone else digest_files(checkpoint)
    if group is not None:
        agree(group, config, checkpoint, dtype, kv_dtype, parts)
        compare_weights(group, digests)
        hidden_group = connect_gpus(group, device)
    library = find_library(config.kernels, device)
    tensors = load_tensors(
        checkpoint,
        part,
        dtype=dtype,
        device=device,
        seed=config.seed,
        keeps_bfloat16=dtype == torch.float32 and library is not None,
        on_progress=on_progress,
    )
    network, attention, head, drawer, why_plain = _build_network(
        config, checkpoint, part, tensors, library, dtype, device
    )
    form = HiddenForm(checkpoint.config.hidden_size, dtype, device, hidden_group)
    why_slower = "; ".join(filter(None, (why_plain, why_slow(dtype, device))))
    if group is not None:
        ranks = group.gather("why slower", [why_plain, why_slower])
        why_plain, why_slower = (next(filter(None, each), "") for each in zip(*ranks, strict=True))
    return LoadedPart(
        checkpoint,
        part,
        network,
        tensors.num_bytes,
        dtype,
        kv_dtype,
        device,
        form,
        library,
        attention,
        head,
        drawer,
        why_plain,
        why_slower,
        threads,
        digests,
    )


def _build_network(
    config: EngineConfig,
    checkpoint: Checkpoint,
    part: Part,
    tensors: PartTensors,
    library: ctypes.CDLL | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Transformer, AttentionKernel | None, HeadKernel | None, Drawer, str]:
    """Choose bodies, build a part of them, and say why kernels are not used."""
    layers, no_layers = find_layers(config.kernels, library, dtype=dtype, device=device)
    head, no_head = find_head(config.kernels, library, dtype)
    drawer, no_drawer = find_drawer(config.kernels, library, device)
    bodies, whole = _find_bodies(config.kernels, checkpoint, library, layers, dtype, device)
    network = Transformer(checkpoint.model, tensors, first=part.first, bodies=bodies)
    attention, no_attention = find_attention(
        config.kernels,
        library,
        checkpoint.model,
        config.block_size,
        dtype=dtype,
        kv_dtype=choose_kv_dtype(config.kv_dtype, dtype),
        device=device,
    )
    reasons = [no_attention, no_layers, no_head, no_drawer, bodies.products.why_plain]
    reasons += [each.why_plain for each in (bodies.experts, whole) if each is not None]
    why_plain = "; ".join(filter(None, reasons))
    return network, attention, head, drawer, why_plain


def _find_bodies(
    asked: Kernels,
    checkpoint: Checkpoint,
    library: ctypes.CDLL | None,
    layers: PartKernels | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Bodies, WholeLayers | None]:
    """Choose what computes the parts of layers, and what joins them."""
    products = Products()
    if device.type == "cpu":
        kernel = None if library is None else ProductKernel(library)
        is_fast = is_fast_in_bfloat16(device)
        products = PackedProducts(
            is_fast_in_bfloat16=is_fast, kernel=kernel, asked=asked, dtype=dtype
        )
    parts = Parts()
    if layers is not None:
        parts = KernelParts(layers, dtype)
    bodies = Bodies(parts, products, max(4, checkpoint.context_length))  # a trial has 4 positions
    if library is not None and isinstance(parts, KernelParts):
        kernels = ExpertKernel(library), ProductKernel(library)
        bodies.experts = KernelExperts(*kernels, dtype, asked)
        whole = WholeLayers(library, dtype, asked)
        bodies.join = whole.join
        return bodies, whole
    return bodies, None


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
        raise _no_cache(num_tokens, size, loaded.kv_dtype, loaded.device) from error


def require_cache(
    config: EngineConfig, checkpoint: Checkpoint, part: Part, dtype: torch.dtype
) -> None:
    """Refuse a --budget for which the CPU's system gives no memory, before weights are read.

    It asks for that memory and gives it back. Nothing touches it, so that this costs no time.

    Raises:
        UsageError: there is no memory for it.
    """
    if config.budget is None:
        return
    num_tokens = -(-config.budget // config.block_size) * config.block_size
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype)
    size = num_tokens * kv_token_bytes(checkpoint, part, kv_dtype)
    cpu = torch.device("cpu")
    try:
        torch.empty(size, dtype=torch.uint8, device=cpu)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _no_cache(num_tokens, size, kv_dtype, cpu) from error


def _no_cache(
    num_tokens: int, size: int, kv_dtype: torch.dtype, device: torch.device
) -> UsageError:
    """Return the error of a KV cache for which there is no memory."""
    narrower = ", or --kv-dtype bfloat16" * (kv_dtype == torch.float32)
    return UsageError(
        f"a KV cache of {num_tokens} tokens takes {size / 2**30:.1f} GiB beside the weights, "
        f"and {free_bytes(device) / 2**30:.1f} GiB are free; give a smaller --budget{narrower}"
    )


def _build_stage(config: EngineConfig, loaded: LoadedPart, num_blocks: int) -> Stage:
    return Stage(
        loaded.network,
        kv_dtype=loaded.kv_dtype,
        device=loaded.device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        kernel=loaded.attention,
        ranker=rank if loaded.library is None else ScoreKernel(loaded.library),
        drawer=loaded.drawer,
        head_kernel=loaded.head,
        threads=loaded.threads,
    )


def split_model(config: EngineConfig, checkpoint: Checkpoint, num_stages: int) -> list[Part]:
    """Return each stage's layers.

    Raises:
        UsageError: a split that cannot be.
    """
    cost = 0.0
    if num_stages > 1 and config.num_layers is None and config.stage_layers is None:
        cost = head_cost(checkpoint.model)
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

"""Loads one rank's part of a model, and chooses what computes it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.kernel_choice import (
    find_attention,
    find_drawer,
    find_head,
    find_layers,
    find_library,
    find_ranker,
)
from fminfer.compute.layers.bodies import KernelParts, PartKernels, Parts
from fminfer.compute.layers.expert_kernel import ExpertKernel
from fminfer.compute.layers.experts import KernelExperts
from fminfer.compute.linear.product_kernel import ProductKernel
from fminfer.compute.linear.products import PackedProducts, Products
from fminfer.compute.sampling.head_kernel import HeadKernel
from fminfer.compute.sampling.sampler import Drawer, Ranker
from fminfer.core.config import EngineConfig, Kernels
from fminfer.core.errors import PipelineError
from fminfer.core.partition import Part
from fminfer.core.version import __version__
from fminfer.machine.device import (
    choose_dtype,
    choose_kv_dtype,
    is_fast_in_bfloat16,
    memory_name,
    own_device,
    use_device,
    why_slow,
)
from fminfer.machine.threads import ThreadCount
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.fingerprint import digest_files, name_differences
from fminfer.models.layer_bodies import Bodies
from fminfer.models.part_tensors import PartTensors, load_tensors
from fminfer.models.transformer import Transformer
from fminfer.models.whole_layers import WholeLayers
from fminfer.pipeline.group import Group
from fminfer.pipeline.transport import HiddenForm
from fminfer.worker.kv_size import kv_token_bytes
from fminfer.worker.opening import split_model
from fminfer.worker.step_memory import step_bytes


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
    ranker: Ranker
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
    device = own_device(config, local_rank, local_size)
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
    network, attention, head, (drawer, ranker), why_plain = _build_network(
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
        ranker,
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
) -> tuple[Transformer, AttentionKernel | None, HeadKernel | None, tuple[Drawer, Ranker], str]:
    """Choose bodies, build a part of them, and say why kernels are not used."""
    layers, no_layers = find_layers(config.kernels, library, dtype=dtype, device=device)
    head, no_head = find_head(config.kernels, library, dtype)
    drawer, no_drawer = find_drawer(config.kernels, library, device)
    ranker, no_ranker = find_ranker(config.kernels, library)
    bodies, whole = _find_bodies(config.kernels, checkpoint, library, layers, dtype, device)
    join = None if whole is None else whole.join
    network = Transformer(checkpoint.model, tensors, first=part.first, bodies=bodies, join=join)
    attention, no_attention = find_attention(
        config.kernels,
        library,
        checkpoint.model,
        config.block_size,
        dtype=dtype,
        kv_dtype=choose_kv_dtype(config.kv_dtype, dtype),
        device=device,
    )
    reasons = [no_attention, no_layers, no_head, no_drawer, no_ranker, bodies.products.why_plain]
    reasons += [each.why_plain for each in (bodies.experts, whole) if each is not None]
    why_plain = "; ".join(filter(None, reasons))
    return network, attention, head, (drawer, ranker), why_plain


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
        return bodies, WholeLayers(library, dtype, asked)
    return bodies, None

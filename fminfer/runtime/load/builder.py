"""Builds what one rank computes with: plan, meet, weights, kernels, KV cache, stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed import ProcessGroup

from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.sampling.sharded import TokenShard
from fminfer.core.partition import Part
from fminfer.forward.decode_graphs import choose_graphs
from fminfer.forward.layer_step import PartBuilder
from fminfer.forward.layer_stream import StreamKind
from fminfer.forward.registry import open_registry
from fminfer.forward.stage import Stage, StageKernels
from fminfer.forward.transformer import Transformer
from fminfer.forward.whole_layers import WholeLayers
from fminfer.machine.device import measure_free_bytes, measure_peak_memory, use_device
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.machine.threads import ThreadCount
from fminfer.models.fingerprint import digest_weight_files
from fminfer.models.layer_source import LayerSource, OnProgress, open_weights
from fminfer.pipeline.group import Group, check_agreement
from fminfer.pipeline.ranks import ALONE, Spread
from fminfer.pipeline.shard_group import connect_shards
from fminfer.pipeline.wire import LinkSpec
from fminfer.plan.run_plan import RunPlan, Streamed
from fminfer.plan.same_answers import require_same_answers
from fminfer.plan.shortage import cache_error
from fminfer.plan.slowness import find_slowness
from fminfer.runtime.load.agreement import (
    agree_step_size,
    compare_weights,
    connect_gpus,
    count_blocks,
    gather,
    settle_plan,
    update_plan,
)


@dataclass(slots=True, frozen=True)
class Caveats:
    """Why a pipeline is not what it could be; "": it is."""

    plain: str  # why a kernel that was to be used is not
    slower: str  # why it is slower: that, and other reasons
    dependent: str  # why answers may depend on other rows


@dataclass(slots=True, frozen=True)
class LoadedPart:
    """One rank's part of a model, in memory."""

    plan: RunPlan
    network: Transformer
    kernels: StageKernels
    form: LinkSpec
    why_plain: str  # why a kernel that was to be used is not; "": all are
    why_dependent: str  # why answers may depend on other rows; "": they do not
    file_digests: dict[str, str]  # of its weight files, if others must have the same

    @property
    def part(self) -> Part:
        """This rank's layers."""
        return self.plan.this_rank.part

    @property
    def device(self) -> torch.device:
        return self.plan.device


def load_part(
    plan: RunPlan,
    group: Group | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> LoadedPart:
    """Load this rank's layers; without a group this process alone runs the model."""
    config = plan.config
    part = plan.this_rank.part
    share = plan.this_rank.share
    use_device(plan.device)
    threads = _count_threads(plan, group)
    digests, hidden_group = _compare_ranks(plan, group)

    registry = open_registry(config.kernels, plan.dtype, plan.device)
    require_same_answers(config, registry.why_dependent)  # their build failed
    if registry.library is None and plan.packed_by == "kernels":  # their build failed
        plan = update_plan(plan)
    shards = None
    if group is not None:
        shards = connect_shards(group, part, plan.device, registry.library)

    model = plan.checkpoint.model if share is None else share.model
    attentions = [layer.attention for layer in model.layers]
    kernels = StageKernels(
        attention=registry.choose_attention(
            attentions, config.block_size, plan.kv_dtype
        ),
        drawer=registry.choose_drawer(),
        ranker=registry.choose_ranker(),
        threads=threads,
    )
    network = Transformer(
        model,
        _open_source(plan, on_progress),
        # a trial has 4 positions
        builder=PartBuilder(registry, max(4, plan.checkpoint.context_length)),
        join=WholeLayers(registry).join_layer,
        shards=shards,
        tokens=None if share is None else share.tokens[part.shard],
        streams=_stream_kind(plan.this_rank.streamed),
    )
    why_dependent = plan.dependence or registry.why_dependent
    require_same_answers(config, why_dependent)
    return LoadedPart(
        plan=plan,
        network=network,
        kernels=kernels,
        form=LinkSpec(
            plan.checkpoint.model.hidden_size, plan.dtype, plan.device, hidden_group
        ),
        why_plain=registry.why_plain,
        why_dependent=why_dependent,
        file_digests=digests,
    )


def _count_threads(plan: RunPlan, group: Group | None) -> ThreadCount:
    """Return how many threads this process has, which shares its machine with others."""
    num_ranks = 1 if group is None else group.local_size
    return ThreadCount(
        plan.config.threads,
        torch.get_num_threads(),
        num_ranks * plan.machine.num_engines,
        torch.set_num_threads,
    )


def _compare_ranks(
    plan: RunPlan, group: Group | None
) -> tuple[dict[str, str], ProcessGroup | None]:
    """Check that all ranks have the same options and weights.

    Returns:
        digests of the weights' files, if others must have the same; and NCCL's group, if
        hidden states travel by it.
    """
    is_alone = group is None and plan.machine.num_engines == 1
    digests = {} if is_alone else digest_weight_files(plan.checkpoint)
    if group is None:
        return digests, None
    check_agreement(group, "options", plan.shared)
    compare_weights(group, digests)
    if plan.this_rank.part.num_shards > 1:  # one thread alone calls NCCL, for sums
        return digests, None
    return digests, connect_gpus(group, plan.device)


def _open_source(plan: RunPlan, on_progress: OnProgress) -> LayerSource:
    """Return where this rank's weights come from."""
    streamed = plan.this_rank.streamed
    return open_weights(
        plan.checkpoint,
        plan.this_rank.part,
        holding=plan.holding,
        device=plan.device,
        seed=plan.config.seed,
        share=plan.this_rank.share,
        on_progress=on_progress,
        streamed=() if streamed is None else streamed.numbers,
        keeps_parts=plan.packed_by == "kernels",
    )


def _stream_kind(streamed: Streamed | None) -> StreamKind:
    if streamed is None or streamed.place == "disk":
        return "disk"
    return "shared memory" if streamed.is_shared else "own memory"


def _find_caveats(loaded: LoadedPart, stage: Stage, group: Group | None) -> Caveats:
    """Return a pipeline's caveats; of several ranks the first that has a reason says it."""
    not_captured = "" if stage.graphs is None else stage.graphs.why_not
    plain = "; ".join(filter(None, (loaded.why_plain, not_captured)))
    slower = "; ".join(filter(None, (*find_slowness(loaded.plan), plain)))
    ranks = gather(group, "caveats", [plain, slower, loaded.why_dependent])
    return Caveats(*(next(filter(None, each), "") for each in zip(*ranks, strict=True)))


def build_stage(loaded: LoadedPart) -> Stage:
    """Give a loaded part the KV cache of its plan."""
    try:
        stage = make_stage(loaded)
        if loaded.device.type == "cuda":
            stage.warm_up()
        return stage
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        plan = loaded.plan
        raise cache_error(
            plan, plan.num_kv_tokens, measure_free_bytes(loaded.device)
        ) from error


def make_stage(loaded: LoadedPart) -> Stage:
    """Make the stage of a loaded part, and its KV cache."""
    plan = loaded.plan
    network = loaded.network
    share = plan.this_rank.share
    tokens = None
    graphs = None
    if share is not None and network.shards is not None:
        whole = plan.checkpoint.model.vocab_size
        tokens = TokenShard(whole, share.tokens, network.shards)
    elif not (network.stream or plan.has_blocks):
        # CUDA graphs cannot hold sums yet, and need weights that stay in place.
        graphs = choose_graphs(
            plan.config.kernels,
            network,
            loaded.kernels.attention,
            plan.sizes.max_decode_rows,
            loaded.device,
        )
    cache = KvCache(
        [layer.attention for layer in network.layer_specs],
        num_blocks=plan.num_kv_tokens // plan.config.block_size,
        block_size=plan.config.block_size,
        dtype=plan.kv_dtype,
        device=loaded.device,
        kernel=loaded.kernels.attention,
    )
    return Stage(network, cache, replace(loaded.kernels, graphs=graphs), tokens)


def build(
    plan: RunPlan,
    group: Group | None = None,
    spread: Spread = ALONE,
    *,
    on_progress: OnProgress = lambda done, total: None,
    on_loaded: Callable[[dict[str, str]], None] = lambda digests: None,
) -> tuple[LoadedPart, Stage, Caveats]:
    """Settle the plan, load this rank's layers, and make the stage that computes.

    Args:
        on_loaded: told digests of the weights' files, if others must have the same, before there
            is a KV cache.
    """
    plan = settle_plan(plan, group, spread)
    if group is not None:
        group.watch.measure = partial(measure_peak_memory, plan.device)
    loaded = load_part(plan, group, on_progress)
    on_loaded(loaded.file_digests)
    num_tokens = count_blocks(loaded.plan, group) * plan.config.block_size
    size = agree_step_size(loaded.plan, group)
    loaded = replace(
        loaded, plan=replace(loaded.plan, num_kv_tokens=num_tokens, chunk_size=size)
    )
    stage = build_stage(loaded)
    return loaded, stage, _find_caveats(loaded, stage, group)

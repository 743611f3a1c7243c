"""Predicts the time of steps from a run's plan and its machine's roofs: a pure function.

A step takes as long as the slowest of what goes on at once: a device reads weights and keys, it
multiplies, layers are streamed, and the host launches kernels. Sums over ranks, sending, and the
host's own work come on top. No figure was measured on several GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.own_rows import find_unpacking
from fminfer.compute.values.spec import Moe
from fminfer.compute.values.weights import DEQUANTIZED_AT_ONCE, TensorSpec
from fminfer.forward.decode_graphs import can_capture
from fminfer.models.tensor_specs import (
    exit_specs,
    layer_specs,
    model_specs,
    without_tied_tensors,
)
from fminfer.pipeline.local import STEP_LIMIT_S
from fminfer.plan.expected_bytes import layer_bytes
from fminfer.plan.roofs import Roofs
from fminfer.plan.run_plan import RankPlan, RunPlan
from fminfer.plan.streaming import describe_streaming, find_conversion

# What kernels reach of published figures, what the host adds, and what a layer's launches take
# without a CUDA graph: from an H200's steps of an 8B and a 1B (docs/performance.md, On a GPU).
MEMORY_SHARE = 0.7
ARITHMETIC_SHARE = 0.65
LINK_SHARE = 0.8
HOST_STEP_S = 1e-3
HOST_ROW_S = 40e-6
LAUNCH_S = 0.7e-3
# Stored bytes, in 16 bits, that a core quantizes a second: a Zen 3 beside other work.
QUANTIZING_RATES = {"int8": 0.2e9, "int4": 0.1e9}
# The slowest machine that works. A step that takes longer there is counted as hanging.
LEAST_RATES = {"cpu": 10e9, "cuda": 1e12}  # operations a second
LEAST_DISK_RATE = 20e6  # bytes a second
KERNEL_S = 10e-6  # to launch a kernel from plain torch: not measured
EXPERT_KERNELS = 10  # for each expert: 0.1 ms, which is estimated
SUM_S = 30e-6  # latency of a sum over ranks, or of sending: not measured
GLOO_RATE = 2e9  # bytes a second: estimated
START_S = 10.0  # of a process: imports, tokenizer, kernels' trials


@dataclass(slots=True, frozen=True)
class StepLoad:
    """What a step computes: one step, or the average of many."""

    num_tokens: float
    num_rows: float  # of one token
    num_keys_read: float  # those of a row once for all its tokens
    num_keys_seen: float  # by each token
    num_logits: float


@dataclass(slots=True)
class RankWork:
    """What one rank does in a pass: bytes that it reads, and operations."""

    num_layers: int
    kv_token: int
    head_bytes: float  # if there are logits
    logit_operations: float
    streamed_bytes: int
    place: str  # where streamed layers come from
    quantized_bytes: int = 0  # of them, what is quantized in each pass, as it is stored
    weight_bytes: float = 0.0  # of every pass
    # of all experts; a pass reads those that its tokens choose
    expert_bytes: float = 0.0
    chosen_bytes: float = 0.0  # of the experts that one token chooses
    kernels: float = 0.0  # that make floats of blocks, in every pass
    expert_kernels: float = 0.0  # of all experts, like `expert_bytes`
    token_operations: float = 0.0
    key_operations: float = 0.0


def _count_unpacking(
    plan: RunPlan, specs: Mapping[str, TensorSpec]
) -> tuple[int, float]:
    """Return the kernels that make floats of a layer's blocks on a GPU, and the bytes they move.

    They run at each use. All matrices are counted in the most frequent format.
    """
    if not plan.has_blocks:
        return 0, 0.0
    first, *_ = plan.formats["product"].name.split(" + ")
    kernels, moved_bytes = find_unpacking(first)
    matrices = [spec for spec in specs.values() if spec.use == "product"]
    num_pieces = sum(
        math.prod(spec.shape[:-2])  # of experts each
        * math.ceil(math.prod(spec.shape[-2:]) / DEQUANTIZED_AT_ONCE["cuda"])
        for spec in matrices
    )
    return kernels * num_pieces, moved_bytes * sum(spec.size for spec in matrices)


def measure_rank(plan: RunPlan, rank: RankPlan) -> RankWork:
    """Count what a rank does in a pass."""
    model = plan.checkpoint.model
    share = rank.share
    streamed = rank.streamed
    model_here = model if share is None else share.model
    head = exit_specs(model).get("head.weight")
    head_size = (
        head.size / plan.machine.num_shards if head and rank.part.is_last else 0.0
    )
    work = RankWork(
        num_layers=rank.part.num_layers,
        kv_token=rank.takes.kv_token,
        head_bytes=head_size * plan.formats["head"].num_bytes((1, 1024)) / 1024,
        logit_operations=2 * head_size,
        streamed_bytes=0 if streamed is None else streamed.num_bytes,
        place="" if streamed is None else streamed.place,
    )
    if streamed and plan.config.quantized_to and find_conversion(plan, streamed):
        work.quantized_bytes = streamed.num_bytes
    for number in rank.part.layer_numbers:
        layer = model_here.layers[number]
        specs = layer_specs(layer, model.hidden_size)
        experts = sum(
            spec.size for name, spec in specs.items() if name.startswith("experts.")
        )
        numbers = sum(spec.size for spec in specs.values())
        kernels, moved_bytes = _count_unpacking(plan, specs)
        num_experts = layer.mlp.num_experts if isinstance(layer.mlp, Moe) else 0
        work.kernels += kernels * (1 - experts / numbers)
        work.expert_kernels += (
            kernels * experts / numbers + EXPERT_KERNELS * num_experts
        )
        size = layer_bytes(plan, share, number).held + moved_bytes
        chosen = (
            layer.mlp.top_k / layer.mlp.num_experts
            if isinstance(layer.mlp, Moe)
            else 1.0
        )
        of_experts = size * experts / numbers
        work.weight_bytes += size - of_experts
        work.expert_bytes += of_experts
        work.chosen_bytes += of_experts * chosen
        work.token_operations += 2.0 * (numbers - experts * (1 - chosen))
        work.key_operations += 4.0 * layer.attention.heads * layer.attention.head_dim
    return work


def time_step(
    plan: RunPlan, work: RankWork, load: StepLoad, roofs: Roofs
) -> dict[str, float]:
    """Return the seconds of what may bound a step; all but the last two go on at once."""
    on_gpu = plan.device.type == "cuda"
    num = _node_ranks(plan, roofs)
    if _has_turns(plan):
        num = max(1, num // plan.machine.num_stages)
    sharers = 1 if on_gpu else num  # of memory and cores
    unread = (1 - work.chosen_bytes / max(1.0, work.expert_bytes)) ** load.num_tokens
    num_bytes = (
        work.weight_bytes
        + work.expert_bytes * (1 - unread)
        + work.kv_token * load.num_keys_read
        + work.head_bytes * (load.num_logits > 0)
    )
    operations = (
        work.token_operations * load.num_tokens
        + work.key_operations * load.num_keys_seen
        + work.logit_operations * load.num_logits
    )
    has_graph = (
        (plan.may_capture and not work.place)
        and load.num_tokens <= load.num_rows
        and can_capture(plan.checkpoint.model.layers)
    )
    kernels = work.kernels + work.expert_kernels * (1 - unread)
    launches_s = 0.0 if has_graph else work.num_layers * LAUNCH_S + kernels * KERNEL_S
    rate = (
        roofs.disk_rate / num if work.place == "disk" else roofs.host_rate * LINK_SHARE
    )
    arithmetic_s = operations * sharers / (roofs.arithmetic_rate * ARITHMETIC_SHARE)
    quantizing_s = work.quantized_bytes * num / _quantizing_rate(plan, roofs)
    if quantizing_s and not on_gpu:
        quantizing_s += arithmetic_s  # on the same cores
    return {
        "memory": num_bytes * sharers / (roofs.memory_rate * MEMORY_SHARE),
        "arithmetic": arithmetic_s,
        "quantizing": quantizing_s,
        "host memory" if work.place == "cpu" else "disk": work.streamed_bytes / rate,
        "launches": launches_s if on_gpu else 0.0,
        "other ranks": _between_ranks(plan, load, roofs),
        "host": HOST_STEP_S + HOST_ROW_S * load.num_rows,
    }


def _node_ranks(plan: RunPlan, roofs: Roofs) -> int:
    """Return how many ranks a node has, of all pipelines."""
    return min(roofs.num_devices, len(plan.ranks) * plan.machine.num_pipelines)


def _has_turns(plan: RunPlan) -> bool:
    """Tell whether one stage of a pipeline computes at a time."""
    num_steps = plan.config.micro_batches or plan.sizes.micro_batches
    return plan.machine.num_stages > 1 and num_steps == 1


def _quantizing_rate(plan: RunPlan, roofs: Roofs) -> float:
    """Return how many bytes of stored weights all cores of a node quantize a second."""
    return roofs.num_cores * QUANTIZING_RATES.get(plan.config.quantized_to, math.inf)


def _between_ranks(plan: RunPlan, load: StepLoad, roofs: Roofs) -> float:
    """Return the seconds of a step's sums over a stage's ranks, two a layer, and of sending."""
    stages = plan.machine.num_stages
    shards = plan.machine.num_shards
    size = (
        load.num_tokens
        * plan.checkpoint.model.hidden_size
        * plan.dtype.itemsize
        / LINK_SHARE
    )
    num_sums = 2 * len(plan.checkpoint.model.layers) / stages * (shards > 1)
    seconds = num_sums * (SUM_S + 2 * (shards - 1) / shards * size / roofs.link_rate)
    is_near = len(plan.ranks) <= roofs.num_devices
    rate = roofs.link_rate if is_near else roofs.network_rate
    if shards > 1:  # hidden states go through the host (gloo)
        rate = min(rate, GLOO_RATE)
    return seconds + (SUM_S + size / rate) * (stages > 1)


def predict_run(
    plan: RunPlan,
    loads: Sequence[tuple[StepLoad, float]],
    num_rows: float,
    roofs: Roofs,
) -> tuple[float, str]:
    """Predict the seconds of one pipeline's steps, some of each kind, and what bounds
    most of them.

    Stages compute different steps at once, or take turns at one step. With fewer rows
    than stages, some of them wait.
    """
    works = [measure_rank(plan, rank) for rank in plan.ranks if rank.part.shard == 0]
    num_stages = plan.machine.num_stages
    bounds = Counter[str]()
    for load, count in loads:
        steps = []
        for work in works:
            seconds = time_step(plan, work, load, roofs)
            *together, between, host = seconds.values()
            step = max(host, max(together) + between + host * (num_stages == 1))
            steps.append((step, max(seconds, key=seconds.__getitem__)))
        slowest, bound = max(steps)
        step = sum(each for each, _ in steps) if _has_turns(plan) else slowest
        bounds[bound] += step * count  # type: ignore[assignment]  # of floats
    at_once = 1 if _has_turns(plan) else num_stages
    waits = at_once / min(at_once, max(1.0, num_rows))
    return sum(bounds.values()) * waits, max(bounds, key=bounds.__getitem__, default="")


def limit_step(plan: RunPlan) -> float:
    """Return the seconds without a result after which a step counts as hanging.

    Half an hour, plus the largest step's arithmetic, plus reading all weights if a step may.
    """
    size = plan.sizes.chunk_size
    if plan.checkpoint.model.encoder is not None:  # an encoder reads whole prompts
        size = max(size, plan.checkpoint.context_length)
    num_weights = sum(spec.size for spec in model_specs(plan.checkpoint.model).values())
    seconds = STEP_LIMIT_S + 2.0 * num_weights * size / LEAST_RATES[plan.device.type]
    if plan.device.type == "cpu" or any(rank.streamed for rank in plan.ranks):
        seconds += 4 * num_weights / LEAST_DISK_RATE  # float32
    return seconds


def predict_load(plan: RunPlan, roofs: Roofs) -> float:
    """Predict the seconds until a run is ready: each node reads weights, and quantizes them."""
    is_tied = plan.checkpoint.config.tie_word_embeddings
    specs = without_tied_tensors(model_specs(plan.checkpoint.model), is_tied=is_tied)
    forms = {name: plan.stored.get(name, Dense(plan.dtype)) for name in specs}
    sizes = {name: form.num_bytes(specs[name].shape) for name, form in forms.items()}
    made = sum(
        size
        for name, size in sizes.items()
        if plan.made[name].floats is None and forms[name].floats is not None
    )
    streamed = [rank.streamed for rank in plan.ranks if rank.streamed]
    later = {n for each in streamed if each.place == "disk" for n in each.numbers}
    size = sum(sizes.values()) - sum(layer_bytes(plan, None, n).whole for n in later)
    # the rest is elsewhere
    on_node = size * min(1.0, roofs.num_devices / len(plan.ranks))
    pipelines = max(1, _node_ranks(plan, roofs) // len(plan.ranks))
    # the system's cache has it for others
    copies = 1 if on_node < roofs.host_bytes else pipelines
    quantized = on_node * pipelines * made / sum(sizes.values())
    to_device = size / len(plan.ranks) / (roofs.host_rate * LINK_SHARE)
    quantizing_s = quantized / _quantizing_rate(plan, roofs)
    return START_S + max(on_node * copies / roofs.disk_rate, to_device, quantizing_s)


def describe_passes(plan: RunPlan, roofs: Roofs | None) -> list[str]:
    """Describe a full pass with streamed layers: tokens, and by roofs its time and its bound."""
    passes = [describe_streaming(plan)]
    if not passes[0]:
        return [] if plan.config.offload == "off" else ["all layers stay in memory"]
    if roofs is not None:
        size = plan.sizes.chunk_size
        load = StepLoad(size, size, 0, 0, plan.sizes.max_rows)
        seconds, bound = predict_run(plan, [(load, 1.0)], math.inf, roofs)
        rate = f"{size / seconds:,.0f} tokens/s at most"
        passes.append(
            f"predicted: {seconds:.3g} s a full pass, {rate}; bound by {bound}"
        )
    return passes

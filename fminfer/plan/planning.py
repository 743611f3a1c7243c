"""Makes the plan of a run: every decision of device, dtypes, formats and split is taken here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.joined import join_formats
from fminfer.compute.layers.products import is_kernel_faster
from fminfer.compute.values.spec import Model
from fminfer.compute.values.weights import USES, Format, Use
from fminfer.core.config import BITS, EngineConfig, ModelDType
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part, split_evenly, split_layers
from fminfer.models.arrivals import find_arrivals
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.holding import Holding
from fminfer.models.origins import Parts, find_stored_model
from fminfer.models.sharding import ModelShard, shard_model
from fminfer.models.tensor_specs import TensorSpecs, head_cost, model_specs
from fminfer.plan.expected_bytes import expect_bytes
from fminfer.plan.machine_facts import (
    Machine,
    choose_device,
    find_machine,
    find_sharers,
)
from fminfer.plan.run_plan import RankPlan, RunPlan, name_of
from fminfer.plan.same_answers import explain_dependence, require_same_answers
from fminfer.plan.shortage import count_kv_tokens, explain_slowness, find_shortage
from fminfer.plan.streaming import plan_streams

LEAST_KV_TOKENS = 16 << 10  # KV cache that must fit beside weights as floats


def make_plan(
    config: EngineConfig, checkpoint: Checkpoint, machine: Machine
) -> RunPlan:
    """Plan a run. The same arguments give the same plan; the checkpoint's headers are read.

    Raises:
        UsageError: layers that cannot be split so, or no such device.
    """
    device = choose_device(config, machine, machine.rank)
    dtype = choose_dtype(
        config.dtype, checkpoint.config.dtype, device.type, machine.is_fast_in_bfloat16
    )
    has_kernels = (
        device.type == "cpu" and machine.has_library and config.kernels != "off"
    )
    holding = Holding(
        dtype, has_kernels and dtype == torch.float32, config.quantized_to
    )
    stored_model = find_stored_model(checkpoint)
    stored = stored_model.list_formats() if stored_model else {}
    specs = model_specs(checkpoint.model)
    held = _choose_formats(holding, specs, stored)
    plain = replace(holding, quantized="")
    if holding.quantized and held == _choose_formats(plain, specs, stored):
        kinds = ", ".join(sorted({each.name for each in held.values()}))
        flag = "--quantize" if config.quantize else "--dtype"
        raise UsageError(
            f"{flag} {holding.quantized} changes no weight of {checkpoint.name}, which "
            f"has {kinds}: they are quantized already, or rows do not divide by 32. "
            "Leave the flag out"
        )
    formats = _find_commonest_formats(specs, held, dtype)
    plan = RunPlan(
        config,
        checkpoint,
        machine,
        device=device,
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else _dtype_of(config.kv_dtype),
        holding=holding,
        stored={name: join_formats(parts) for name, parts in stored.items() if parts},
        arrivals=find_arrivals(stored_model, held),
        made=held,
        held=held,
        formats=formats,
        has_kernels=has_kernels,
        has_blocks=_makes_floats(device, held),
        packed_by=choose_packer(
            machine, dtype, formats["product"], has_kernels=has_kernels
        ),
    )
    plan = replace(plan, dependence=explain_dependence(plan))
    require_same_answers(config, plan.dependence)
    planned = _plan_ranks(plan)
    if planned.has_blocks and not any(rank.streamed for rank in planned.ranks):
        widened = _plan_ranks(_hold_floats(plan))
        if _has_room(widened):
            return widened
    return planned


def _choose_formats(
    holding: Holding, specs: TensorSpecs, stored: Mapping[str, Parts]
) -> dict[str, Format]:
    """Return the format in which each tensor is held, by the formats that it is stored in."""
    return {
        name: holding.choose_format(spec, stored.get(name, ()))
        for name, spec in specs.items()
    }


def _plan_ranks(plan: RunPlan) -> RunPlan:
    """Plan what each rank has and takes, and how much KV cache there is."""
    checkpoint = plan.checkpoint
    machine = plan.machine
    # Shards are whole blocks, also on ranks that will hold floats.
    shares = share_among(checkpoint.model, machine.num_shards, plan.made)
    ranks = [
        RankPlan(part.rank, part, share, takes=expect_bytes(plan, part, share))
        for stage in split_model(plan.config, checkpoint, machine.num_stages)
        for part, share in zip(
            replace(stage, num_shards=len(shares)).shards, shares, strict=True
        )
    ]
    plan = plan_streams(replace(plan, ranks=tuple(ranks)))
    if machine.free is None and machine.device_bytes is None:
        return plan
    shortage = find_shortage(plan)
    return replace(
        plan,
        shortage=shortage,
        num_kv_tokens=0 if shortage else count_kv_tokens(plan),
        why_reread=explain_slowness(plan),
    )


def _makes_floats(device: torch.device, held: Mapping[str, Format]) -> bool:
    """Tell whether a device would make floats of blocks at each product."""
    multiplied = (each for name, each in held.items() if name != "embed.weight")
    return device.type == "cuda" and not all(
        each.floats is not None for each in multiplied
    )


def _hold_floats(plan: RunPlan) -> RunPlan:
    """Return the plan with floats in place of blocks, except in an untied embedding."""
    is_tied = plan.checkpoint.config.tie_word_embeddings
    holding = replace(plan.holding, floats=USES if is_tied else ("product", "head"))
    specs = model_specs(plan.checkpoint.model)
    held = {
        name: holding.choose_held_format(plan.made[name], spec)
        for name, spec in specs.items()
    }
    formats = _find_commonest_formats(specs, held, plan.dtype)
    return replace(
        plan,
        holding=holding,
        held=held,
        formats=formats,
        has_blocks=False,
        made_in=plan.held_in,
    )


def _has_room(plan: RunPlan) -> bool:
    """Tell whether each rank's device has room for its weights and for the KV cache.

    The KV cache has --budget tokens, or else the longest row, and at least LEAST_KV_TOKENS.
    """
    sharers = (
        [0] if plan.machine.device_bytes else find_sharers(plan.config, plan.machine)
    )
    longest = min(
        plan.most_kv_tokens, max(LEAST_KV_TOKENS, plan.checkpoint.context_length)
    )
    needed = max(takes.total(plan.config.budget or longest) for takes in plan.takes)
    # room_bytes is 0 if it is not known
    fits = needed * len(sharers) <= plan.room_bytes
    return fits and not any(rank.streamed for rank in plan.ranks)


def share_among(
    model: Model, num_shards: int, held: Mapping[str, Format]
) -> list[ModelShard | None]:
    """Return what each rank of a stage has of a model; None: all. Errors are `shard_model`'s."""
    if num_shards == 1:
        return [None]
    sizes = {"out": 1, "down": 1}
    for name, each in held.items():
        if (module := name.split(".")[-2]) in sizes:
            sizes[module] = max(sizes[module], each.cut_unit)
    return [shard_model(model, n, num_shards, sizes) for n in range(num_shards)]


def _find_commonest_formats(
    specs: TensorSpecs, held: Mapping[str, Format], dtype: torch.dtype
) -> dict[Use, Format]:
    """Return the format of most numbers of each use; floats where there are none."""
    sizes: dict[Use, Counter[Format]] = {use: Counter() for use in USES}
    for name, spec in specs.items():
        sizes[spec.use][held[name]] += spec.size
    return {
        use: max(counts, key=counts.__getitem__, default=Dense(dtype))
        for use, counts in sizes.items()
    }


def plan_ahead(
    config: EngineConfig,
    checkpoint: Checkpoint,
    place: Machine | None = None,
    *,
    is_computing: bool = False,
) -> RunPlan:
    """Plan a run on this machine that this process may not compute itself.

    Args:
        place: how the run is spread, and this process's place in it; None: it has one stage.
        is_computing: this process computes; it may ask for its GPU's memory.
    """
    num_shards = config.tensor_parallel_size
    place = place or Machine(num_shards=num_shards, local_size=num_shards)
    machine = find_machine(config, place, is_computing=is_computing)
    return make_plan(config, checkpoint, machine)


def choose_dtype(
    name: ModelDType,
    stored: torch.dtype | None,
    device_type: str,
    is_fast_in_bfloat16: bool,
) -> torch.dtype:
    """Return the dtype of the arithmetic.

    `auto` is bfloat16 where the device is fast in it; otherwise the checkpoint's stored,
    but float32 on a CPU, where 16-bit types are then slower and coarser. GPUs are as
    fast in float16.
    """
    if name not in ("auto", *BITS):
        return _dtype_of(name)
    if device_type == "cuda" and stored == torch.float16:
        return torch.float16
    if is_fast_in_bfloat16:
        return torch.bfloat16
    return stored or torch.float32 if device_type == "cuda" else torch.float32


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_packer(
    machine: Machine, dtype: torch.dtype, held: Format, *, has_kernels: bool
) -> Literal["kernels", "torch", ""]:
    """Return who packs the weights of products: the kernels, torch's libraries, or nobody."""
    if has_kernels and is_kernel_faster(held, dtype):
        return "kernels"
    return (
        "torch"
        if held == Dense(dtype) and name_of(dtype) in machine.packed_by_torch
        else ""
    )


def split_model(
    config: EngineConfig, checkpoint: Checkpoint, num_stages: int
) -> list[Part]:
    """Return each stage's layers. Errors are those of `split_layers`."""
    model = checkpoint.model
    is_balanced = config.num_layers is None and config.stage_layers is None
    cost = head_cost(model) if num_stages > 1 and is_balanced else 0.0
    num_cached = model.num_cached_layers
    num_all = len(model.layers)
    parts = split_layers(
        num_cached or num_all,
        num_stages,
        head_cost=cost,
        each=config.num_layers,
        most=config.max_layers,
        counts=config.stage_layers,
    )
    if not num_cached:  # all of them are the encoder's
        return [
            replace(p, first=0, last=0, encoder=range(p.first, p.last)) for p in parts
        ]
    # From the end: the last stage has some of them, and with them the final norm.
    encoder = reversed(split_evenly(num_all - num_cached, num_stages))
    return [
        replace(part, encoder=range(num_all - layers.stop, num_all - layers.start))
        for part, layers in zip(parts, encoder, strict=True)
    ]

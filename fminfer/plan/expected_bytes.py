"""How much memory each process of a run takes, from the model's spec and its files' headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fminfer.compute.formats.dense import Dense
from fminfer.compute.layers.products import can_sum_in_float32, is_kernel_faster
from fminfer.compute.values.spec import Mlp, Model, Moe
from fminfer.compute.values.weights import (
    DEQUANTIZED_AT_ONCE,
    DEQUANTIZED_BYTES,
    Format,
)
from fminfer.core.partition import Part
from fminfer.forward.decode_graphs import (
    can_capture,
    choose_graph_sizes,
    count_input_bytes,
)
from fminfer.forward.layer_stream import SLOTS
from fminfer.forward.stage import MAX_LOGITS
from fminfer.models.sharding import WHOLE, ModelShard
from fminfer.models.tensor_specs import (
    TensorSpecs,
    layer_specs,
    stage_specs,
    without_tied_tensors,
)
from fminfer.plan.run_plan import ExpectedBytes, RunPlan, Streamed

# Measured on CPUs with models of 125 to 560 million parameters; see docs/performance.md.
# a run's process takes more than a check's: threads, journal, rows
RUN_BYTES = 30 << 20
GPU_CONTEXT = 1 << 29  # a GPU's memory before anything is loaded: not measured
# kept free for cuBLAS, compiled kernels and holes in torch's memory
GPU_RESERVE = 3 << 29
# What the allocator cannot use again of each weight that was replaced by its packed form.
HOLE_BYTES = {"float32": 5 << 19, "bfloat16": 1 << 20}
# Of each product of an expert that a library packs; in bfloat16 none. The kernels pack
# all at once.
EXPERT_HOLE_BYTES = {"float32": 1 << 20}
# Of one logit, all copies that exist at once. Float32 logits, edited and ranked on the CPU; on a
# GPU torch draws from them with scores in float64 (not measured there).
LOGIT_BYTES = {"cpu": 3 * 4, "cuda": 40}
HIDDEN_COPIES = 8
WIDE_COPIES = 3  # copies of a step's hidden states, and of an MLP's inner ones
EXPERT_COPIES = 6  # for each expert of a token: four in the dtype, and a sum in float32
# what the driver keeps of a layer in a CUDA graph: not measured
GRAPH_LAYER_BYTES = 1 << 18


def expect_bytes(
    plan: RunPlan,
    part: Part,
    share: ModelShard | None = None,
    streamed: Streamed | None = None,
) -> ExpectedBytes:
    """Return what the process of one part takes, by the plan's device, dtypes and formats."""
    model = plan.checkpoint.model if share is None else share.model
    weights = _expect_weights(plan, part, share, streamed)
    on_cpu = plan.device.type == "cpu"
    libraries = (
        plan.machine.process_bytes + RUN_BYTES if on_cpu else GPU_CONTEXT + GPU_RESERVE
    )
    slots, passing, host = _slot_bytes(plan, share, streamed)

    cache_shape = model.layers[0].attention.cache_shape
    ropes = {model.layers[number].attention.rope for number in part.layer_numbers}
    row = sum(8 * len(rope.inv_freq) for rope in ropes if rope)  # of cosines and sines
    num_cached = part.last - part.first
    return ExpectedBytes(
        libraries=libraries + row * plan.checkpoint.context_length,
        weights=weights.total + slots,
        held_weights=weights.held + slots,
        mapped=weights.mapped,
        reads_files=weights.reads_files,
        work=_step_bytes(plan, part, model, has_graphs=streamed is None),
        work_token=_token_numbers(part, model) * plan.dtype.itemsize,
        kv_token=num_cached * math.prod(cache_shape) * plan.kv_dtype.itemsize,
        passing=passing,
        host=host,
    )


@dataclass(slots=True, frozen=True)
class WeightBytes:
    """What the weights of one part take, without streamed layers."""

    total: int
    held: int  # the part that must stay
    mapped: int  # the part in mapped files
    reads_files: (
        bool  # none but the head is packed: steps use the rest where it is mapped
    )


def _expect_weights(
    plan: RunPlan, part: Part, share: ModelShard | None, streamed: Streamed | None
) -> WeightBytes:
    """Return what the weights of one part take, as they are packed or stay in their files."""
    checkpoint = plan.checkpoint
    model = checkpoint.model if share is None else share.model
    cuts = {} if share is None else share.cuts
    is_tied = checkpoint.config.tie_word_embeddings and part.is_first
    numbers = () if streamed is None else streamed.numbers
    come_and_go = tuple(f"{number}." for number in numbers)
    specs = {
        name: spec
        for name, spec in without_tied_tensors(
            stage_specs(model, part), is_tied=is_tied
        ).items()
        if not name.startswith(come_and_go)
    }
    formats = {
        name: plan.holding.choose_cut_format(
            plan.held[name], spec, cuts.get(name, WHOLE)
        )
        for name, spec in specs.items()
    }
    sizes = {name: formats[name].num_bytes(spec.shape) for name, spec in specs.items()}
    packed = _find_packed(plan, specs, formats)
    head = "head.weight" if "head.weight" in specs else "embed.weight"
    has_head = part.is_last and not model.is_pooled
    if has_head and plan.has_kernels and can_sum_in_float32(formats[head]):
        packed[head] = specs[head]

    # Joined tensors are copies, which packing replaces; what they were joined of leaves memory.
    # Of files in this very format the system keeps what was read, for it is mapped and
    # not copied.
    in_files = specs.keys() - cuts.keys() if plan.device.type == "cpu" else ()
    whole = {name for name in in_files if plan.arrivals.get(name) == "in place"}
    whole -= packed.keys()  # what is packed leaves its file
    mapped = sum(sizes[name] for name in whole)
    copied = sum(sizes[name] for name in whole if specs[name].use == "moved")
    total = sum(sizes.values()) + copied
    return WeightBytes(
        total=total + _count_holes(plan, packed, sizes),
        held=total - mapped,
        mapped=mapped,
        reads_files=bool(mapped and not packed.keys() - {head}),
    )


def _find_packed(
    plan: RunPlan, specs: TensorSpecs, formats: Mapping[str, Format]
) -> TensorSpecs:
    """Return the tensors of products whose packed form takes their place."""
    if not plan.packed_by:
        return {}
    return {
        name: spec
        for name, spec in specs.items()
        if spec.use == "product"
        if formats[name].floats is not None
        or is_kernel_faster(formats[name], plan.dtype)
    }


def _count_holes(plan: RunPlan, packed: TensorSpecs, sizes: Mapping[str, int]) -> int:
    """Return what the allocator cannot use again of weights that were packed."""
    kind = plan.formats["product"]
    hole = HOLE_BYTES.get(kind.name, HOLE_BYTES["bfloat16"])
    if kind.floats is not None:
        holes = len(packed) * hole
    else:  # it is no larger than what was replaced
        holes = sum(min(hole, sizes[name]) for name in packed)
    if plan.packed_by == "torch":
        num_products = sum(
            spec.shape[0] for spec in packed.values() if len(spec.shape) == 3
        )
        holes += num_products * EXPERT_HOLE_BYTES.get(kind.name, 0)
    return holes


@dataclass(slots=True, frozen=True)
class LayerBytes:
    """What a layer of a rank takes."""

    held: int
    read: int  # of files: a matrix that is cut by its inputs is read whole
    whole: int  # as the files have it, uncut


def layer_bytes(plan: RunPlan, share: ModelShard | None, number: int) -> LayerBytes:
    """Return what a layer of a rank takes."""
    model = plan.checkpoint.model
    cuts = {} if share is None else share.cuts
    held = read = whole = 0
    for name, spec in layer_specs(model.layers[number], model.hidden_size).items():
        cut = cuts.get(full := f"{number}.{name}", WHOLE)
        stored = plan.stored.get(full, Dense(plan.dtype))
        cut_format = plan.holding.choose_cut_format(plan.held[full], spec, cut)
        held += cut_format.num_bytes(cut.cut_spec(spec).shape)
        size = stored.num_bytes(spec.shape)
        if cut.rows is None or cut.columns is not None:
            read += size
        else:
            stored_rows = stored.cut_outputs(cut.rows)
            read += stored_rows.num_bytes(cut.cut_spec(spec).shape)
        whole += size
    return LayerBytes(held, read, whole)


def _slot_bytes(
    plan: RunPlan, share: ModelShard | None, streamed: Streamed | None
) -> tuple[int, int, int]:
    """Return what streamed layers take: on the device, of it only in steps, in a GPU's host."""
    if streamed is None:
        return 0, 0, 0
    sizes = [layer_bytes(plan, share, number) for number in streamed.numbers]
    held = max(each.held for each in sizes)
    if plan.device.type == "cuda":
        stays = streamed.place == "cpu" and not streamed.is_shared
        pinned = [each.whole for each in sizes]
        return SLOTS * held, 0, sum(pinned) if stays else SLOTS * max(pinned)
    read = max(each.read for each in sizes)
    others = [
        each.held
        for number, each in zip(streamed.numbers, sizes, strict=True)
        if share is not None or not _is_used_there(plan, number)
    ]
    made = 2 * max(others, default=0)  # made, and packed
    return SLOTS * read + made, read + made, 0


def _is_used_there(plan: RunPlan, number: int) -> bool:
    """Tell whether products use the weights of a layer as they lie in files."""
    model = plan.checkpoint.model
    specs = layer_specs(model.layers[number], model.hidden_size).items()
    products = {f"{number}.{n}": s for n, s in specs if s.use in ("product", "moved")}
    ways = ("in place", "apart") if plan.packed_by == "kernels" else ("in place",)
    return all(
        len(spec.shape) == 2
        and spec.use == "product"
        and plan.held[name].floats is not None
        and plan.arrivals.get(name) in ways
        for name, spec in products.items()
    )


def _step_bytes(plan: RunPlan, part: Part, model: Model, *, has_graphs: bool) -> int:
    """Return what the largest step takes in one stage, with the memory of its CUDA graphs."""
    kind = plan.device.type
    layers = [model.layers[number] for number in part.layer_numbers]
    tokens = plan.sizes.chunk_size
    hidden = _token_numbers(part, model)
    logits = min(MAX_LOGITS[kind], tokens * model.vocab_size) if part.is_last else 0
    graphs = 0
    if has_graphs and kind == "cuda" and plan.may_capture and can_capture(layers):
        rows = plan.sizes.max_decode_rows
        graphs = len(layers) * len(
            choose_graph_sizes(rows)
        ) * GRAPH_LAYER_BYTES + count_input_bytes(rows)
        tokens += rows  # the graphs' pool holds the hidden states of the largest one
    floats = DEQUANTIZED_AT_ONCE[kind] * DEQUANTIZED_BYTES if plan.has_blocks else 0
    return (
        tokens * hidden * plan.dtype.itemsize
        + LOGIT_BYTES[kind] * logits
        + graphs
        + floats
    )


def _token_numbers(part: Part, model: Model) -> int:
    """Return how many numbers of each token exist at once in a step of one stage."""
    layers = [model.layers[number] for number in part.layer_numbers]
    widths = [max(sum(each.attention.qkv_sizes), _up_size(each.mlp)) for each in layers]
    experts = [each.mlp.top_k if isinstance(each.mlp, Moe) else 0 for each in layers]
    copies = HIDDEN_COPIES + EXPERT_COPIES * max(experts)  # to each of them, and back
    return copies * model.hidden_size + WIDE_COPIES * max(widths)


def _up_size(mlp: Mlp | Moe) -> int:
    if isinstance(mlp, Mlp):
        return mlp.up_size
    return max(mlp.expert.up_size, 0 if mlp.shared is None else mlp.shared.up_size)

"""How much memory each process of a run takes, from the model's config and its files' headers.

The spec gives the shapes of one part's tensors; no weight is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fminfer.compute.linear.product_kernel import head_takes
from fminfer.compute.registry import foresee_library, keeps_bfloat16, product_form
from fminfer.compute.weights import Dense, TensorSpec
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part
from fminfer.machine.device import choose_kv_dtype
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.families.tensor_names import AS_STORED, Architecture, source_of
from fminfer.models.formats import held_format
from fminfer.models.tensor_specs import TensorSpecs, part_specs
from fminfer.models.weight_headers import stored_formats
from fminfer.plan.kv_size import kv_token_bytes
from fminfer.plan.opening import split_model
from fminfer.plan.step_memory import GPU_RESERVE, step_bytes

# Measured on CPUs with models of 125 to 560 million parameters; see docs/performance.md.
RUN_BYTES = 30 << 20  # a run's process takes more than a check's: threads, journal, rows
GPU_CONTEXT = 1 << 29  # a GPU's memory before anything is loaded: not measured
# What the allocator cannot use again of each weight that was replaced by its packed form.
HOLE_BYTES = {torch.float32: 5 << 19, torch.bfloat16: 1 << 20}
# Of each product of an expert that a library packs; in bfloat16 none. The kernels pack all at once.
EXPERT_HOLE_BYTES = {torch.float32: 1 << 20}


@dataclass(slots=True, frozen=True)
class Footprint:
    """What one process takes, in bytes."""

    rank: int
    num_layers: int
    libraries: int  # Python, torch, rotary tables; on a GPU its context and reserve
    weights: int  # weights, with mapped files
    held_weights: int  # the part that must stay: mapped files can be dropped and read again
    mapped: int  # the part in mapped files, which leave memory to others
    reads_files: bool  # steps use weights where they are mapped: nothing is packed
    work: int  # a step's work
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
    return [
        measure_footprint(config, checkpoint, part, device, dtype)
        for part in split_model(config, checkpoint, num_stages)
    ]


def own_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def held_dtype(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype in which a run will hold most weights, of arithmetic in `dtype`."""
    stored, has_library = stored_formats(checkpoint), foresee_library(config.kernels, device)
    keeps = keeps_bfloat16(dtype, has_library=has_library)
    held = held_format(TensorSpec((), "product"), stored, dtype, keeps_bfloat16=keeps)
    return held.dtype if isinstance(held, Dense) else dtype


def measure_footprint(
    config: EngineConfig,
    checkpoint: Checkpoint,
    part: Part,
    device: torch.device,
    dtype: torch.dtype,
) -> Footprint:
    """Return what the process of one part takes."""
    specs = part_specs(checkpoint.model, part)
    on_cpu = device.type == "cpu"
    is_tied = bool(checkpoint.config.tie_word_embeddings)
    if is_tied and part.is_first:  # the embedding is the head
        specs.pop("head.weight", None)
    held_in = held_dtype(config, checkpoint, device, dtype)
    stored, has_library = stored_formats(checkpoint), foresee_library(config.kernels, device)
    keeps = keeps_bfloat16(dtype, has_library=has_library)
    held_as = partial(held_format, stored=stored, dtype=dtype, keeps_bfloat16=keeps)
    formats = {name: held_as(spec) for name, spec in specs.items()}
    sizes = {name: formats[name].num_bytes(spec.shape) for name, spec in specs.items()}
    packed: TensorSpecs = {}
    form = product_form(Dense(held_in), dtype, device, has_library=has_library)
    if form != "plain":
        dense = {n: s for n, s in specs.items() if isinstance(formats[n], Dense)}
        packed = {name: spec for name, spec in dense.items() if spec.use == "product"}
    weights = sum(sizes.values())
    # Joined tensors are copies, which packing replaces; what they were joined of leaves memory.
    # Of files in this very format the system keeps what was read, for it is mapped and not copied.
    as_stored = (name for name in specs if on_cpu and formats[name] in stored)
    whole = {name for name in as_stored if _is_mapped(checkpoint.architecture, name)}
    head = "head.weight" if "head.weight" in specs else "embed.weight"
    if part.is_last and has_library and head_takes(formats[head]):  # a packed head leaves its file
        packed[head] = specs[head]
        whole.discard(head)
    mapped = sum(sizes[name] for name in whole)
    copied = {name for name in whole if name in packed or specs[name].use == "moved"}
    weights += sum(sizes[name] for name in copied)
    held = weights - mapped
    tables = _table_bytes(checkpoint, part)
    weights += len(packed) * HOLE_BYTES.get(held_in, 0)
    if form != "kernel":  # which packs all experts of a layer at once
        num_products = sum(spec.shape[0] for spec in packed.values() if len(spec.shape) == 3)
        weights += num_products * EXPERT_HOLE_BYTES.get(held_in, 0)
    return Footprint(
        part.stage,
        part.num_layers,
        (own_bytes() + RUN_BYTES if on_cpu else GPU_CONTEXT + GPU_RESERVE) + tables,
        weights,
        held,
        mapped,
        bool(mapped and not packed),
        step_bytes(config, checkpoint.model, dtype, device, part),
        kv_token_bytes(checkpoint, part, choose_kv_dtype(config.kv_dtype, dtype)),
    )


def _table_bytes(checkpoint: Checkpoint, part: Part) -> int:
    """Return what the cosines and sines of all positions take, one table for each kind."""
    layers = checkpoint.model.layers[part.first : part.last]
    ropes = {layer.attention.rope for layer in layers} - {None}
    return sum(8 * len(rope.inv_freq) for rope in ropes if rope) * checkpoint.context_length


def _is_mapped(architecture: Architecture, name: str) -> bool:
    """Return whether a tensor of a part is a stored one as it is."""
    number, _, inner = name.partition(".")
    source = (
        source_of(inner, architecture.inner)
        if number.isdigit()
        else source_of(name, architecture.outer)
    )
    is_one = not source.names or (len(source.names) == 1 and "*" not in source.names[0])
    return is_one and source.layout == AS_STORED

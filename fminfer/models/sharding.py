"""Tensor parallelism (Shoeybi et al. 2019): which part of each tensor a rank holds.

A rank has some heads of attention, some tokens of embedding and head, and a part of the
inner size of each MLP and expert. Each `TensorSpec` says which of its outputs and inputs
belong to these. The products `out` and `down` are cut by inputs, and ranks add up their
results. All other tensors are whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

from fminfer.compute.values.spec import Attention, Layer, Mlp, Model, Moe, StageHeads
from fminfer.compute.values.weights import TensorSpec, Units
from fminfer.core.errors import UsageError
from fminfer.core.partition import split_evenly
from fminfer.models.tensor_specs import entry_specs, exit_specs, layer_specs

TOKENS_UNIT = 8  # masks of allowed tokens are bytes of 8
MORE_RANKS = "--pipeline-group-size uses more ranks"


@dataclass(slots=True, frozen=True)
class TensorCut:
    """The part of a tensor that a rank holds."""

    rows: tuple[range, ...] | None = None  # of its outputs; None: all
    columns: range | None = None  # of its inputs; None: all
    is_zero: bool = False  # held as zeros, because the first rank adds this bias

    def cut_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the part that is held of a tensor."""
        shape = [*spec.shape]
        dim = outputs_dim(spec)
        if self.rows is not None:
            shape[dim] = sum(map(len, self.rows))
        if self.columns is not None:
            shape[-1] = len(self.columns)
        return replace(spec, shape=tuple(shape))


def outputs_dim(spec: TensorSpec) -> int:
    """Return the dimension of a tensor's outputs: experts' biases are (experts, outputs)."""
    is_matrix = len(spec.shape) > 1 and spec.use != "bias"
    return len(spec.shape) - (2 if is_matrix else 1)


WHOLE = TensorCut()
Cuts = Mapping[str, TensorCut]  # by our names; others are whole


# what a rank has of a layer, or of the tokens, by the names of `Units`
Parts = Mapping[str, range]


@dataclass(slots=True, frozen=True)
class ModelShard:
    """The shard of a model that one rank holds."""

    model: Model  # the spec of what this rank holds: all sizes follow from it
    shard: int  # the rank's number in its stage
    tokens: tuple[range, ...]  # of each rank
    cuts: Cuts  # by the names of `model_specs`


def shard_model(
    model: Model, shard: int, count: int, blocks: Mapping[str, int]
) -> ModelShard:
    """Cut a model for one of the ranks of a stage.

    Args:
        blocks: how many neighbouring inputs of "out" and "down" are quantized together; no cut
            goes through them.

    Raises:
        UsageError: it cannot be cut into so many parts. The message says how many are possible.
    """
    try:
        return _make_shard(model, shard, count, blocks)
    except UsageError as error:
        suggestion = "nor among fewer"
        for fewer in range(count - 1, 1, -1):
            with suppress(UsageError):
                _make_shard(model, 0, fewer, blocks)
                suggestion = f"but among {fewer}"
                break
        raise UsageError(f"{error}, {suggestion}; {MORE_RANKS}") from None


def _make_shard(
    model: Model, shard: int, count: int, blocks: Mapping[str, int]
) -> ModelShard:
    tokens = split_evenly(model.vocab_size, count, TOKENS_UNIT)
    _require_filled(
        tokens, count, f"a vocabulary of {model.vocab_size} tokens in eights"
    )
    outer = entry_specs(model) | exit_specs(model)
    cuts = _make_cuts(outer, {"tokens": tokens[shard]}, shard)
    layers = []
    for number, layer in enumerate(model.layers):
        parts, kv_copies = _divide_layer(layer, shard, count, blocks)
        layers.append(_shard_layer(layer, parts, kv_copies))
        layer_cuts = _make_cuts(layer_specs(layer, model.hidden_size), parts, shard)
        cuts |= {f"{number}.{name}": cut for name, cut in layer_cuts.items()}
    shard_spec = replace(model, layers=tuple(layers), vocab_size=len(tokens[shard]))
    return ModelShard(shard_spec, shard, tuple(tokens), cuts)


def _make_cuts(
    specs: Mapping[str, TensorSpec], parts: Parts, shard: int
) -> dict[str, TensorCut]:
    def range_of_units(units: Units, first: int = 0) -> range:
        unit_range = parts[units.kind]
        return range(
            first + unit_range.start * units.size, first + unit_range.stop * units.size
        )

    cuts = {}
    for name, spec in specs.items():
        firsts = accumulate((units.total for units in spec.outputs), initial=0)
        rows = tuple(map(range_of_units, spec.outputs, firsts)) or None
        columns = None if spec.inputs is None else range_of_units(spec.inputs)
        if rows or columns or spec.is_of_sum:
            cuts[name] = TensorCut(rows, columns, spec.is_of_sum and shard > 0)
    return cuts


def _divide_layer(
    layer: Layer, shard: int, count: int, blocks: Mapping[str, int]
) -> tuple[Parts, int]:
    """Return a rank's ranges of a layer's units, and how many ranks have its KV heads."""
    attention = layer.attention
    mlp = layer.mlp
    norm = attention.qk_norm
    if norm is not None and attention.qk_norm_over == "all" and not norm.is_rms:
        raise UsageError(
            f"--tensor-parallel-size {count}: this model has a LayerNorm over all "
            "heads together, which is not divided among ranks"
        )
    heads_by_rank = _divide_heads(attention, count, blocks.get("out", 1))
    heads, kv_heads = heads_by_rank[shard]
    expert, shared = (mlp.expert, mlp.shared) if isinstance(mlp, Moe) else (mlp, None)
    parts = {"heads": heads, "kv_heads": kv_heads}
    for name, sized_mlp in ("shared", shared), ("inner", expert):
        if sized_mlp is not None:
            block = blocks.get("down", 1)
            in_blocks = f" in blocks of {block}" if block > 1 else ""
            description = f"an MLP or expert of size {sized_mlp.size}{in_blocks}"
            parts[name] = _require_filled(
                split_evenly(sized_mlp.size, count, block), count, description
            )[shard]
    return parts, [kv_range for _, kv_range in heads_by_rank].count(kv_heads)


def _divide_heads(
    attention: Attention, count: int, block: int
) -> list[tuple[range, range]]:
    """Return the heads and KV heads of each rank: whole groups, or parts of one group.

    Cuts along the inputs of `out` follow blocks.
    """
    num_groups = attention.heads if attention.latent else attention.kv_heads
    size = attention.heads // num_groups  # heads of a group
    width = attention.latent.value_dim if attention.latent else attention.head_dim
    and_blocks = f" and blocks of {block}" if block > 1 else ""
    description = f"{attention.heads} heads in groups of {size}{and_blocks}"
    if count <= num_groups:
        # groups whose heads are whole blocks
        unit = block // math.gcd(block, size * width)
        groups = _require_filled(
            split_evenly(num_groups, count, unit), count, description
        )
        kv_heads = [
            range(attention.kv_heads) if attention.latent else group_range
            for group_range in groups
        ]
        heads = [
            range(group_range.start * size, group_range.stop * size)
            for group_range in groups
        ]
        return [*zip(heads, kv_heads, strict=True)]
    # the second group begins within a block
    if num_groups > 1 and size * width % block:
        _require_filled([range(0)], count, description)
    unit = block // math.gcd(block, width)
    heads_by_rank = []
    for group, ranks in enumerate(split_evenly(count, num_groups)):
        for part in _require_filled(
            split_evenly(size, len(ranks), unit), count, description
        ):
            head_range = range(group * size + part.start, group * size + part.stop)
            heads_by_rank.append((head_range, range(group, group + 1)))
    return heads_by_rank


def _require_filled(parts: list[range], count: int, description: str) -> list[range]:
    """Return the parts of all ranks, or raise a UsageError if one of them is empty."""
    if not all(parts):
        raise UsageError(
            f"--tensor-parallel-size {count}: {description} cannot be divided among "
            f"{count} ranks"
        )
    return parts


def _shard_layer(layer: Layer, parts: Parts, kv_copies: int) -> Layer:
    """Return the spec of the part of a layer that a rank holds."""
    attention = layer.attention
    mlp = layer.mlp
    cross = layer.cross
    heads = parts["heads"]
    num_kv = len(parts["kv_heads"])
    if cross is not None:  # as wide as the layer's own
        cross_attention = replace(cross.attention, heads=len(heads), kv_heads=num_kv)
        cross = replace(cross, attention=cross_attention)
    alibi = attention.alibi and replace(
        attention.alibi, slopes=attention.alibi.slopes[heads.start : heads.stop]
    )
    heads_of_all = (
        StageHeads(attention.heads, attention.kv_heads, kv_copies)
        if attention.qk_norm_over == "all"
        else None
    )
    attention = replace(
        attention,
        heads=len(heads),
        kv_heads=num_kv,
        alibi=alibi,
        stage_heads=heads_of_all,
    )
    cut: Mlp | Moe
    if isinstance(mlp, Moe):
        shared = mlp.shared and replace(mlp.shared, size=len(parts["shared"]))
        cut = replace(
            mlp, expert=replace(mlp.expert, size=len(parts["inner"])), shared=shared
        )
    else:
        cut = replace(mlp, size=len(parts["inner"]))
    return replace(layer, attention=attention, mlp=cut, cross=cross)

"""Tensor parallelism (Shoeybi et al. 2019): which part of each tensor a rank holds.

A rank has some heads of attention, some tokens of embedding and head, and a part of the
inner size of each MLP and expert. Each `TensorSpec` says which of its outputs and
inputs belong to these. Ranks add up what `out` and `down` give, which are cut by
inputs. All else is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

from fminfer.compute.values.spec import Attention, HeadsOfAll, Layer, Mlp, Model, Moe
from fminfer.compute.values.weights import Format, Joined, TensorSpec, Units
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

    def held(self, spec: TensorSpec) -> TensorSpec:
        """Return what is held of a tensor."""
        shape = [*spec.shape]
        dim = outputs_dim(spec)
        if self.rows is not None:
            shape[dim] = sum(map(len, self.rows))
        if self.columns is not None:
            shape[-1] = len(self.columns)
        return replace(spec, shape=tuple(shape))

    def format(self, held: Format) -> Format:
        """Return the format of what is held of a tensor that is held in a format."""
        if self.rows is None or not isinstance(held, Joined):
            return held
        return held.of_rows(self.rows)


def outputs_dim(spec: TensorSpec) -> int:
    """Return the dimension of a tensor's outputs: experts' biases are (experts, outputs)."""
    is_matrix = len(spec.shape) > 1 and spec.use != "bias"
    return len(spec.shape) - (2 if is_matrix else 1)


WHOLE = TensorCut()
Cuts = Mapping[str, TensorCut]  # by our names; others are whole


# what a rank has of a layer, or of the tokens, by the names of `Units`
Parts = Mapping[str, range]


@dataclass(slots=True, frozen=True)
class ModelShare:
    """What one rank has of a model."""

    model: Model  # the spec of what this rank holds: all sizes follow from it
    shard: int
    tokens: tuple[range, ...]  # of each rank
    cuts: Cuts  # by the names of `model_specs`


def share_model(
    model: Model, shard: int, count: int, blocks: Mapping[str, int]
) -> ModelShare:
    """Cut a model for one of the ranks of a stage.

    Args:
        blocks: how many neighbouring inputs of "out" and "down" are quantized together; no cut
            goes through them.

    Raises:
        UsageError: it cannot be cut into so many parts; the most that it can be is told.
    """
    try:
        return _share_model(model, shard, count, blocks)
    except UsageError as error:
        told = "nor among fewer"
        for fewer in range(count - 1, 1, -1):
            with suppress(UsageError):
                _share_model(model, 0, fewer, blocks)
                told = f"but among {fewer}"
                break
        raise UsageError(f"{error}, {told}; {MORE_RANKS}") from None


def _share_model(
    model: Model, shard: int, count: int, blocks: Mapping[str, int]
) -> ModelShare:
    tokens = split_evenly(model.vocab_size, count, TOKENS_UNIT)
    _refuse_empty(tokens, count, f"a vocabulary of {model.vocab_size} tokens in eights")
    outer = entry_specs(model) | exit_specs(model)
    cuts = _cuts(outer, {"tokens": tokens[shard]}, shard)
    layers = []
    for number, layer in enumerate(model.layers):
        parts, kv_copies = _share_layer(layer, shard, count, blocks)
        layers.append(_cut_layer(layer, parts, kv_copies))
        own = _cuts(layer_specs(layer, model.hidden_size), parts, shard)
        cuts |= {f"{number}.{name}": cut for name, cut in own.items()}
    held = replace(model, layers=tuple(layers), vocab_size=len(tokens[shard]))
    return ModelShare(held, shard, tuple(tokens), cuts)


def _cuts(
    specs: Mapping[str, TensorSpec], parts: Parts, shard: int
) -> dict[str, TensorCut]:
    def own(units: Units, first: int = 0) -> range:
        part = parts[units.of]
        return range(first + part.start * units.size, first + part.stop * units.size)

    found = {}
    for name, spec in specs.items():
        firsts = accumulate((each.total for each in spec.outputs), initial=0)
        rows = tuple(map(own, spec.outputs, firsts)) or None
        columns = None if spec.inputs is None else own(spec.inputs)
        if rows or columns or spec.is_of_sum:
            found[name] = TensorCut(rows, columns, spec.is_of_sum and shard > 0)
    return found


def _share_layer(
    layer: Layer, shard: int, count: int, blocks: Mapping[str, int]
) -> tuple[Parts, int]:
    """Return what a rank has of a layer, and how many ranks have its KV heads, it included."""
    attention = layer.attention
    mlp = layer.mlp
    norm = attention.qk_norm
    if norm is not None and attention.qk_norm_over == "all" and not norm.is_rms:
        raise UsageError(
            f"--tensor-parallel-size {count}: this model has a LayerNorm over all "
            "heads together, which is not divided among ranks"
        )
    of_ranks = _share_heads(attention, count, blocks.get("out", 1))
    heads, kv_heads = of_ranks[shard]
    expert, shared = (mlp.expert, mlp.shared) if isinstance(mlp, Moe) else (mlp, None)
    parts = {"heads": heads, "kv_heads": kv_heads}
    for name, each in ("shared", shared), ("inner", expert):
        if each is not None:
            block = blocks.get("down", 1)
            told = (
                f"an MLP or expert of size {each.size}"
                + f" in blocks of {block}" * (block > 1)
            )
            parts[name] = _refuse_empty(
                split_evenly(each.size, count, block), count, told
            )[shard]
    return parts, [own for _, own in of_ranks].count(kv_heads)


def _share_heads(how: Attention, count: int, block: int) -> list[tuple[range, range]]:
    """Return the heads and KV heads of each rank: whole groups of them, or parts of one group.

    Cuts along the inputs of `out` follow blocks.
    """
    num_groups = how.heads if how.latent else how.kv_heads
    size = how.heads // num_groups  # heads of a group
    width = how.latent.value_dim if how.latent else how.head_dim
    told = f"{how.heads} heads in groups of {size}" + f" and blocks of {block}" * (
        block > 1
    )
    if count <= num_groups:
        # groups whose heads are whole blocks
        unit = block // math.gcd(block, size * width)
        groups = _refuse_empty(split_evenly(num_groups, count, unit), count, told)
        of_kv = [range(how.kv_heads) if how.latent else each for each in groups]
        heads = [range(each.start * size, each.stop * size) for each in groups]
        return [*zip(heads, of_kv, strict=True)]
    # the second group begins within a block
    if num_groups > 1 and size * width % block:
        _refuse_empty([range(0)], count, told)
    unit = block // math.gcd(block, width)
    found = []
    for group, ranks in enumerate(split_evenly(count, num_groups)):
        for part in _refuse_empty(split_evenly(size, len(ranks), unit), count, told):
            heads_of = range(group * size + part.start, group * size + part.stop)
            found.append((heads_of, range(group, group + 1)))
    return found


def _refuse_empty(parts: list[range], count: int, told: str) -> list[range]:
    if not all(parts):
        raise UsageError(
            f"--tensor-parallel-size {count}: {told} cannot be divided among {count} ranks"
        )
    return parts


def _cut_layer(layer: Layer, parts: Parts, kv_copies: int) -> Layer:
    """Return the spec of a layer's part."""
    attention = layer.attention
    mlp = layer.mlp
    cross = layer.cross
    heads = parts["heads"]
    num_kv = len(parts["kv_heads"])
    if cross is not None:  # as wide as the layer's own
        how = replace(cross.attention, heads=len(heads), kv_heads=num_kv)
        cross = replace(cross, attention=how)
    alibi = attention.alibi and replace(
        attention.alibi, slopes=attention.alibi.slopes[heads.start : heads.stop]
    )
    norms_all = attention.qk_norm_over == "all"
    of_all = (
        HeadsOfAll(attention.heads, attention.kv_heads, kv_copies)
        if norms_all
        else None
    )
    attention = replace(
        attention, heads=len(heads), kv_heads=num_kv, alibi=alibi, of_all=of_all
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

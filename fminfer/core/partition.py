"""Which layers each stage of a pipeline runs, and which rank has which part of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fminfer.core.errors import UsageError
from fminfer.core.quantities import with_noun


@dataclass(slots=True, frozen=True)
class Part:
    """What one rank computes: a stage's layers from `first` up to, not with, `last`.

    With tensor parallelism several ranks share a stage, and each has a shard of its layers. The
    leader, which has shard 0, speaks to other stages.
    """

    stage: int
    num_stages: int
    first: int
    last: int
    shard: int = 0
    num_shards: int = 1
    encoder: range = range(0)  # the numbers of the encoder's layers that the stage has

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def layer_numbers(self) -> list[int]:
        """The numbers of all its layers."""
        return [*range(self.first, self.last), *self.encoder]

    @property
    def num_layers(self) -> int:
        return len(self.layer_numbers)

    @property
    def is_leader(self) -> bool:
        return self.shard == 0

    @property
    def ranks(self) -> range:
        """The ranks of its stage, the leader first."""
        return range(self.stage * self.num_shards, (self.stage + 1) * self.num_shards)

    @property
    def rank(self) -> int:
        return self.ranks[self.shard]

    @property
    def previous_rank(self) -> int:
        """The rank that messages come from: the leader of the stage before, or of its own."""
        return self._find_leader(self.stage - 1)

    @property
    def next_rank(self) -> int:
        """The rank that messages go to: the leader of the stage behind, or of its own."""
        return self._find_leader(self.stage + 1)

    def _find_leader(self, stage: int) -> int:
        other = stage if self.is_leader else self.stage
        return other % self.num_stages * self.num_shards

    @property
    def shards(self) -> list[Part]:
        """The parts of all ranks of its stage."""
        return [replace(self, shard=shard) for shard in range(self.num_shards)]


def split_evenly(size: int, count: int, unit: int = 1) -> list[range]:
    """Divide a size as evenly as whole units allow; the last unit may be smaller."""
    units = -(-size // unit)
    ends = [min(size, -(-units * each // count) * unit) for each in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def balance_layers(num_layers: int, num_stages: int, head_cost: float) -> list[int]:
    """Return how many layers each stage gets so that the slowest stage is as fast as it can be.

    Args:
        head_cost: of the exit (norm, head, sampling) on the last stage, in layers.
    """
    if num_stages > num_layers:
        raise UsageError(
            f"{num_stages} stages share {with_noun(num_layers, 'layer')}, and "
            f"{num_stages - num_layers} would have no work. Use --pipeline-group-size "
            f"{num_layers} or less, without --world-size"
        )
    counts = [1] * num_stages
    costs = [1.0] * (num_stages - 1) + [1.0 + head_cost]
    # layers cost the same, so one at a time is best
    for _ in range(num_layers - num_stages):
        stage = costs.index(min(costs))
        counts[stage] += 1
        costs[stage] += 1
    return counts


def split_by_stage_size(total: int, num_stages: int, each: int) -> list[int]:
    """Return the split of --num-layers: `each` a stage; refuse idle stages and lost layers."""
    counts = [max(0, min(each, total - stage * each)) for stage in range(num_stages)]
    even = -(-total // num_stages)
    instead = (
        f"--num-layers {even}" if even * (num_stages - 1) < total else "no --num-layers"
    )
    idle = [stage for stage, count in enumerate(counts) if count == 0]
    if idle:
        raise UsageError(
            f"--num-layers {each} gives all {total} layers to {num_stages - len(idle)} of "
            f"{num_stages} stages: stage {idle[0]} has no work. Use {instead}, or "
            f"--pipeline-group-size {num_stages - len(idle)}"
        )
    if sum(counts) < total:
        raise UsageError(
            f"{num_stages} stages × --num-layers {each} hold {sum(counts)} of the "
            f"model's {total} layers. Use {instead}; or --max-layers {sum(counts)}, if "
            "the other layers are to be left out"
        )
    return counts


def split_by_stage_layers(
    num_layers: int, num_stages: int, counts: tuple[int, ...]
) -> list[int]:
    """Return the split of --stage-layers; refuse one that does not fit the layers."""
    shown = ",".join(map(str, counts))
    if len(counts) != num_stages:
        raise UsageError(
            f"--stage-layers {shown} has {with_noun(len(counts), 'count')}; give {num_stages}"
        )
    if min(counts) < 1:
        raise UsageError(
            f"--stage-layers {shown}: stage {counts.index(min(counts))} has no work; give every "
            "stage at least 1 layer"
        )
    if sum(counts) != num_layers:
        raise UsageError(
            f"--stage-layers {shown} adds up to {sum(counts)}; it must be {num_layers}"
        )
    return list(counts)


def make_parts(counts: list[int]) -> list[Part]:
    """Return each stage's part."""
    ends = [0, *accumulate(counts)]
    pairs = enumerate(pairwise(ends))
    return [Part(stage, len(counts), first, last) for stage, (first, last) in pairs]


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    head_cost: float,
    each: int | None = None,
    most: int | None = None,
    counts: tuple[int, ...] | None = None,
) -> list[Part]:
    """Return each stage's layers: as --stage-layers or --num-layers say, or else balanced.

    Args:
        num_layers: of the model.
        head_cost: see `balance_layers`.
        each, most, counts: --num-layers, --max-layers and --stage-layers.

    Raises:
        UsageError: a split that leaves a rank without work or a layer without a rank.
    """
    total = num_layers if most is None else min(most, num_layers)
    if counts is not None:
        if each is not None:
            raise UsageError("give either --stage-layers or --num-layers, not both")
        return make_parts(split_by_stage_layers(total, num_stages, counts))
    if each is not None:
        return make_parts(split_by_stage_size(total, num_stages, each))
    return make_parts(balance_layers(total, num_stages, head_cost))

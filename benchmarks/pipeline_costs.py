"""What a stage of a pipeline costs: shapes of models, figures of machines, seconds and bytes.

Arithmetic only; it knows no schedule. Public figures come from data sheets, the CPU's
are measured, and what share of them is reached is an assumption that the caller can change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SplitRule = Literal["even", "time", "memory"]
# times the float32 logits are read or written: softmax, top-p, draw
SAMPLING_PASSES = 6
# of a device that weights and KV cache may fill; the rest is work space
MEMORY_SHARE = 0.9


@dataclass(slots=True, frozen=True)
class ModelShape:
    """A decoder's sizes, as in its config.json."""

    num_layers: int
    hidden: int
    ffn: int
    vocab: int
    num_heads: int
    kv_heads: int
    is_gated: bool = False  # three products in the MLP instead of two
    is_tied: bool = True  # the head is the embedding; two stages then hold a copy each

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def layer_params(self) -> int:
        attention = (
            2 * self.hidden * self.hidden
            + 2 * self.hidden * self.kv_heads * self.head_dim
        )
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn

    @property
    def vocab_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_size(self) -> int:
        """Return the numbers that one token keeps in one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim


# Biases, norms and learned positions are left out: 0.1 % of the weights and less.
SHAPES = {
    "opt-175b": ModelShape(96, 12288, 49152, 50272, 96, 96),
    "bloom-176b": ModelShape(70, 14336, 57344, 250880, 112, 112),
    "llama-70b": ModelShape(
        80, 8192, 28672, 128256, 64, 8, is_gated=True, is_tied=False
    ),
    "llama-160m": ModelShape(
        12, 768, 3072, 32000, 12, 12, is_gated=True, is_tied=False
    ),
}


@dataclass(slots=True, frozen=True)
class Link:
    """The way of a message between two stages."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True, frozen=True)
class Machine:
    """One stage's device, and the links between devices inside and between machines."""

    flops: float  # peak FLOP/s of matrix products
    memory_bytes_per_s: float  # peak
    device_bytes: float
    inside: Link
    between: Link
    dtype_bytes: int = 2
    gemm_efficiency: float = 0.55  # of flops, large products
    memory_efficiency: float = 0.8  # of memory_bytes_per_s, weights and KV cache
    attention_efficiency: float = 0.3  # of flops, prompt chunks
    layer_s: float = 50e-6  # of a layer, whatever its work: launches that nothing hides
    step_s: float = 1e-3  # laying out a step and handing it on

    @property
    def ridge_tokens(self) -> float:
        """Tokens a step from which on its products take longer than reading the weights."""
        flops = self.flops * self.gemm_efficiency
        return (
            flops
            / (self.memory_bytes_per_s * self.memory_efficiency)
            * self.dtype_bytes
            / 2
        )


# GPUs: peak figures of NVIDIA's data sheets (dense, 16 bits); NVLink's and one InfiniBand card's
# rate in one direction. cpu-core: measured, one core of a 2-core Xeon (AVX-512): a
# float32 product of 512 × 768 × 3072; one row times 24 such weights; gloo's latency and
# rate are assumed.
GB = 1e9
MICRO = 1e-6
MACHINES = {
    "v100-32gb": Machine(
        125e12, 0.9e12, 32 * GB, Link(20 * MICRO, 150 * GB), Link(30 * MICRO, 12.5 * GB)
    ),
    "a100-80gb": Machine(
        312e12, 2.0e12, 80 * GB, Link(20 * MICRO, 300 * GB), Link(30 * MICRO, 25 * GB)
    ),
    "h200": Machine(
        989e12, 4.8e12, 141 * GB, Link(20 * MICRO, 450 * GB), Link(30 * MICRO, 50 * GB)
    ),
    "cpu-core": Machine(
        62e9,
        9e9,
        8 * GB,
        Link(150 * MICRO, 1.5 * GB),
        Link(200 * MICRO, 1.25 * GB),
        dtype_bytes=4,
        gemm_efficiency=1.0,
        memory_efficiency=1.0,
        attention_efficiency=0.5,
        layer_s=1.3e-3,
    ),
}


@dataclass(slots=True, frozen=True)
class Work:
    """What a step asks of each stage."""

    num_tokens: int
    num_draws: int
    kv_read: int  # tokens whose keys and values are read: each row's whole context
    num_scores: int  # products of a query with a key: the contexts of all tokens


@dataclass(slots=True, frozen=True)
class StageCost:
    """The seconds and bytes of one stage."""

    shape: ModelShape
    machine: Machine
    num_layers: int
    is_first: bool
    is_last: bool

    def time_s(self, work: Work) -> float:
        """Return how long the stage works on a step."""
        total = self.machine.step_s + self.num_layers * self._layer_s(work)
        if self.is_first:
            total += self._read_s(work.num_tokens * self.shape.hidden)
        if self.is_last and work.num_draws:
            total += self._product_s(self.shape.vocab_params, work.num_draws)
            logits_bytes = 4 * work.num_draws * self.shape.vocab
            total += SAMPLING_PASSES * logits_bytes / self._bytes_per_s
        return total

    @property
    def weight_bytes(self) -> float:
        copies = self.is_first + self.is_last
        if self.shape.is_tied:
            copies = min(copies, 1)
        params = (
            self.num_layers * self.shape.layer_params + copies * self.shape.vocab_params
        )
        return params * self.machine.dtype_bytes

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens' keys and values fit beside the weights."""
        room = MEMORY_SHARE * self.machine.device_bytes - self.weight_bytes
        return int(
            room / (self.num_layers * self.shape.kv_size * self.machine.dtype_bytes)
        )

    @property
    def _bytes_per_s(self) -> float:
        return self.machine.memory_bytes_per_s * self.machine.memory_efficiency

    def _read_s(self, num_values: float) -> float:
        return num_values * self.machine.dtype_bytes / self._bytes_per_s

    def _product_s(self, num_params: float, num_tokens: int) -> float:
        flops = self.machine.flops * self.machine.gemm_efficiency
        return max(self._read_s(num_params), 2 * num_params * num_tokens / flops)

    def _layer_s(self, work: Work) -> float:
        products = self._product_s(self.shape.layer_params, work.num_tokens)
        flops = self.machine.flops * self.machine.attention_efficiency
        # q·k, and weights times values
        scores = 4 * work.num_scores * self.shape.hidden / flops
        attention = max(self._read_s(work.kv_read * self.shape.kv_size), scores)
        return self.machine.layer_s + products + attention


def build_stages(
    shape: ModelShape, machine: Machine, counts: list[int]
) -> list[StageCost]:
    """Return the stages of a split."""
    assert sum(counts) == shape.num_layers, f"{counts} adds up to {sum(counts)}"
    last = len(counts) - 1
    return [
        StageCost(shape, machine, count, stage == 0, stage == last)
        for stage, count in enumerate(counts)
    ]


def build_hops(machine: Machine, num_stages: int, per_machine: int) -> list[Link]:
    """Return the link out of each stage; the last one's leads back to stage 0."""
    hops = []
    for stage in range(num_stages):
        following = (stage + 1) % num_stages
        is_inside = stage // per_machine == following // per_machine
        hops.append(machine.inside if is_inside else machine.between)
    return hops


def split(
    shape: ModelShape, machine: Machine, num_stages: int, rule: SplitRule
) -> list[int]:
    """Return how many layers each stage gets.

    even: ⌈layers ÷ stages⌉ each, the last what is left. time: the stage that reads most weights
    reads as few as can be. memory: as many tokens as can be fit the KV cache.
    """
    if rule == "even":
        each = -(-shape.num_layers // num_stages)
        counts = [
            min(each, shape.num_layers - each * stage) for stage in range(num_stages)
        ]
        return counts if min(counts) > 0 else _fill(shape, machine, num_stages, "time")
    return _fill(shape, machine, num_stages, rule)


def _fill(
    shape: ModelShape, machine: Machine, num_stages: int, rule: SplitRule
) -> list[int]:
    """Give out the layers one by one, each to the stage that it harms least."""
    counts = [1] * num_stages
    for _ in range(shape.num_layers - num_stages):
        harms = []
        for stage in range(num_stages):
            is_last = stage == num_stages - 1
            cost = StageCost(shape, machine, counts[stage] + 1, stage == 0, is_last)
            head = is_last * shape.vocab_params / shape.layer_params
            harm = cost.num_layers + head if rule == "time" else -cost.kv_tokens
            harms.append((harm, stage))
        counts[min(harms)[1]] += 1
    return counts

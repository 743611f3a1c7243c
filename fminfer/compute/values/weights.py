"""Weights as values: what each tensor of a spec is for, and in which format it is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol, get_args

import torch

Function = Callable[[torch.Tensor], torch.Tensor]  # of hidden states, (…, inputs)
Shape = tuple[int, ...]
Tensors = tuple[torch.Tensor, ...]
# product: a layer's matrix, rows times it; moved: one that becomes others when its layer is made
# (`kv_up` of a latent); router and choice: small ones that decide between experts.
Matrix = Literal["product", "moved", "head", "embedding", "router"]
Use = Matrix | Literal["choice", "norm", "norm_bias", "bias", "other"]
USES: tuple[Use, ...] = (
    *get_args(Matrix),
    "choice",
    "norm",
    "norm_bias",
    "bias",
    "other",
)
# Numbers that become floats at a time: few, to fit a CPU's caches; many, for few GPU kernels.
DEQUANTIZED_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 25}
DEQUANTIZED_BYTES = 12  # for each number, at most, in temporary copies
# what the CPU's kernels compute in
KERNEL_TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(slots=True, frozen=True)
class Units:
    """Outputs or inputs that belong to units of a model, which ranks of a stage divide."""

    # inner: of an MLP or expert
    kind: Literal["heads", "kv_heads", "inner", "shared", "tokens"]
    count: int
    size: int = 1  # outputs or inputs of each

    @property
    def total(self) -> int:
        return self.count * self.size


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """One tensor of a spec. Matrices are (outputs, inputs), of experts (experts, …)."""

    shape: Shape
    use: Use
    is_wide: bool = False  # float32 where hidden states are float16
    outputs: tuple[Units, ...] = ()  # in order; (): they belong to no units
    inputs: Units | None = None
    is_of_sum: bool = False  # a bias of what ranks add up

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def is_widened(self) -> bool:
        """Whether it may be held in another format than hidden states: it becomes
        theirs in use."""
        return self.use in ("product", "head", "embedding")

    @property
    def is_precise(self) -> bool:
        """Whether it is float32 in any dtype."""
        return self.use in ("router", "choice")


class Format(Protocol):
    """How the numbers of a weight are held in memory: in one or several tensors.

    The first dimensions of each tensor are the weight's, up to its outputs. So rows can
    be looked up, joined, stacked and cut. Products that take a format say so; others
    get it dequantized.
    """

    @property
    def name(self) -> str:
        """What people call it: "bfloat16", "int8"."""

    def num_bytes(self, shape: Shape) -> int:
        """Return what a weight of a shape takes."""

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        """Return the tensors of a weight of a shape, without values yet."""

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight's numbers in a dtype, of its shape. This is the reference."""


@dataclass(slots=True, frozen=True)
class Dense:
    """One tensor of floats, as it is."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def num_bytes(self, shape: Shape) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        return (torch.empty(shape, dtype=self.dtype, device=device),)

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return tensors[0].to(dtype)  # itself, where it is so


@dataclass(slots=True, frozen=True)
class Joined:
    """Rows of several formats: parts one below the other, each with tensors of its own.

    Files hold queries, keys and values in different formats, which are one weight of ours.
    """

    parts: tuple[tuple[Format, int], ...]  # and how many outputs each has

    @property
    def name(self) -> str:
        return " + ".join(
            dict.fromkeys(part_format.name for part_format, _ in self.parts)
        )

    def num_bytes(self, shape: Shape) -> int:
        return sum(
            part_format.num_bytes((*shape[:-2], num, shape[-1]))
            for part_format, num in self.parts
        )

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        sizes = [
            (part_format, (*shape[:-2], num, shape[-1]))
            for part_format, num in self.parts
        ]
        return tuple(
            tensor
            for part_format, size in sizes
            for tensor in part_format.empty(size, device)
        )

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        pairs = zip(self.parts, tensors, strict=True)  # each part is of one tensor
        return torch.cat(
            [part_format.dequantize((t,), dtype) for (part_format, _), t in pairs], -2
        )

    def select_rows(self, rows: Sequence[range]) -> Format:
        """Return the format of some rows."""
        kept = []
        for (part_format, num), first in zip(
            self.parts, self.part_starts(), strict=False
        ):
            shares = (
                range(max(r.start, first), min(r.stop, first + num)) for r in rows
            )
            if share := sum(map(len, shares)):
                kept.append((part_format, share))
        return join_formats(kept)

    def part_starts(self) -> list[int]:
        """Return the first output of each part, and the end."""
        return [0, *accumulate(num for _, num in self.parts)]


def join_formats(parts: list[tuple[Format, int]]) -> Format:
    """Return one format of parts, of which neighbours may be alike."""
    joined: list[tuple[Format, int]] = []
    for part_format, num in parts:
        if joined and joined[-1][0] == part_format:
            num += joined.pop()[1]
        joined.append((part_format, num))
    return joined[0][0] if len(joined) == 1 else Joined(tuple(joined))


@dataclass(slots=True, frozen=True, eq=False)
class Weight:
    """A weight as it is held: what it is for, how its numbers are kept, and its tensors."""

    spec: TensorSpec
    format: Format
    tensors: Tensors
    is_lent: bool = False  # for one pass through its layer, so packing does not pay

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_plain(self) -> bool:
        return isinstance(self.format, Dense)

    @property
    def plain(self) -> torch.Tensor:
        """Its only tensor, of floats."""
        assert self.is_plain, f"held as {self.format.name}"
        return self.tensors[0]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return its numbers in a dtype, of its shape."""
        return self.format.dequantize(self.tensors, dtype)

    def dequantize_rows(
        self, numbers: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return some of its rows, (numbers, inputs)."""
        row_tensors = tuple(tensor.index_select(0, numbers) for tensor in self.tensors)
        return self.format.dequantize(row_tensors, dtype)

    @property
    def parts(self) -> tuple[tuple[Format, int], ...]:
        """Its formats, from its first outputs to its last, and how many outputs each has."""
        part_format = self.format
        return (
            part_format.parts
            if isinstance(part_format, Joined)
            else ((part_format, self.shape[-2]),)
        )

    def split_rows(self) -> Iterator[Weight]:
        """Give its rows as smaller weights, each small enough to be made floats."""
        inputs = self.shape[-1]
        step = max(1, DEQUANTIZED_AT_ONCE[self.device.type] // inputs)
        is_joined = isinstance(self.format, Joined)
        tensors = (
            [(tensor,) for tensor in self.tensors] if is_joined else [self.tensors]
        )
        for (part_format, outputs), part_tensors in zip(
            self.parts, tensors, strict=True
        ):
            for first in range(0, outputs, step):
                rows = tuple(tensor[first : first + step] for tensor in part_tensors)
                yield Weight(
                    TensorSpec((len(rows[0]), inputs), self.spec.use), part_format, rows
                )

    def to_floats(self, part_format: Format) -> Weight:
        """Return the same numbers in a format of floats, which are made some rows at a time."""
        (floats,) = part_format.empty(self.shape, self.device)
        has_experts = len(self.shape) > 2
        items = (
            [self.expert(n) for n in range(self.shape[0])] if has_experts else [self]
        )
        pieces = [piece for item in items for piece in item.split_rows()]
        sizes = [len(each.tensors[0]) for each in pieces]
        rows = torch.split(floats.view(-1, self.shape[-1]), sizes)
        for piece, target in zip(pieces, rows, strict=True):
            target.copy_(piece.dequantize(floats.dtype))
        return replace(self, format=part_format, tensors=(floats,))

    def first_rows(self, number: int) -> Weight:
        """Return its first rows, which are as many or all."""
        spec = TensorSpec((min(number, self.shape[0]), *self.shape[1:]), self.spec.use)
        return Weight(
            spec, self.format, tuple(tensor[:number] for tensor in self.tensors)
        )

    def equals(self, other: Weight) -> bool:
        """Tell whether another holds the same numbers in the same way."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.format == other.format and all(torch.equal(*pair) for pair in pairs)

    def expert(self, number: int) -> Weight:
        """Return that of one of its experts."""
        spec = TensorSpec(self.shape[1:], self.spec.use)
        return replace(
            self, spec=spec, tensors=tuple(tensor[number] for tensor in self.tensors)
        )


def make_dense_weight(tensor: torch.Tensor, use: Use) -> Weight:
    """Return a tensor of floats as a weight."""
    return Weight(TensorSpec(tuple(tensor.shape), use), Dense(tensor.dtype), (tensor,))

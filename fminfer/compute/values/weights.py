"""Weights as values: what each tensor of a spec is for, and in which format it is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(slots=True, frozen=True)
class KernelForm:
    """What the CPU's kernels multiply: a number of theirs, and the inputs of a block."""

    type: int  # of `KERNEL_TYPES`, or of `Kind` in forms.h
    block: int  # 0: plain floats


class Format(Protocol):
    """How the numbers of a weight are held in memory: in one or several tensors.

    Nobody else opens these tensors. A weight of experts has the same tensors with the
    experts as their first dimension. Products that take a format say so; others get it
    dequantized, which is the reference.
    """

    @property
    def name(self) -> str:
        """What people call it: "bfloat16", "int8"."""

    @property
    def floats(self) -> torch.dtype | None:
        """The dtype of its only tensor, if that has plain floats; None: it has others."""

    @property
    def is_held(self) -> bool:
        """Whether weights stay in it; otherwise they are floats once they are read."""

    @property
    def num_tensors(self) -> int:
        """How many tensors a weight has."""

    @property
    def can_merge(self) -> bool:
        """Whether rows of several matrices can be one weight of it."""

    @property
    def cut_unit(self) -> int:
        """The neighbouring inputs that no cut divides. 0: inputs cannot be cut."""

    @property
    def parts(self) -> tuple[Format, ...]:
        """Itself, or the formats of its rows, from the first to the last."""

    def num_bytes(self, shape: Shape) -> int:
        """Return what a weight of a shape takes."""

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        """Return the tensors of a weight of a shape, without values yet."""

    def fill(self, tensors: Tensors, numbers: torch.Tensor) -> None:
        """Write floats, (…, outputs, inputs), into the tensors of a weight."""

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight's numbers in a dtype, of its shape."""

    def select_rows(self, tensors: Tensors, rows: torch.Tensor) -> Tensors:
        """Return copies of some rows of a matrix, by their numbers."""

    def view_rows(
        self, tensors: Tensors, first: int, last: int
    ) -> tuple[Format, Tensors]:
        """Return views of some rows, all of one part, and its format."""

    def select_expert(self, tensors: Tensors, number: int) -> Tensors:
        """Return views of the tensors of one expert."""

    def cut_inputs(self, tensors: Tensors, inputs: range) -> Tensors:
        """Return the tensors of some inputs, which begin and end with a `cut_unit`."""

    def cut_outputs(self, rows: Sequence[range]) -> Format:
        """Return the format of some rows."""

    def split_parts(
        self, tensors: Tensors, outputs: int
    ) -> list[tuple[Format, Tensors, int]]:
        """Return format, tensors and outputs of each part, from the first rows on."""

    def find_kernel_form(self, inputs: int) -> KernelForm | None:
        """Return what the CPU's kernels multiply it as; None: they do not."""

    def find_order(self, tensors: Tensors) -> torch.Tensor | None:
        """Return the input that each place of a row belongs to; None: all in order."""

    def packed_rows(self, tensors: Tensors) -> torch.Tensor:
        """Return the tensor of rows that the CPU's kernels pack, (…, outputs, …)."""


class RowFormat:
    """What formats share whose tensors all have the rows of a weight, in their order."""

    num_tensors = 1
    can_merge = True

    @property
    def floats(self) -> torch.dtype | None:
        return None

    @property
    def is_held(self) -> bool:
        return True

    @property
    def cut_unit(self) -> int:
        return 1

    @property
    def parts(self: Format) -> tuple[Format, ...]:
        return (self,)

    def select_rows(self, tensors: Tensors, rows: torch.Tensor) -> Tensors:
        return tuple(tensor.index_select(0, rows) for tensor in tensors)

    def view_rows(
        self: Format, tensors: Tensors, first: int, last: int
    ) -> tuple[Format, Tensors]:
        return self, tuple(tensor[first:last] for tensor in tensors)

    def select_expert(self, tensors: Tensors, number: int) -> Tensors:
        return tuple(tensor[number] for tensor in tensors)

    def cut_outputs(self: Format, rows: Sequence[range]) -> Format:
        return self

    def split_parts(
        self: Format, tensors: Tensors, outputs: int
    ) -> list[tuple[Format, Tensors, int]]:
        return [(self, tensors, outputs)]

    def find_kernel_form(self, inputs: int) -> KernelForm | None:
        return None

    def find_order(self, tensors: Tensors) -> torch.Tensor | None:
        return None

    def packed_rows(self, tensors: Tensors) -> torch.Tensor:
        return tensors[0]


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
        return self.format.floats is not None

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
        row_tensors = self.format.select_rows(self.tensors, numbers)
        return self.format.dequantize(row_tensors, dtype)

    def split_parts(self) -> list[Weight]:
        """Return the rows of each of its formats as a weight, from its first outputs on."""
        inputs = self.shape[-1]
        outer = self.shape[:-2]
        return [
            replace(
                self,
                spec=TensorSpec((*outer, outputs, inputs), self.spec.use),
                format=part_format,
                tensors=tensors,
            )
            for part_format, tensors, outputs in self.format.split_parts(
                self.tensors, self.shape[-2]
            )
        ]

    def split_rows(self) -> Iterator[Weight]:
        """Give its rows as smaller weights, each small enough to be made floats."""
        step = max(1, DEQUANTIZED_AT_ONCE[self.device.type] // self.shape[-1])
        for part in self.split_parts():
            for first in range(0, part.shape[0], step):
                yield part.view_rows(first, min(first + step, part.shape[0]))

    def view_rows(self, first: int, last: int) -> Weight:
        """Return some of its rows, all of one part."""
        spec = TensorSpec((last - first, *self.shape[1:]), self.spec.use)
        row_format, tensors = self.format.view_rows(self.tensors, first, last)
        return Weight(spec, row_format, tensors)

    def to_floats(self, part_format: Format) -> Weight:
        """Return the same numbers in a format of floats, which are made some rows at a time."""
        (floats,) = part_format.empty(self.shape, self.device)
        has_experts = len(self.shape) > 2
        items = (
            [self.expert(n) for n in range(self.shape[0])] if has_experts else [self]
        )
        pieces = [piece for item in items for piece in item.split_rows()]
        rows = torch.split(
            floats.view(-1, self.shape[-1]), [each.shape[0] for each in pieces]
        )
        for piece, target in zip(pieces, rows, strict=True):
            target.copy_(piece.dequantize(floats.dtype))
        return replace(self, format=part_format, tensors=(floats,))

    def first_rows(self, number: int) -> Weight:
        """Return its first rows, which are as many or all."""
        return self.view_rows(0, min(number, self.shape[0]))

    def equals(self, other: Weight) -> bool:
        """Tell whether another holds the same numbers in the same way."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.format == other.format and all(torch.equal(*pair) for pair in pairs)

    def expert(self, number: int) -> Weight:
        """Return that of one of its experts."""
        spec = TensorSpec(self.shape[1:], self.spec.use)
        return replace(
            self, spec=spec, tensors=self.format.select_expert(self.tensors, number)
        )

"""Reads whole numbers with scales and zeros: of GPTQ, AWQ and compressed-tensors.

A weight is scale × (number - zero). Neighbouring inputs share scale and zero. With act-order
those do to which `g_idx` gives the same group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from fminfer.compute.formats.block_rows import Blocks, split_last_dimension
from fminfer.compute.formats.ordered import Ordered
from fminfer.compute.formats.published_rows import (
    make_whole_numbers,
    pack_whole_numbers,
)
from fminfer.compute.values.weights import Format, Shape, Tensors
from fminfer.core.errors import CheckpointError
from fminfer.models.holding import StoredPart

Tensor = torch.Tensor
SCALE_TYPES = ("F16", "BF16", "F32")
BLOCK_SIZES = (128, 64, 32)  # of inputs that kernels multiply
WORD = 32  # bits into which numbers are packed
FETCH_AGAIN = "Fetch the file again, or take another copy of the model"


@dataclass(slots=True, frozen=True)
class PackedMatrix:
    """How a matrix of whole numbers is stored, (outputs, inputs) or (outputs, groups)."""

    is_turned: bool  # its outputs are its columns
    # along which numbers of a word follow each other; None: each has a byte, less 128
    packed_dim: int | None
    # AWQ's: a word has those with an even place first
    has_even_first: bool = False

    @property
    def type(self) -> str:
        return "I8" if self.packed_dim is None else "I32"

    def stored_shape(self, shape: Shape, bits: int) -> Shape:
        """Return the shape of the stored tensor."""
        sizes = [*reversed(shape)] if self.is_turned else [*shape]
        if self.packed_dim is not None:
            sizes[self.packed_dim] = -(-sizes[self.packed_dim] * bits // WORD)
        return tuple(sizes)

    def unpack(self, stored: Tensor, shape: Shape, bits: int) -> Tensor:
        """Return the numbers, from 0 to 2^bits - 1, of a shape that begins with outputs."""
        if self.packed_dim is None:
            numbers = stored.view(torch.uint8) ^ 128
        else:
            words = stored.mT if self.packed_dim == 0 else stored
            numbers = _split_words(words, bits)
            if self.has_even_first:
                numbers = split_last_dimension(numbers, -1, 2, 4).mT.flatten(-3)
            numbers = numbers.mT if self.packed_dim == 0 else numbers
        numbers = numbers.mT if self.is_turned else numbers
        return numbers[: shape[0], : shape[1]]


def _split_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of words, (…, words), the lowest bits first."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


@dataclass(slots=True, frozen=True)
class WholeLayout:
    """Names and layouts of the stored tensors of a matrix."""

    numbers_name: str
    scales_name: str
    zeros_name: str
    order_name: str
    numbers: PackedMatrix
    zeros: PackedMatrix


GPTQ = WholeLayout(
    numbers_name="qweight",
    scales_name="scales",
    zeros_name="qzeros",
    order_name="g_idx",
    numbers=PackedMatrix(is_turned=True, packed_dim=0),
    zeros=PackedMatrix(is_turned=True, packed_dim=1),
)
_AWQ_MATRIX = PackedMatrix(is_turned=True, packed_dim=1, has_even_first=True)
AWQ = WholeLayout(
    numbers_name="qweight",
    scales_name="scales",
    zeros_name="qzeros",
    order_name="",
    numbers=_AWQ_MATRIX,
    zeros=_AWQ_MATRIX,
)
PACKED = WholeLayout(
    numbers_name="weight_packed",
    scales_name="weight_scale",
    zeros_name="weight_zero_point",
    order_name="weight_g_idx",
    numbers=PackedMatrix(is_turned=False, packed_dim=1),
    zeros=PackedMatrix(is_turned=False, packed_dim=0),
)
BYTES = WholeLayout(
    numbers_name="weight",
    scales_name="weight_scale",
    zeros_name="weight_zero_point",
    order_name="weight_g_idx",
    numbers=PackedMatrix(is_turned=False, packed_dim=None),
    zeros=PackedMatrix(is_turned=False, packed_dim=None),
)


@dataclass(slots=True, frozen=True)
class WholeScheme:
    """What a config says of modules whose weights are whole numbers."""

    layout: WholeLayout
    bits: int
    group: int  # inputs that share a scale; 0: all of a row
    is_ordered: bool = False  # act-order: inputs of a group lie anywhere in a row
    has_zeros: bool = True  # else every zero is the middle
    # of what is stored as a zero: 1 in GPTQ's first version
    added: int = 0


@dataclass(slots=True, frozen=True)
class WholeReader:
    """Reads a matrix into rows of blocks, or into floats where blocks do not fit its rows."""

    scheme: WholeScheme
    shape: Shape  # outputs, inputs
    format: Format
    block: int  # inputs of one block; 0: it becomes floats

    @property
    def group(self) -> int:
        return self.scheme.group or self.shape[1]

    @property
    def grouped_shape(self) -> Shape:
        """Outputs and groups, which have scales and zeros."""
        return self.shape[0], -(-self.shape[1] // self.group)

    @property
    def scales_shape(self) -> Shape:
        """The same as scales are stored."""
        is_turned = self.scheme.layout.numbers.is_turned
        return self.grouped_shape[::-1] if is_turned else self.grouped_shape

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, StoredPart]:
        scheme = self.scheme
        layout = scheme.layout
        module = name.removesuffix("weight")
        parts: dict[str, StoredPart] = {
            module + layout.numbers_name: (
                (layout.numbers.type,),
                layout.numbers.stored_shape(shape, scheme.bits),
            ),
            module + layout.scales_name: (SCALE_TYPES, self.scales_shape),
        }
        if scheme.has_zeros or layout is BYTES:
            zeros_shape = layout.zeros.stored_shape(self.grouped_shape, scheme.bits)
            parts[module + layout.zeros_name] = (
                (layout.zeros.type,) if scheme.has_zeros else (layout.zeros.type, ""),
                zeros_shape,
            )
        if layout.order_name:
            order_types = ("I32",) if scheme.is_ordered else ("I32", "")
            parts[module + layout.order_name] = (order_types, shape[1:])
        return parts

    def read(self, stored: Mapping[str, Tensor], *, is_transposed: bool) -> Tensors:
        layout = self.scheme.layout
        by_leaf = {name.rpartition(".")[2]: name for name in stored}
        scales = read_scales(stored, by_leaf[layout.scales_name], self.scales_shape)
        scales = scales.mT if layout.numbers.is_turned else scales
        zeros_name = by_leaf.get(layout.zeros_name)
        zeros = self._unpack_zeros(None if zeros_name is None else stored[zeros_name])
        groups = torch.arange(self.shape[1], dtype=torch.int32) // self.group
        order_name = by_leaf.get(layout.order_name)
        # compressed-tensors writes -1 where no order was found, as of experts without tokens
        if order_name is not None and not (stored[order_name] == -1).all():
            groups = self._check_groups(order_name, stored[order_name], groups)
        numbers = layout.numbers.unpack(
            stored[by_leaf[layout.numbers_name]], self.shape, self.scheme.bits
        )
        if not self.block:
            floats = scales[:, groups] * (numbers.float() - zeros[:, groups])
            return (floats.view(torch.uint8),)
        return self._pack(numbers, scales, zeros, groups)

    def _pack(
        self, numbers: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor
    ) -> Tensors:
        """Return rows of blocks, and with act-order the input of each place of a row."""
        order: Tensors = ()
        if self.scheme.is_ordered:
            places = groups.argsort(stable=True)
            numbers = numbers[:, places]
            groups = groups[places]
            order = (places.int(),)
        group_of_block = groups[:: self.block]
        rows = pack_whole_numbers(
            split_last_dimension(numbers, -1, self.block),
            scales[:, group_of_block],
            zeros[:, group_of_block],
            self.scheme.bits,
        )
        return (rows, *order)

    def _unpack_zeros(self, stored: Tensor | None) -> Tensor:
        """Return the zero of each group, (outputs, groups); None: the middle of all numbers."""
        scheme = self.scheme
        middle = 1 << scheme.bits - 1
        if stored is None:
            return torch.full(self.grouped_shape, middle, dtype=torch.int16)
        zeros = scheme.layout.zeros.unpack(stored, self.grouped_shape, scheme.bits)
        return (zeros.short() + scheme.added) % (2 * middle)

    def _check_groups(self, name: str, groups: Tensor, in_order: Tensor) -> Tensor:
        """Return the group of each input, as the file has it, if each has as many inputs."""
        is_ordered = self.scheme.is_ordered
        if torch.equal(groups.sort().values if is_ordered else groups, in_order):
            return groups
        where = "anywhere in a row" if is_ordered else "one group after the other"
        raise CheckpointError(
            f"tensor {name!r} puts inputs into groups {int(groups.min())} to "
            f"{int(groups.max())}, otherwise than quantization_config says: 0 to "
            f"{int(in_order[-1])}, each with {self.group} inputs, {where}. Use the config.json "
            "and the files that were published together"
        )


def read_scales(stored: Mapping[str, Tensor], name: str, shape: Shape) -> Tensor:
    """Return stored scales in float32, in a shape that may have other dimensions of 1.

    Raises:
        CheckpointError: one is nan or infinite.
    """
    scales = stored[name].float().reshape(shape)
    if not scales.isfinite().all():
        raise CheckpointError(
            f"tensor {name!r} has scales that are nan or infinite. {FETCH_AGAIN}"
        )
    return scales


def make_float_rows(name: str) -> Blocks:
    """Return the format of rows that are read into float32, and then held as other floats."""
    return Blocks(name, block=1, block_bytes=4, unpack=_view_floats)


def _view_floats(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def choose_block(group: int, inputs: int, sizes: tuple[int, ...]) -> int | None:
    """Return the inputs of a block for groups of so many; 0: a row; None: none fits."""
    if not 0 < group <= inputs:
        return 0 if inputs % min(sizes) == 0 else None
    fitting = (size for size in sizes if group % size == 0 and inputs % size == 0)
    return next(fitting, None)


@cache
def make_whole_reader(scheme: WholeScheme, shape: Shape) -> WholeReader:
    """Return the reader of matrices of a shape."""
    inputs = shape[1]
    block = choose_block(scheme.group, inputs, BLOCK_SIZES)
    is_uneven = scheme.is_ordered and inputs % (scheme.group or inputs) != 0
    if block is None or is_uneven:
        floats = make_float_rows(f"whole{scheme.bits}")
        return WholeReader(scheme, shape, floats, block=0)
    rows: Format = make_whole_numbers(scheme.bits, block)
    if scheme.is_ordered:
        rows = Ordered(rows)
    return WholeReader(scheme, shape, rows, block or inputs)

"""Products with weights: in plain torch, and with weights that are packed once.

A plain product rearranges its operands at every call, which for few rows takes longer than the
product itself: packed, 8 rows of 3072 × 768 are twice as fast. MKL packs float32, and oneDNN
bfloat16; the CPU's own kernel packs any format, and is taken where it is faster.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn

from fminfer.compute.formats.dense import Dense, make_dense_weight
from fminfer.compute.kernels.library_calls import PackedCall, ProductCall
from fminfer.compute.trial import Candidate, Limits, Pair, Trial
from fminfer.compute.values.weights import (
    KERNEL_TYPES,
    Format,
    Function,
    KernelForm,
    Weight,
)
from fminfer.machine.processor import has_unit

CHECKED_ROWS = [1, 5, 48]
MAX_ERROR: Limits = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of the largest result
TRIED_OUTPUTS = 150
UNROUNDED_ERROR = 1e-4  # the error is a part of the largest result
# MKL's packing is tuned for so many rows. torch's operator wants their number at every call and
# packs for one; the packed form itself serves any number (tests/compute/test_packed_linear).
MKL_ROWS = 512
# oneDNN divides more rows than this, of so few outputs, badly between two threads: 512 rows of
# 3072, 768 outputs, take 2.4 ms at once and 1.5 in halves (two AMX cores; more were not tried).
NARROW = range(512, 897)
MOST_NARROW_ROWS = 448


@dataclass(slots=True, frozen=True)
class Linear:
    """The product x·Wᵀ + b of x, (…, inputs): what is asked for, and itself its plain form."""

    weight: Weight  # (outputs, inputs)
    bias: torch.Tensor | None  # (outputs,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return it in x's type; some rows of blocks are made floats at a time."""
        weight = self.weight
        bias = self.bias
        if weight.is_plain:
            return nn.functional.linear(x, weight.dequantize(x.dtype), bias)
        parts = [
            nn.functional.linear(x, each.dequantize(x.dtype))
            for each in weight.split_rows()
        ]
        product = torch.cat(parts, -1)
        return product if bias is None else product + bias

    def make_trial(self, dtype: torch.dtype) -> Trial[Function]:
        """Return how a product of rows of a dtype is tried; each shape and format is once."""
        outputs, inputs = shape = self.weight.shape
        pairs = partial(compute_product_pairs, linear=self, dtype=dtype)
        key = shape, self.weight.format, self.weight.is_lent
        return Trial(f"products of {outputs} × {inputs}", pairs, MAX_ERROR[dtype], key)


def compute_product_pairs(
    product: Function,
    linear: Linear,
    dtype: torch.dtype,
    summed: torch.dtype | None = None,
) -> Iterator[Pair]:
    """Multiply few rows and some, of a dtype, packed and plain; `summed` is the plain dtype."""
    inputs = linear.weight.shape[1]
    numbers = [torch.linspace(-1, 1, num * inputs, dtype=dtype) for num in CHECKED_ROWS]
    x = torch.cat(numbers).view(-1, inputs)
    x = x * torch.cos(torch.arange(inputs, dtype=torch.float32)).to(dtype)
    plain = linear(x.to(summed or dtype))  # blocks unpack once
    for rows, expected in zip(
        torch.split(x, CHECKED_ROWS), torch.split(plain, CHECKED_ROWS), strict=True
    ):
        yield product(rows), expected


def is_on_cpu(weight: Weight) -> bool:
    """Tell whether there is something to pack, on a CPU."""
    return weight.device.type == "cpu" and math.prod(weight.shape) > 0


def can_torch_pack(weight_format: Format, dtype: torch.dtype, *, is_fast: bool) -> bool:
    """Tell whether a library packs weights of a format, for rows of a dtype.

    Without units for bfloat16 (`is_fast`) oneDNN is no faster than torch.
    """
    if weight_format != Dense(dtype):
        return False
    if dtype == torch.float32:
        return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return dtype == torch.bfloat16 and is_fast and onednn_packs_bfloat16()


@cache
def onednn_packs_bfloat16() -> bool:
    """Try whether torch's oneDNN packs bfloat16: on some processors it refuses to."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.ones((32, 32), dtype=torch.bfloat16, device="cpu")
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def pack_by_mkl(linear: Linear) -> Function:
    """Return a product with a weight of float32, packed."""
    weight = linear.weight.plain.contiguous()
    bias = linear.bias
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_ROWS)
    nothing = weight.new_full((1,), float("nan")).expand(weight.shape)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        out: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, nothing, bias, rows)
        return out

    return multiply


def pack_by_onednn(linear: Linear) -> Function:
    """Return a product with a weight of bfloat16, packed."""
    weight = linear.weight.plain.contiguous()
    bias = linear.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    is_narrow = len(weight) in NARROW

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if is_narrow and rows > MOST_NARROW_ROWS and torch.get_num_threads() == 2:
            halves = x.reshape(rows, -1).tensor_split(2)
            return torch.cat([multiply(half) for half in halves]).view(
                *x.shape[:-1], -1
            )
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, packed, bias, "none", [], ""
        )
        return out

    return multiply


def make_library_candidates(
    dtype: torch.dtype, *, is_fast: bool
) -> list[Candidate[Linear, Function]]:
    """Return the products of torch's libraries, for rows of a dtype; see `can_torch_pack`."""

    def serves(linear: Linear) -> bool:
        weight = linear.weight
        pays = is_on_cpu(weight) and not weight.is_lent  # it stays in memory
        return pays and can_torch_pack(weight.format, dtype, is_fast=is_fast)

    make = pack_by_mkl if dtype == torch.float32 else pack_by_onednn
    return [Candidate(make, partial(Linear.make_trial, dtype=dtype), serves)]


@dataclass(slots=True, frozen=True)
class PackedPart:
    """Some outputs of a weight, or of all experts, in the order of the kernel (panels.h).

    A panel is as many outputs as registers hold: `ProductKernel.panel`, here 4. A unit is
    32 bits of an output: one number of float32, or two of bfloat16. Zeros fill the last
    panel. Of a weight of 6 outputs with 3 units each::

        stored                  packed
        output 0   a0 a1 a2     panel 0   a0 b0 c0 d0   a1 b1 c1 d1   a2 b2 c2 d2
        output 1   b0 b1 b2     panel 1   e0 f0 0  0    e1 f1 0  0    e2 f2 0  0
        …
        output 5   f0 f1 f2

    Of quantized weights a panel has block after block, each with the scales of all its
    outputs before its numbers (forms.h, values.h)::

        panel 0   scales of block 0 | numbers of block 0 | scales of block 1 | …
    """

    format: Format
    # (outputs, to whole panels, inputs); of blocks (panels, bytes)
    packed: torch.Tensor
    outputs: int
    inputs: int
    is_lent: bool = False  # as stored; the kernel packs each panel as it multiplies

    @property
    def call(self) -> PackedCall:
        """It as the kernel takes it."""
        form = self.form
        return PackedCall(
            self.packed.data_ptr(), self.outputs, form.type, form.block, self.is_lent
        )

    @property
    def form(self) -> KernelForm:
        """What the kernel multiplies it as."""
        form = self.format.find_kernel_form(self.inputs)
        assert form is not None, f"{self.format.name} is not packed"
        return form


@dataclass(slots=True, frozen=True)
class PackedProduct:
    """The product x·Wᵀ + b, with W packed, in one format or in several.

    Rows are of W's type, or float32: then 16-bit weights are widened where they are multiplied.
    Rows of either type are multiplied by blocks.
    """

    kernel: ProductKernel
    parts: tuple[PackedPart, ...]  # one below the other
    bias: torch.Tensor | None  # (outputs and a panel,) float32
    inputs: int
    outputs: int
    calls: ctypes.Array[PackedCall]  # of the parts
    least: torch.dtype  # of rows: float32 where a part is, for it is never rounded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (…, outputs) of x, (…, inputs), in x's type."""
        return self._multiply(x, x.dtype)

    def multiply_unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums as they are, in float32, of x in float32 or bfloat16."""
        return self._multiply(
            x.to(torch.promote_types(x.dtype, self.least)), torch.float32
        )

    def dequantize_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of W, (n, inputs) in its type, for (n,) ids; of blocks in float32."""
        (part,) = self.parts  # an embedding is not joined
        if part.form.block:
            call = part.call
            ids = ids.contiguous()
            out = torch.empty(
                (len(ids), part.inputs), dtype=torch.float32, device="cpu"
            )
            self.kernel.library.fminfer_unpack_rows(
                call.type,
                call.weight,
                part.inputs,
                call.block,
                ids.data_ptr(),
                len(ids),
                out.data_ptr(),
                torch.get_num_threads(),
            )
            return out
        panel = self.kernel.panel
        units = part.packed.view(torch.int32)
        panels = units.view(-1, units.shape[1], panel)
        return panels[ids // panel, :, ids % panel].view(part.packed.dtype)

    def _multiply(self, x: torch.Tensor, out_type: torch.dtype) -> torch.Tensor:
        assert x.is_cpu and x.shape[-1] == self.inputs, "rows"
        assert x.dtype in (torch.float32, self.least), "rows"
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs), dtype=out_type)
        product = ProductCall(
            x=x.data_ptr(),
            parts=ctypes.addressof(self.calls),
            bias=None if self.bias is None else self.bias.data_ptr(),
            out=out.data_ptr(),
            num_parts=len(self.calls),
            rows=x.numel() // self.inputs,
            inputs=self.inputs,
            outputs=self.outputs,
            x_type=KERNEL_TYPES[x.dtype],
            out_type=KERNEL_TYPES[out_type],
            num_threads=torch.get_num_threads(),
        )
        if self.kernel.multiply(ctypes.byref(product)):
            raise MemoryError("no memory for a product's working space")
        return out


@dataclass(slots=True, frozen=True)
class OrderedProduct:
    """Products side by side with rows of one weight, which stand in orders of their own."""

    # and the input of each place of a row, (inputs,) int32; None: inputs are in order
    products: tuple[tuple[torch.Tensor | None, PackedProduct], ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (…, outputs) of x, (…, inputs), in x's type."""
        outs = [
            product(x if order is None else x.index_select(-1, order))
            for order, product in self.products
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


@dataclass(slots=True, frozen=True)
class PackedItems:
    """The products of several items, each with a weight of its own, all packed."""

    multiply_items: Callable[..., int]  # of the library
    part: PackedPart  # of all items
    num_items: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, items, outputs) of x, (rows, items, inputs), in x's type."""
        rows = len(x)
        part = self.part
        assert x.is_cpu and x.shape == (rows, self.num_items, part.inputs), "items"
        assert x.dtype == part.packed.dtype, "items"
        by_item = x.transpose(0, 1).contiguous()
        out = x.new_empty((self.num_items, rows, part.outputs))
        product = ProductCall(
            x=by_item.data_ptr(),
            parts=ctypes.addressof(call := part.call),
            bias=None,
            out=out.data_ptr(),
            num_parts=1,
            rows=rows,
            inputs=part.inputs,
            outputs=part.outputs,
            x_type=call.type,
            out_type=call.type,
            num_threads=torch.get_num_threads(),
        )
        if self.multiply_items(ctypes.byref(product), self.num_items):
            raise MemoryError("no memory for a product's working space")
        return out.transpose(0, 1)


def multiply_items(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply (rows, items, inputs) by each item's weight, (items, inputs, outputs)."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


class ProductKernel:
    """The products of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.multiply = library.fminfer_multiply
        self.panel: int = library.fminfer_panel()  # outputs of a panel

    @staticmethod
    def can_pack(weight: Weight) -> bool:
        """Tell whether it can multiply with such a weight at all: of whole units of 32 bits."""
        formats = weight.format.parts
        is_even = weight.shape[-1] % 2 == 0
        fits = all(
            can_sum_in_float32(each) and (is_even or each == Dense(torch.float32))
            for each in formats
        )
        return fits and is_on_cpu(weight)

    def make_product(self, linear: Linear) -> PackedProduct | OrderedProduct:
        """Return the product with a weight that `can_pack`, whatever order its inputs have.

        Neighbouring parts with the same order are one product.
        """
        if not has_order(linear.weight):
            return self.pack_weight(linear.weight, linear.bias)
        assert self.can_pack(linear.weight), "a weight to pack"
        products = []
        first = 0
        for order, parts in _group_by_order(linear.weight):
            last = first + sum(part.shape[0] for part in parts)
            bias = None if linear.bias is None else linear.bias[first:last]
            products.append((order, self._pack_parts(parts, bias)))
            first = last
        return OrderedProduct(tuple(products))

    def pack_weight(self, weight: Weight, bias: torch.Tensor | None) -> PackedProduct:
        """Return the product with a weight that `can_pack`, whose inputs are in order."""
        assert self.can_pack(weight) and not has_order(weight), "a weight to pack"
        return self._pack_parts(weight.split_parts(), bias)

    def _pack_parts(
        self, weights: list[Weight], bias: torch.Tensor | None
    ) -> PackedProduct:
        """Return the product with parts of a weight, one below the other."""
        outputs = sum(part.shape[0] for part in weights)
        inputs = weights[0].shape[1]
        parts = tuple(
            PackedPart(
                part.format,
                part.plain.contiguous(),
                part.shape[0],
                inputs,
                is_lent=True,
            )
            if part.is_lent and part.is_plain
            else self.pack_part(part, 1)
            for part in weights
        )
        biases = None
        if bias is not None:
            assert bias.shape == (outputs,), "a bias"
            biases = torch.zeros(
                outputs + self.panel, dtype=torch.float32, device="cpu"
            )
            biases[:outputs] = bias.detach()
        calls = (PackedCall * len(parts))(*[part.call for part in parts])
        has_float32 = any(part.format == Dense(torch.float32) for part in parts)
        least = torch.float32 if has_float32 else torch.bfloat16
        return PackedProduct(self, parts, biases, inputs, outputs, calls, least)

    def pack_part(self, weight: Weight, halves: int) -> PackedPart:
        """Pack a weight of one format, (…, halves * outputs, inputs), each half for itself."""
        inputs = weight.shape[-1]
        tensor = weight.format.packed_rows(weight.tensors).contiguous()
        tensor = tensor.view(-1, *tensor.shape[-2:])
        items, all_outputs, row = tensor.shape
        outputs = all_outputs // halves
        num_threads = torch.get_num_threads()
        panels = items * halves * -(-outputs // self.panel)
        sizes = (items, halves, outputs)
        form = weight.format.find_kernel_form(inputs)
        assert form is not None, f"{weight.format.name} is not packed"
        if form.block:
            block = inputs, form.block
            size = self.library.fminfer_panel_bytes(form.type, *block)
            assert size, f"forms.h has the kind {form.type}"
            packed = tensor.new_empty((panels, size))
            source = form.type, tensor.data_ptr(), *sizes, *block
            self.library.fminfer_pack_blocks(*source, packed.data_ptr(), num_threads)
        else:
            packed = tensor.new_empty((panels * self.panel, row))
            floats = tensor.data_ptr(), *sizes, row * tensor.itemsize // 4
            self.library.fminfer_pack_experts(*floats, packed.data_ptr(), num_threads)
        return PackedPart(weight.format, packed, outputs, inputs)


def has_order(weight: Weight) -> bool:
    """Tell whether inputs of some of its rows stand in an order of their own."""
    return any(
        part.format.find_order(part.tensors) is not None
        for part in weight.split_parts()
    )


def _group_by_order(weight: Weight) -> list[tuple[torch.Tensor | None, list[Weight]]]:
    """Return the parts of a weight, and the order of their inputs, which neighbours share."""
    groups: list[tuple[torch.Tensor | None, list[Weight]]] = []
    for part in weight.split_parts():
        order = part.format.find_order(part.tensors)
        last = groups[-1][0] if groups else None
        is_same = order is last or (
            order is not None and last is not None and torch.equal(order, last)
        )
        if not groups or not is_same:
            groups.append((order, []))
        groups[-1][1].append(part)
    return groups


def is_kernel_faster(weight_format: Format, dtype: torch.dtype) -> bool:
    """Tell whether it is faster than other products of a format, for rows of a dtype.

    Of bfloat16 with rows of bfloat16 oneDNN's are, where the processor has tiles (AMX).
    """
    formats = weight_format.parts
    if dtype not in KERNEL_TYPES or not all(map(can_sum_in_float32, formats)):
        return False
    if dtype == torch.float32:
        return True
    is_best = weight_format != Dense(torch.bfloat16) or not has_unit("amx_bf16")
    return is_best and Dense(torch.float32) not in formats  # which is never rounded


def can_sum_in_float32(weight_format: Format) -> bool:
    """Tell whether the kernel's sums may stay float32 for weights of a format, as a
    head's do."""
    return weight_format.find_kernel_form(0) is not None


def make_product_candidate(
    library: ctypes.CDLL, dtype: torch.dtype
) -> Candidate[Linear, Function]:
    """Return the kernel's products, for rows of a dtype."""
    kernel = ProductKernel(library)

    def serves(linear: Linear) -> bool:
        return is_kernel_faster(linear.weight.format, dtype) and kernel.can_pack(
            linear.weight
        )

    return Candidate(
        kernel.make_product, partial(Linear.make_trial, dtype=dtype), serves
    )


def make_head_candidate(
    library: ctypes.CDLL, dtype: torch.dtype
) -> Candidate[Linear, PackedProduct]:
    """Return products whose sums stay float32, tried with the weight's first outputs."""
    kernel = ProductKernel(library)

    def serves(linear: Linear) -> bool:
        weight = linear.weight
        is_served = can_sum_in_float32(weight.format) and kernel.can_pack(weight)
        return is_served and not has_order(weight)

    def pack(linear: Linear) -> PackedProduct:
        return kernel.pack_weight(linear.weight, linear.bias)

    def trial(linear: Linear) -> Trial[PackedProduct]:
        bias = None if linear.bias is None else linear.bias[:TRIED_OUTPUTS]
        some = Linear(linear.weight.first_rows(TRIED_OUTPUTS), bias)

        def pairs(_: PackedProduct) -> Iterator[Pair]:
            product = pack(some)
            rows = product.dequantize_rows(torch.arange(product.outputs))
            yield rows, some.weight.dequantize(rows.dtype)
            yield from compute_product_pairs(
                product.multiply_unrounded, some, dtype, torch.float32
            )

        return Trial(
            "products in float32", pairs, UNROUNDED_ERROR, linear.weight.format.name
        )

    return Candidate(pack, trial, serves)


def make_items_candidate(
    library: ctypes.CDLL, dtype: torch.dtype
) -> Candidate[torch.Tensor, Function]:
    """Return the kernel's `multiply_items`, for rows and weights of a dtype."""
    kernel = ProductKernel(library)

    def pack(weight: torch.Tensor) -> PackedItems:
        num_items = len(weight)
        turned = make_dense_weight(weight.transpose(1, 2), "product")
        part = kernel.pack_part(turned, 1)
        return PackedItems(library.fminfer_multiply_items, part, num_items)

    def trial(weight: torch.Tensor) -> Trial[Function]:
        num_items, inputs, _ = weight.shape
        numbers = torch.linspace(-1, 1, CHECKED_ROWS[1] * num_items * inputs)
        x = numbers.to(dtype).view(-1, num_items, inputs)

        def pairs(product: Function) -> Iterator[Pair]:
            yield product(x), multiply_items(x, weight)

        return Trial("products of heads", pairs, MAX_ERROR[dtype], weight.shape)

    def serves(weight: torch.Tensor) -> bool:
        has_units = weight.shape[1] % 2 == 0 or dtype == torch.float32
        return has_units and weight.dtype == dtype and dtype in KERNEL_TYPES

    return Candidate(pack, trial, serves)

"""Calls the CPU's products of rows, float32 or bfloat16, with packed weights of any format."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fminfer.compute.kernels.calls import PackedCall, ProductCall
from fminfer.compute.layers.products import Linear, is_on_cpu, product_pairs
from fminfer.compute.quantized.block_format import Blocks, Joined, parts_of
from fminfer.compute.trial import Candidate, Pair, Trial
from fminfer.compute.weights import KERNEL_TYPES, Dense, Format, Function, Weight
from fminfer.machine.processor import has_unit

TRIED_OUTPUTS, UNROUNDED_ERROR = 150, 1e-4  # the error is a part of the largest result


@dataclass(slots=True, frozen=True)
class PackedPart:
    """Some outputs of a weight, or of all experts, in one format and in the kernel's own order."""

    held: Format
    packed: torch.Tensor  # (outputs, to whole panels, inputs); of blocks (panels, bytes)
    outputs: int
    inputs: int
    is_lent: bool = False  # as stored; the kernel packs each panel as it multiplies

    @property
    def call(self) -> PackedCall:
        """It as the kernel takes it."""
        address = self.packed.data_ptr()
        if isinstance(self.held, Blocks):
            block = self.held.block or self.inputs
            return PackedCall(address, self.outputs, self.held.kind, block)
        return PackedCall(address, self.outputs, KERNEL_TYPES[self.packed.dtype], 0, self.is_lent)


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

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums as they are, in float32, of x in float32 or bfloat16."""
        return self._multiply(x.to(torch.promote_types(x.dtype, self.least)), torch.float32)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of W, (n, inputs) in its type, for (n,) ids; of blocks in float32."""
        (part,) = self.parts  # an embedding is not joined
        if isinstance(part.held, Blocks):
            call, ids = part.call, ids.contiguous()
            out = torch.empty((len(ids), part.inputs), dtype=torch.float32, device="cpu")
            how = call.type, call.weight, part.inputs, call.block
            wanted = ids.data_ptr(), len(ids), out.data_ptr(), torch.get_num_threads()
            self.kernel.library.fminfer_unpack_rows(*how, *wanted)
            return out
        panel, units = self.kernel.panel, part.packed.view(torch.int32)
        panels = units.view(-1, units.shape[1], panel)
        return panels[ids // panel, :, ids % panel].view(part.packed.dtype)

    def _multiply(self, x: torch.Tensor, out_type: torch.dtype) -> torch.Tensor:
        assert x.is_cpu and x.shape[-1] == self.inputs, "rows"
        assert x.dtype in (torch.float32, self.least), "rows"
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs), dtype=out_type)
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = x.data_ptr(), ctypes.addressof(self.calls), bias, out.data_ptr()
        sizes = len(self.calls), x.numel() // self.inputs, self.inputs, self.outputs
        types = KERNEL_TYPES[x.dtype], KERNEL_TYPES[out_type]
        product = ProductCall(*addresses, *sizes, *types, torch.get_num_threads())
        if self.kernel.multiply(ctypes.byref(product)):
            raise MemoryError("no memory for a product's working space")
        return out


class ProductKernel:
    """The products of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.multiply = library, library.fminfer_multiply
        self.panel: int = library.fminfer_panel()  # outputs of a panel

    @staticmethod
    def can_pack(weight: Weight) -> bool:
        """Tell whether it can multiply with such a weight at all: of whole units of 32 bits."""
        held, is_even = [each for each, _ in parts_of(weight)], weight.shape[-1] % 2 == 0
        fits = all(head_takes(h) and (is_even or h == Dense(torch.float32)) for h in held)
        return fits and is_on_cpu(weight)

    def make(self, asked: Linear) -> PackedProduct:
        return self.pack(asked.weight, asked.bias)

    def pack(self, weight: Weight, bias: torch.Tensor | None) -> PackedProduct:
        """Return the product with a weight that `can_pack`."""
        assert self.can_pack(weight), "a weight to pack"
        outputs, inputs = weight.shape
        own = zip(parts_of(weight), weight.tensors, strict=True)
        parts = tuple(
            PackedPart(held, t.contiguous(), len(t), inputs, is_lent=True)
            if weight.is_lent and isinstance(held, Dense)
            else self.pack_part(held, t[None], 1, inputs)
            for (held, _), t in own
        )
        biases = None
        if bias is not None:
            assert bias.shape == (outputs,), "a bias"
            biases = torch.zeros(outputs + self.panel, dtype=torch.float32, device="cpu")
            biases[:outputs] = bias.detach()
        calls = (PackedCall * len(parts))(*[part.call for part in parts])
        has_float32 = any(part.held == Dense(torch.float32) for part in parts)
        least = torch.float32 if has_float32 else torch.bfloat16
        return PackedProduct(self, parts, biases, inputs, outputs, calls, least)

    def pack_part(self, held: Format, tensor: torch.Tensor, halves: int, inputs: int) -> PackedPart:
        """Pack the only tensor of a weight, (items, halves * outputs, …), each half for itself."""
        tensor = tensor.contiguous()
        items, all_outputs, row = tensor.shape
        outputs, num_threads = all_outputs // halves, torch.get_num_threads()
        panels, sizes = items * halves * -(-outputs // self.panel), (items, halves, outputs)
        if isinstance(held, Blocks):
            block = inputs, held.block or inputs
            size = self.library.fminfer_panel_bytes(held.kind, *block)
            assert size, f"forms.h has the kind {held.kind}"
            packed = tensor.new_empty((panels, size))
            source = held.kind, tensor.data_ptr(), *sizes, *block
            self.library.fminfer_pack_blocks(*source, packed.data_ptr(), num_threads)
        else:
            packed = tensor.new_empty((panels * self.panel, row))
            floats = tensor.data_ptr(), *sizes, row * tensor.itemsize // 4
            self.library.fminfer_pack_experts(*floats, packed.data_ptr(), num_threads)
        return PackedPart(held, packed, outputs, inputs)


def kernel_takes(held: Format, dtype: torch.dtype) -> bool:
    """Tell whether it is faster than other products of a format, for rows of a dtype.

    Of bfloat16 with rows of bfloat16 oneDNN's are, where the processor has tiles (AMX).
    """
    own = [each for each, _ in held.parts] if isinstance(held, Joined) else [held]
    if dtype not in KERNEL_TYPES or not all(map(head_takes, own)):
        return False
    if dtype == torch.float32:
        return True
    is_best = held != Dense(torch.bfloat16) or not has_unit("amx_bf16")
    return is_best and Dense(torch.float32) not in own  # which is never rounded


def head_takes(held: Format) -> bool:
    """Tell whether the kernel's sums may stay float32 for weights of a format, as a head's do."""
    if isinstance(held, Dense):
        return held.dtype in KERNEL_TYPES
    return isinstance(held, Blocks) and held.kind is not None


def product_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[Linear, Function]:
    """Return the kernel's products, for rows of a dtype."""
    kernel = ProductKernel(library)

    def serves(asked: Linear) -> bool:
        return kernel_takes(asked.weight.format, dtype) and kernel.can_pack(asked.weight)

    return Candidate(kernel.make, partial(Linear.trial, dtype=dtype), serves)


def head_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[Linear, PackedProduct]:
    """Return products whose sums stay float32, tried with the weight's first outputs."""
    kernel = ProductKernel(library)

    def serves(asked: Linear) -> bool:
        return head_takes(asked.weight.format) and kernel.can_pack(asked.weight)

    def trial(asked: Linear) -> Trial[PackedProduct]:
        bias = None if asked.bias is None else asked.bias[:TRIED_OUTPUTS]
        some = Linear(asked.weight.first_rows(TRIED_OUTPUTS), bias)

        def pairs(_: PackedProduct) -> Iterator[Pair]:
            product = kernel.make(some)
            rows = product.rows(torch.arange(product.outputs))
            yield rows, some.weight.dequantized(rows.dtype)
            yield from product_pairs(product.unrounded, some, dtype, torch.float32)

        return Trial("products in float32", pairs, UNROUNDED_ERROR, asked.weight.format.name)

    return Candidate(kernel.make, trial, serves)

"""Calls the compiled products of rows with packed weights, of float32 or bfloat16 on the CPU.

It knows nothing of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fminfer.compute.linear.products import Linear, product_pairs
from fminfer.compute.trial import Candidate, Pair, Trial
from fminfer.compute.weights import Dense, Format, Function, dense
from fminfer.machine.processor import has_unit

TYPES = {torch.float32: 0, torch.bfloat16: 1}
TRIED_OUTPUTS, UNROUNDED_ERROR = 150, 1e-4  # the error is a part of the largest result


class ProductCall(ctypes.Structure):
    """What the kernel is called with; products.cpp says what each is."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")],
        *[(name, ctypes.c_int64) for name in ("x_type", "weight_type", "out_type", "num_threads")],
    )


@dataclass(slots=True, frozen=True)
class PackedProduct:
    """The product x·Wᵀ + b, with W packed.

    Rows are of W's type, or float32: then 16-bit weights are widened where they are multiplied.
    """

    packed: torch.Tensor  # (outputs, to a whole panel, inputs), in the kernel's own order
    bias: torch.Tensor | None  # (outputs, to a whole panel) float32
    inputs: int
    outputs: int
    multiply: Callable[[ProductCall], int]
    panel: int  # outputs of a panel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (…, outputs) of x, (…, inputs), in x's type.

        Raises:
            MemoryError: there was none for the threads' working space.
        """
        return self._multiply(x, x.dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums as they are, in float32, of x in float32 or bfloat16."""
        return self._multiply(x.to(torch.promote_types(x.dtype, self.packed.dtype)), torch.float32)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of W, (n, inputs) in its type, for (n,) ids, which are below `outputs`."""
        units = self.packed.view(torch.int32)
        panels = units.view(-1, units.shape[1], self.panel)
        return panels[ids // self.panel, :, ids % self.panel].view(self.packed.dtype)

    def _multiply(self, x: torch.Tensor, out_type: torch.dtype) -> torch.Tensor:
        assert x.is_cpu and x.shape[-1] == self.inputs, "rows"
        assert x.dtype in (torch.float32, self.packed.dtype), "rows"
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs), dtype=out_type)
        product = ProductCall(
            x.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            x.numel() // self.inputs,
            self.inputs,
            self.outputs,
            TYPES[x.dtype],
            TYPES[self.packed.dtype],
            TYPES[out_type],
            torch.get_num_threads(),
        )
        if self.multiply(product):
            raise MemoryError("no memory for a product's working space")
        return out


class ProductKernel:
    """The products of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._pack, self._multiply = library.fminfer_pack, library.fminfer_multiply
        self._pack.argtypes = [address, number, number, address, number]
        self._multiply.argtypes = [ctypes.POINTER(ProductCall)]
        library.fminfer_panel.restype = number
        self._panel: int = library.fminfer_panel()

    @staticmethod
    def can_pack(weight: torch.Tensor) -> bool:
        """Tell whether it can multiply with such a weight at all: of whole units of 32 bits."""
        if not weight.is_cpu or weight.numel() == 0 or weight.dtype not in TYPES:
            return False
        return weight.shape[-1] * weight.itemsize % 4 == 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProduct:
        """Return the product x·Wᵀ + b for x of (…, inputs).

        Args:
            weight: (outputs, inputs), one that `can_pack`.
            bias: (outputs,), or None.
        """
        weight = weight.contiguous()
        assert self.can_pack(weight), "a weight to pack"
        outputs, inputs = weight.shape
        num_packed = -(-outputs // self._panel) * self._panel
        packed = weight.new_empty((num_packed, inputs))
        units = inputs * weight.itemsize // 4
        self._pack(weight.data_ptr(), outputs, units, packed.data_ptr(), torch.get_num_threads())
        biases = None
        if bias is not None:
            assert bias.shape == (outputs,), "a bias"
            biases = torch.zeros(num_packed, dtype=torch.float32, device="cpu")
            biases[:outputs] = bias.detach()
        return PackedProduct(packed, biases, inputs, outputs, self._multiply, self._panel)


def kernel_takes(held: Format, dtype: torch.dtype) -> bool:
    """Tell whether it is faster than other products of a format, for rows of a dtype.

    Of bfloat16 with rows of bfloat16 oneDNN's are, where the processor has tiles (AMX).
    """
    if not isinstance(held, Dense) or held.dtype not in TYPES:
        return False
    is_bfloat16 = held.dtype == dtype == torch.bfloat16
    return dtype in (torch.float32, held.dtype) and not (is_bfloat16 and has_unit("amx_bf16"))


def product_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[Linear, Function]:
    """Return the kernel's products, for rows of a dtype."""
    kernel = ProductKernel(library)

    def serves(asked: Linear) -> bool:
        return kernel_takes(asked.weight.format, dtype) and kernel.can_pack(asked.tensor)

    def make(asked: Linear) -> Function:
        return kernel.pack(asked.tensor, asked.bias)

    return Candidate(make, partial(Linear.trial, dtype=dtype), serves)


def head_takes(held: Format) -> bool:
    """Tell whether the kernel's sums may stay float32 for weights of a format, as a head's do."""
    return isinstance(held, Dense) and held.dtype in TYPES


def head_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[Linear, PackedProduct]:
    """Return the kernel's products whose sums stay float32, for rows of a dtype.

    The trial is of the weight's first outputs.
    """
    kernel = ProductKernel(library)

    def serves(asked: Linear) -> bool:
        return head_takes(asked.weight.format) and kernel.can_pack(asked.tensor)

    def make(asked: Linear) -> PackedProduct:
        return kernel.pack(asked.tensor, asked.bias)

    def trial(asked: Linear) -> Trial[PackedProduct]:
        bias = None if asked.bias is None else asked.bias[:TRIED_OUTPUTS]
        some = Linear(dense(asked.tensor[:TRIED_OUTPUTS], "head"), bias)

        def pairs(_: PackedProduct) -> Iterator[Pair]:
            product = make(some)
            yield product.rows(torch.arange(product.outputs)), some.tensor
            yield from product_pairs(product.unrounded, some, dtype, torch.float32)

        return Trial("products in float32", pairs, UNROUNDED_ERROR, asked.weight.format.name)

    return Candidate(make, trial, serves)

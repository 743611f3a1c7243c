"""Calls the compiled products of rows with packed weights, of bfloat16 on the CPU.

They are for processors that multiply pairs of bfloat16 (AVX512-BF16). It knows nothing of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fminfer.processor import has_unit

PANEL = 64  # outputs that are packed together; must agree with kernels/products.cpp
LEAST_PANELS = 4  # a thread; of fewer some threads would have much more to do than others


class Product(ctypes.Structure):
    """What the kernel is called with; products.cpp says what each is."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "num_threads")],
    )


@dataclass(slots=True, frozen=True)
class PackedProduct:
    """The product x·Wᵀ + b, with W packed."""

    packed: torch.Tensor  # (outputs, to a whole panel, inputs), in the kernel's own order
    bias: torch.Tensor | None  # (outputs, to a whole panel) float32
    inputs: int
    outputs: int
    multiply: Callable[[Product], None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (…, outputs) of x, (…, inputs)."""
        assert x.is_cpu and x.dtype == torch.bfloat16 and x.shape[-1] == self.inputs, "rows"
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs))
        product = Product(
            x.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            x.numel() // self.inputs,
            self.inputs,
            self.outputs,
            torch.get_num_threads(),
        )
        self.multiply(product)
        return out


class ProductKernel:
    """The products of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.is_there = bool(library.fminfer_has_products())  # the processor can
        if self.is_there:
            self._pack, self._multiply = library.fminfer_pack, library.fminfer_multiply
            self._pack.argtypes = [address, number, number, address, number]
            self._multiply.argtypes = [ctypes.POINTER(Product)]

    def is_best_for(self, weight: torch.Tensor) -> bool:
        """Tell whether it is faster than oneDNN: it is on a Zen 4; with tiles (AMX) oneDNN is."""
        is_enough = len(weight) >= LEAST_PANELS * PANEL * torch.get_num_threads()
        return is_enough and self.can_pack(weight) and not has_unit("amx_bf16")

    def can_pack(self, weight: torch.Tensor) -> bool:
        """Tell whether it can multiply with such a weight, (outputs, inputs), at all."""
        is_whole = weight.shape[1] % 32 == 0
        return self.is_there and weight.dtype == torch.bfloat16 and is_whole

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProduct:
        """Return the product x·Wᵀ + b for x of (…, inputs).

        Args:
            weight: (outputs, inputs), one that `can_pack`.
            bias: (outputs,), or None.
        """
        weight = weight.contiguous()
        assert weight.is_cpu and self.can_pack(weight), "a weight to pack"
        outputs, inputs = weight.shape
        num_packed = -(-outputs // PANEL) * PANEL
        packed = weight.new_empty((num_packed, inputs))
        self._pack(weight.data_ptr(), outputs, inputs, packed.data_ptr(), torch.get_num_threads())
        biases = None
        if bias is not None:
            assert bias.shape == (outputs,), "a bias"
            biases = torch.zeros(num_packed, dtype=torch.float32, device="cpu")
            biases[:outputs] = bias.detach()

        return PackedProduct(packed, biases, inputs, outputs, self._multiply)

"""Calls the compiled products of rows with packed weights, of bfloat16 on the CPU.

It knows nothing of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

PANEL = 64  # outputs that are packed together, see kernels/products.cpp
LEAST_PANELS = 4  # a thread; of fewer some threads would have much more to do than others
NONE, PAIRS, TILES = range(3)  # what a processor multiplies bfloat16 with


class Product(ctypes.Structure):
    """What the kernel is called with; products.cpp says what each is."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "num_threads")],
    )


class ProductKernel:
    """The products of one built library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.units: int = library.fminfer_product_units()
        if self.units != NONE:
            self._pack, self._multiply = library.fminfer_pack, library.fminfer_multiply
            self._pack.argtypes = [address, number, number, address, number]
            self._multiply.argtypes = [ctypes.POINTER(Product)]

    def is_best_for(self, weight: torch.Tensor) -> bool:
        """Tell whether it is faster than oneDNN, which is where the processor has no tiles."""
        is_enough = len(weight) >= LEAST_PANELS * PANEL * torch.get_num_threads()
        return self.units == PAIRS and is_enough and self.can_pack(weight)

    def can_pack(self, weight: torch.Tensor) -> bool:
        """Tell whether it can multiply with such a weight, (outputs, inputs), at all."""
        is_whole = weight.shape[1] % 32 == 0
        return self.units != NONE and weight.dtype == torch.bfloat16 and is_whole

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
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
            biases = torch.zeros(num_packed, device="cpu")
            biases[:outputs] = bias

        def multiply(x: torch.Tensor) -> torch.Tensor:
            assert x.is_cpu and x.dtype == torch.bfloat16 and x.shape[-1] == inputs, "rows"
            x = x.contiguous()
            out = x.new_empty((*x.shape[:-1], outputs))
            product = Product(
                x.data_ptr(),
                packed.data_ptr(),
                None if biases is None else biases.data_ptr(),
                out.data_ptr(),
                x.numel() // inputs,
                inputs,
                outputs,
                torch.get_num_threads(),
            )
            self._multiply(product)
            return out

        return multiply

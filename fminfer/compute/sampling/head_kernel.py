"""Calls the CPU's compiled head: rows times a weight, float32 or bfloat16, in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch

from fminfer.compute.trial import Candidate, Pair, Trial

HEAD_ERROR = 1e-4


class Arguments(ctypes.Structure):
    """What the kernel is called with; calls.h says what each is."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out", "space")],
        *[
            (name, ctypes.c_int64)
            for name in ("rows", "inputs", "outputs", "x_type", "weight_type")
        ],
        ("num_threads", ctypes.c_int64),
    )


class HeadKernel:
    """The head of one built library."""

    types: ClassVar = {torch.float32: 0, torch.bfloat16: 1}  # of rows and weight; see calls.h

    def __init__(self, library: ctypes.CDLL) -> None:
        number = ctypes.c_int64
        self._multiply, self._space = library.fminfer_head, library.fminfer_head_space
        self._multiply.argtypes = [ctypes.POINTER(Arguments)]
        self._space.argtypes = [number, number, number]
        self._space.restype = number

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x·Wᵀ + b, (rows, outputs) float32.

        Args:
            x: (rows, inputs), float32 or bfloat16.
            weight: (outputs, inputs), float32 or bfloat16, as it is: it is not packed.
            bias: (outputs,) float32, or None.
        """
        (rows, inputs), outputs = x.shape, len(weight)
        x, num_threads = x.contiguous(), torch.get_num_threads()
        assert x.is_cpu and weight.is_cpu, "rows and weight"
        assert weight.is_contiguous() and weight.shape == (outputs, inputs), "a head's weight"
        if bias is not None:
            assert bias.shape == (outputs,) and bias.dtype == torch.float32, "a head's bias"
            assert bias.is_contiguous(), "a head's bias"
        out = x.new_empty((rows, outputs), dtype=torch.float32)
        space = x.new_empty(self._space(rows, inputs, num_threads), dtype=torch.uint8)
        self._multiply(
            Arguments(
                x.data_ptr(),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                space.data_ptr(),
                rows,
                inputs,
                outputs,
                self.types[x.dtype],
                self.types[weight.dtype],
                num_threads,
            )
        )
        return out


def head_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[None, HeadKernel]:
    """Return the head, of hidden states of a dtype."""
    return Candidate(
        lambda _: HeadKernel(library),
        lambda _: Trial("head", partial(head_pairs, dtype=dtype), HEAD_ERROR),
        lambda _: dtype in HeadKernel.types,
    )


def head_pairs(kernel: HeadKernel, dtype: torch.dtype) -> Iterator[Pair]:
    """Multiply small tensors with the kernel, and in plain torch in float32."""
    generator = torch.Generator().manual_seed(0)
    for stored in {dtype, torch.bfloat16}:
        weight = torch.randn(150, 96, generator=generator).to(stored)
        for rows, bias in ((1, None), (17, torch.randn(150, generator=generator))):
            x = torch.randn(rows, 96, generator=generator).to(dtype)
            expected = torch.nn.functional.linear(x.float(), weight.float(), bias)
            yield kernel(x, weight, bias), expected

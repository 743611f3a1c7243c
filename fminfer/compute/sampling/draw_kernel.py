"""Calls the compiled drawing of tokens on the CPU."""

from __future__ import annotations

import ctypes

import torch

from fminfer.compute.sampling.sampler import SamplingTensors


class DrawKernel:
    """`sampler.draw`, compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._draw = library.fminfer_draw
        self._draw.argtypes = [address, *[number] * 2, *[address] * 7, ctypes.c_int]

    def __call__(
        self, logits: torch.Tensor, how: SamplingTensors, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens that some rows of (rows, vocab) logits draw, each as its own says.

        Raises:
            MemoryError: there was none for the threads' working space.
        """
        num_rows, vocab = logits.shape
        logits = logits.float().contiguous()
        tensors = (
            (rows, torch.int64),
            (how.temperature, torch.float32),
            (how.top_p, torch.float32),
            (how.top_k, torch.int64),
            (how.min_p, torch.float32),
            (how.noise, torch.int64),
        )
        assert logits.device.type == "cpu" and vocab > 0, "logits"
        for tensor, dtype in tensors:  # the kernel trusts what it is given
            assert tensor.dtype == dtype and tensor.is_contiguous(), "how rows draw"
            assert tensor is rows or len(tensor) == num_rows, "how rows draw"
        ids = torch.empty_like(rows)
        failed = self._draw(
            logits.data_ptr(),
            vocab,
            len(rows),
            *(tensor.data_ptr() for tensor, _ in tensors),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the drawing kernel's working space")
        return ids

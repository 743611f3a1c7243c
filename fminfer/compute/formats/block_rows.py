"""Formats whose rows are blocks of bytes, each with its scale; see gguf, own and published."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from fminfer.compute.values.weights import KernelForm, RowFormat, Shape, Tensors

Tensor = torch.Tensor
Unpack = Callable[[Tensor], Tensor]  # (…, bytes of a block) → (…, numbers) float32
Pack = Callable[[Tensor], Tensor]  # and back
# Numbers that one thread makes blocks of at once: torch does not divide so few among threads.
PACKED_AT_ONCE = 1 << 15
# inputs that the kernels multiply at once: rows of one block, and their cuts, have multiples
ROW_UNIT = 32


@dataclass(slots=True, frozen=True)
class Blocks(RowFormat):
    """A format whose only tensor holds the bytes of blocks, (…, outputs, bytes of a row)."""

    name: str  # what people call it
    block: int  # the numbers of a block; 0: a row is one block
    # of a block; where a row is one, those beside its numbers
    block_bytes: int
    unpack: Unpack = field(compare=False)
    # None: such weights are only read
    pack: Pack | None = field(default=None, compare=False)
    # its number in `forms.h`; None: it becomes floats when it is read
    kind: int | None = None

    bits: int = 8  # of a number, where a row is one block

    @property
    def is_held(self) -> bool:
        return self.kind is not None

    @property
    def cut_unit(self) -> int:
        return self.block or ROW_UNIT

    def row_bytes(self, inputs: int) -> int:
        """Return what a row of a weight takes."""
        if self.block:
            return inputs // self.block * self.block_bytes
        return inputs * self.bits // 8 + self.block_bytes

    def fits_inputs(self, inputs: int) -> bool:
        """Tell whether rows of so many numbers are whole blocks."""
        return inputs % (self.block or ROW_UNIT) == 0

    def num_bytes(self, shape: Shape) -> int:
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        size = (*shape[:-1], self.row_bytes(shape[-1]))
        return (torch.empty(size, dtype=torch.uint8, device=device),)

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        (packed,) = tensors
        size = self.block_bytes if self.block else packed.shape[-1]
        return (
            self.unpack(packed.reshape(*packed.shape[:-1], -1, size))
            .flatten(-2)
            .to(dtype)
        )

    def quantize(self, numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the only tensor of a weight, of numbers (…, outputs, inputs), or fill `out`."""
        assert self.pack is not None and self.fits_inputs(numbers.shape[-1]), (
            "numbers for blocks"
        )
        if out is None:
            (out,) = self.empty(tuple(numbers.shape), numbers.device)
        if numbers.dim() > 2:
            for item, item_out in zip(numbers, out, strict=True):
                self.quantize(item, item_out)
            return out
        step = max(1, PACKED_AT_ONCE // max(1, numbers.shape[1]))
        pack = self.pack
        target = out

        def pack_rows(first: int) -> None:
            with torch.inference_mode(target.is_inference()):  # a thread's own mode
                part = numbers[first : first + step].float()
                blocks = pack(part.reshape(len(part), -1, self.block or part.shape[1]))
                target[first : first + step] = blocks.flatten(-2)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            # raises what they raise
            list(threads.map(pack_rows, range(0, len(numbers), step)))
        return out

    def fill(self, tensors: Tensors, numbers: Tensor) -> None:
        self.quantize(numbers, tensors[0])

    def cut_inputs(self, tensors: Tensors, inputs: range) -> Tensors:
        """Return the bytes of whole blocks, or of any inputs where a row is one block."""
        (packed,) = tensors
        if self.block:
            first, last = (
                end // self.block * self.block_bytes
                for end in (inputs.start, inputs.stop)
            )
            return (packed[..., first:last],)
        first, last = (
            end * self.bits // 8 + self.block_bytes
            for end in (inputs.start, inputs.stop)
        )
        scales = packed[..., : self.block_bytes]
        return (torch.cat([scales, packed[..., first:last]], -1),)

    def find_kernel_form(self, inputs: int) -> KernelForm | None:
        if self.kind is None:
            return None
        return KernelForm(self.kind, self.block or inputs)

    # What checkpoints store so; see models/holding.StoredFormat.

    @property
    def format(self) -> Blocks:
        return self

    @property
    def types(self) -> tuple[str, ...]:
        return ("U8",) if self.pack else (self.name,)

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> dict[str, tuple[tuple[str, ...], Shape]]:
        if is_transposed:
            return {name: ((), ())}  # of no type that a file has
        size = (
            (*shape[:-1], self.row_bytes(shape[-1]))
            if self.fits_inputs(shape[-1])
            else ()
        )
        # fminfer's own forms are all stored as bytes
        ending = f".{self.name}" if self.pack else ""
        return {name + ending: (self.types, size)}

    def read(self, stored: Mapping[str, Tensor], *, is_transposed: bool) -> Tensors:
        return tuple(stored.values())


def split_last_dimension(packed: Tensor, *sizes: int) -> Tensor:
    """Return the last dimension as several."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def read_float16(blocks: Tensor, first: int) -> Tensor:
    """Return a float16 number of each block, (…, 1) float32."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).float()

"""Weights in blocks of neighbouring inputs with scales of their own, or in several formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from fminfer.compute.weights import Format, Shape, Tensors, TensorSpec, Weight

Unpack = Callable[[torch.Tensor], torch.Tensor]  # (…, bytes of a block) → (…, numbers) float32
Pack = Callable[[torch.Tensor], torch.Tensor]  # and back
# Numbers that one thread makes blocks of at once: torch does not divide so few among threads.
PACKED_AT_ONCE = 1 << 15
DEQUANTIZED_AT_ONCE = 1 << 22  # numbers, whose copies take up to 12 bytes each


@dataclass(slots=True, frozen=True)
class Blocks:
    """A format whose only tensor holds the bytes of blocks, (…, outputs, bytes of a row)."""

    name: str  # what people call it
    block: int  # the numbers of a block; 0: a row is one block
    block_bytes: int  # of a block; where a row is one, those beside a byte for each number
    unpack: Unpack = field(compare=False)
    pack: Pack | None = field(default=None, compare=False)  # None: such weights are only read
    kind: int | None = None  # its number in `forms.h`; None: it becomes floats when it is read

    def row_bytes(self, inputs: int) -> int:
        """Return what a row of a weight takes."""
        if self.block:
            return inputs // self.block * self.block_bytes
        return inputs + self.block_bytes

    def takes(self, inputs: int) -> bool:
        """Tell whether rows of so many numbers are whole blocks."""
        return inputs % (self.block or 32) == 0

    def num_bytes(self, shape: Shape) -> int:
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        size = (*shape[:-1], self.row_bytes(shape[-1]))
        return (torch.empty(size, dtype=torch.uint8, device=device),)

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        (packed,) = tensors
        size = self.block_bytes if self.block else packed.shape[-1]
        return self.unpack(packed.reshape(*packed.shape[:-1], -1, size)).flatten(-2).to(dtype)

    def quantize(self, numbers: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
        """Return the only tensor of a weight, of numbers (…, outputs, inputs), or fill `to`."""
        assert self.pack is not None and self.takes(numbers.shape[-1]), "numbers for blocks"
        if to is None:
            (to,) = self.empty(tuple(numbers.shape), numbers.device)
        if numbers.dim() > 2:
            for each, own in zip(numbers, to, strict=True):
                self.quantize(each, own)
            return to
        step = max(1, PACKED_AT_ONCE // max(1, numbers.shape[1]))
        pack, own = self.pack, to

        def pack_rows(first: int) -> None:
            with torch.inference_mode(own.is_inference()):  # a thread's own mode
                part = numbers[first : first + step].float()
                blocks = pack(part.reshape(len(part), -1, self.block or part.shape[1]))
                own[first : first + step] = blocks.flatten(-2)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for _ in threads.map(pack_rows, range(0, len(numbers), step)):
                pass
        return to

    def cut(self, packed: torch.Tensor, columns: range) -> torch.Tensor:
        """Return the bytes of some inputs: of whole blocks, or of any where a row is one block."""
        if self.block:
            first, last = (
                end // self.block * self.block_bytes for end in (columns.start, columns.stop)
            )
            return packed[..., first:last]
        first, last = (end + self.block_bytes for end in (columns.start, columns.stop))
        return torch.cat([packed[..., : self.block_bytes], packed[..., first:last]], -1)

    # What checkpoints store so; see models/formats.StoredFormat.

    @property
    def types(self) -> tuple[str, ...]:
        return ("U8",) if self.pack else (self.name,)

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> dict[str, tuple[str, Shape]]:
        if is_transposed:
            return {name: ("", ())}  # of no type that a file has
        size = (*shape[:-1], self.row_bytes(shape[-1])) if self.takes(shape[-1]) else ()
        ending = f".{self.name}" if self.pack else ""  # fminfer's own forms are all stored as bytes
        return {name + ending: (self.types[0], size)}

    def read(self, stored: Tensors, *, is_transposed: bool) -> Tensors:
        return stored


@dataclass(slots=True, frozen=True)
class Joined:
    """Rows of several formats: parts one below the other, each with tensors of its own.

    Files hold queries, keys and values in different formats, which are one weight of ours.
    """

    parts: tuple[tuple[Format, int], ...]  # and how many outputs each has

    @property
    def name(self) -> str:
        return " + ".join(dict.fromkeys(held.name for held, _ in self.parts))

    def num_bytes(self, shape: Shape) -> int:
        return sum(held.num_bytes((*shape[:-2], num, shape[-1])) for held, num in self.parts)

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        sizes = [(held, (*shape[:-2], num, shape[-1])) for held, num in self.parts]
        return tuple(tensor for held, size in sizes for tensor in held.empty(size, device))

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        pairs = zip(self.parts, tensors, strict=True)  # each part is of one tensor
        return torch.cat([held.dequantize((t,), dtype) for (held, _), t in pairs], -2)

    def of_rows(self, rows: Sequence[range]) -> Format:
        """Return the format of some rows."""
        kept = []
        for (held, num), first in zip(self.parts, self.starts(), strict=False):
            shares = (range(max(r.start, first), min(r.stop, first + num)) for r in rows)
            if share := sum(map(len, shares)):
                kept.append((held, share))
        return join(kept)

    def starts(self) -> list[int]:
        """Return the first output of each part, and the end."""
        return [0, *accumulate(num for _, num in self.parts)]


def join(parts: list[tuple[Format, int]]) -> Format:
    """Return one format of parts, of which neighbours may be alike."""
    found: list[tuple[Format, int]] = []
    for held, num in parts:
        if found and found[-1][0] == held:
            num += found.pop()[1]
        found.append((held, num))
    return found[0][0] if len(found) == 1 else Joined(tuple(found))


def parts_of(weight: Weight) -> tuple[tuple[Format, int], ...]:
    """Return the formats of a weight, from its first outputs to its last."""
    held = weight.format
    return held.parts if isinstance(held, Joined) else ((held, weight.shape[-2]),)


def pieces_of(weight: Weight) -> Iterator[Weight]:
    """Give the rows of a weight as smaller ones, each small enough to be made floats."""
    inputs = weight.shape[-1]
    step = max(1, DEQUANTIZED_AT_ONCE // inputs)
    parts, is_joined = parts_of(weight), isinstance(weight.format, Joined)
    tensors = [(tensor,) for tensor in weight.tensors] if is_joined else [weight.tensors]
    for (held, outputs), own in zip(parts, tensors, strict=True):
        for first in range(0, outputs, step):
            rows = tuple(tensor[first : first + step] for tensor in own)
            yield Weight(TensorSpec((len(rows[0]), inputs), weight.spec.use), held, rows)

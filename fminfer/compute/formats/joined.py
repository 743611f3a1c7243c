"""A weight whose rows have several formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fminfer.compute.values.weights import Format, KernelForm, Shape, Tensors


@dataclass(slots=True, frozen=True)
class Joined:
    """Rows of several formats: parts one below the other, each with tensors of its own.

    Files hold queries, keys and values in different formats, which are one weight of ours.
    """

    rows: tuple[tuple[Format, int], ...]  # and how many outputs each has

    floats = None
    is_held = True
    can_merge = True

    @property
    def name(self) -> str:
        return " + ".join(dict.fromkeys(part_format.name for part_format in self.parts))

    @property
    def parts(self) -> tuple[Format, ...]:
        return tuple(part_format for part_format, _ in self.rows)

    @property
    def num_tensors(self) -> int:
        return sum(part_format.num_tensors for part_format in self.parts)

    @property
    def cut_unit(self) -> int:
        units = [part_format.cut_unit for part_format in self.parts]
        return max(units) if all(units) else 0

    def num_bytes(self, shape: Shape) -> int:
        return sum(
            part_format.num_bytes((*shape[:-2], num, shape[-1]))
            for part_format, num in self.rows
        )

    def empty(self, shape: Shape, device: torch.device) -> Tensors:
        return tuple(
            tensor
            for part_format, num in self.rows
            for tensor in part_format.empty((*shape[:-2], num, shape[-1]), device)
        )

    def fill(self, tensors: Tensors, numbers: torch.Tensor) -> None:
        first = 0
        for part_format, part_tensors, num in self.split_parts(tensors):
            part_format.fill(part_tensors, numbers[..., first : first + num, :])
            first += num

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        parts = [
            part_format.dequantize(part_tensors, dtype)
            for part_format, part_tensors, _ in self.split_parts(tensors)
        ]
        return torch.cat(parts, -2)

    def select_rows(self, tensors: Tensors, rows: torch.Tensor) -> Tensors:
        raise AssertionError("rows are looked up in an embedding, which is not joined")

    def view_rows(
        self, tensors: Tensors, first: int, last: int
    ) -> tuple[Format, Tensors]:
        start = 0
        for part_format, part_tensors, num in self.split_parts(tensors):
            if start <= first and last <= start + num:
                return part_format.view_rows(part_tensors, first - start, last - start)
            start += num
        raise AssertionError(f"rows {first} to {last} are of several parts")

    def select_expert(self, tensors: Tensors, number: int) -> Tensors:
        return tuple(
            tensor
            for part_format, part_tensors, _ in self.split_parts(tensors)
            for tensor in part_format.select_expert(part_tensors, number)
        )

    def cut_inputs(self, tensors: Tensors, inputs: range) -> Tensors:
        return tuple(
            tensor
            for part_format, part_tensors, _ in self.split_parts(tensors)
            for tensor in part_format.cut_inputs(part_tensors, inputs)
        )

    def cut_outputs(self, rows: Sequence[range]) -> Format:
        kept = []
        first = 0
        for part_format, num in self.rows:
            shares = (
                range(max(r.start, first), min(r.stop, first + num)) for r in rows
            )
            if share := sum(map(len, shares)):
                kept.append((part_format, share))
            first += num
        return join_formats(kept)

    def split_parts(
        self, tensors: Tensors, outputs: int = 0
    ) -> list[tuple[Format, Tensors, int]]:
        parts = []
        first = 0
        for part_format, num in self.rows:
            last = first + part_format.num_tensors
            parts.append((part_format, tensors[first:last], num))
            first = last
        return parts

    def find_kernel_form(self, inputs: int) -> KernelForm | None:
        return None

    def find_order(self, tensors: Tensors) -> torch.Tensor | None:
        raise AssertionError("each part has its own order")

    def packed_rows(self, tensors: Tensors) -> torch.Tensor:
        raise AssertionError("each part is packed by itself")


def join_formats(parts: list[tuple[Format, int]]) -> Format:
    """Return one format of parts, of which neighbours may be alike."""
    joined: list[tuple[Format, int]] = []
    for part_format, num in parts:
        if joined and joined[-1][0] == part_format and part_format.can_merge:
            num += joined.pop()[1]
        joined.append((part_format, num))
    return joined[0][0] if len(joined) == 1 else Joined(tuple(joined))

"""In which formats checkpoints store matrices, and in which each tensor of ours is held."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.gguf_rows import GGUF_FORMATS
from fminfer.compute.formats.joined import join_formats
from fminfer.compute.formats.own_rows import OWN_FORMATS, choose_quantized_formats
from fminfer.compute.values.weights import Format, Shape, Tensors, TensorSpec, Use
from fminfer.models.sharding import TensorCut

# The types that a stored tensor may have, by safetensors' names, and its shape. With "" among
# them, it may be absent.
StoredPart = tuple[tuple[str, ...], Shape]


class StoredFormat(Protocol):
    """A way in which checkpoints store matrices, beside plain floats."""

    @property
    def format(self) -> Format:
        """What the tensors that are read have."""

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, StoredPart]:
        """Return the stored tensors that one matrix is read from, by their names.

        Args:
            name: that a plain one has, such as "….weight".
            is_transposed: a plain one is stored as (inputs, outputs).
        """

    def read(
        self, stored: Mapping[str, torch.Tensor], *, is_transposed: bool
    ) -> Tensors:
        """Return the tensors of a weight, outputs first, of what is stored of it.

        Raises:
            CheckpointError: a stored tensor has values that cannot be right.
        """


class TypedFormat(StoredFormat, Protocol):
    """One that is known by the types of its stored tensors."""

    @property
    def types(self) -> Collection[str]:
        """The types of its stored tensors that are no plain floats."""


# A row for each; the first that fits what is stored counts.
FORMATS: list[TypedFormat] = [*GGUF_FORMATS, *OWN_FORMATS]


@dataclass(slots=True, frozen=True)
class Holding:
    """The rules by which each tensor gets the format that it is held in."""

    dtype: torch.dtype  # of the arithmetic
    # what is stored so and multiplied or looked up stays so
    keeps_bfloat16: bool = False
    quantized: str = ""  # what floats become, --quantize; "": they stay floats
    # for these uses, blocks become floats once they are read
    floats: tuple[Use, ...] = ()

    def choose_held_format(self, made: Format, spec: TensorSpec) -> Format:
        """Return the format in which a tensor of format `made` is held. Both give equal answers.

        Logits are products in float32, and an embedding may be the head.
        """
        if made.floats is not None or spec.use not in self.floats:
            return made
        return self._choose_floats(spec)

    def choose_cut_format(
        self, whole: Format, spec: TensorSpec, cut: TensorCut
    ) -> Format:
        """Return the format of the part that a rank holds: floats, if no cut is possible."""
        if cut.columns is not None and not whole.cut_unit:
            return self._choose_floats(spec)
        return whole if cut.rows is None else whole.cut_outputs(cut.rows)

    def _choose_floats(self, spec: TensorSpec) -> Format:
        is_wide = spec.use != "product" or (
            spec.is_wide and self.dtype == torch.float16
        )
        return Dense(torch.float32 if is_wide else self.dtype)

    def choose_format(
        self, spec: TensorSpec, stored: Iterable[tuple[Format, int]]
    ) -> Format:
        """Return the format in which a tensor is made.

        Args:
            stored: the formats of what it is made of, and how many rows each has, from its first
                row to its last; of experts those of all of them. Nothing: it is drawn at random.
        """
        if spec.is_precise:
            return Dense(torch.float32)
        if spec.is_wide and self.dtype == torch.float16:
            return replace(self, dtype=torch.float32).choose_format(
                replace(spec, is_wide=False), stored
            )
        if not spec.is_widened:
            return Dense(self.dtype)
        forms = (
            choose_quantized_formats(self.quantized, spec.use) if self.quantized else ()
        )
        quantized_format = next(
            (candidate for candidate in forms if candidate.fits_inputs(spec.shape[-1])),
            None,
        )
        row_formats = [
            (self._choose_row_format(stored_format, quantized_format), num)
            for stored_format, num in stored
        ]
        first = next((row_format for row_format, _ in row_formats), None)
        is_one_format = len({row_format for row_format, _ in row_formats}) == 1
        if first and is_one_format and (first.can_merge or len(row_formats) == 1):
            return first
        expert_formats = _formats_of_one_expert(row_formats, spec.shape[-2])
        has_blocks = any(row_format.floats is None for row_format, _ in expert_formats)
        # rows of a head or an embedding are looked up, which takes one format
        if has_blocks and spec.use == "product":
            return join_formats(expert_formats)
        return quantized_format or Dense(self.dtype)

    def _choose_row_format(self, stored: Format, quantized: Format | None) -> Format:
        """Return the format of rows. Those that are quantized already stay so."""
        if stored.floats is None and stored.is_held:
            return stored
        is_kept = self.keeps_bfloat16 and stored == Dense(torch.bfloat16)
        return quantized or (stored if is_kept else Dense(self.dtype))


def _formats_of_one_expert(
    row_formats: list[tuple[Format, int]], outputs: int
) -> list[tuple[Format, int]]:
    """Return the formats of one expert's rows, if all experts have the same; else none."""
    ends = [*accumulate(num for _, num in row_formats)]
    of_first = row_formats[: ends.index(outputs) + 1] if outputs in ends else []
    num_experts = len(row_formats) // max(1, len(of_first))
    return of_first if row_formats == of_first * num_experts else []

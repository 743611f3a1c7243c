"""In which formats checkpoints store matrices, and in which each tensor of ours is held."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fminfer.compute.quantized.block_format import Blocks, join
from fminfer.compute.quantized.gguf_forms import GGUF_FORMS
from fminfer.compute.quantized.own_forms import OWN_FORMS, quantized_forms
from fminfer.compute.weights import Dense, Format, Shape, Tensors, TensorSpec


class StoredFormat(Format, Protocol):
    """A format in which checkpoints store matrices, beside plain floats."""

    @property
    def types(self) -> Collection[str]:
        """Return the types of its stored tensors that are no plain floats, as safetensors does."""

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, tuple[str, Shape]]:
        """Return the stored tensors that one matrix is read from: name → type and shape.

        Args:
            name: that a plain one has, such as "….weight".
            shape: (outputs, inputs) of ours; of stacked experts (experts, …).
            is_transposed: a plain one is stored as (inputs, outputs).
        """

    def read(self, stored: Tensors, *, is_transposed: bool) -> Tensors:
        """Return the tensors of a weight, outputs first, of what is stored of it."""


# A row for each; the first that fits what is stored counts.
FORMATS: list[StoredFormat] = [*GGUF_FORMS, *OWN_FORMS]


@dataclass(slots=True, frozen=True)
class Holding:
    """In which format each tensor is held: loading and forecasts ask it.

    Args:
        dtype: of the arithmetic.
        keeps_bfloat16: what is stored so and multiplied or looked up stays so.
        quantized: what floats become, --quantize; "": they stay floats.
    """

    dtype: torch.dtype
    keeps_bfloat16: bool = False
    quantized: str = ""

    def of(self, spec: TensorSpec, stored: Iterable[tuple[Format, int]]) -> Format:
        """Return the format of a tensor.

        Args:
            stored: the formats of what it is made of, and how many rows each has, from its first
                row to its last; of experts those of all of them. Nothing: it is drawn at random.
        """
        if spec.is_precise:
            return Dense(torch.float32)
        if not spec.is_widened:
            return Dense(self.dtype)
        parts = [*stored]
        if self.quantized and not any(_is_kept(each) for each, _ in parts):
            for form in quantized_forms(self.quantized, spec.use):
                if form.takes(spec.shape[-1]):
                    return form
        is_one = len({each for each, _ in parts}) == 1
        one = parts[:1] if is_one else _of_one(parts, spec.shape[-2])
        held = [(self._kept(each), num) for each, num in one]
        has_blocks = any(isinstance(each, Blocks) for each, _ in held)
        return join(held) if is_one or has_blocks else Dense(self.dtype)

    def _kept(self, stored: Format) -> Format:
        is_kept = _is_kept(stored) or (self.keeps_bfloat16 and stored == Dense(torch.bfloat16))
        return stored if is_kept else Dense(self.dtype)


def _is_kept(stored: Format) -> bool:
    """Tell whether a format is quantized, and held as it is stored."""
    return not isinstance(stored, Dense) and getattr(stored, "kind", 0) is not None


def _of_one(parts: list[tuple[Format, int]], outputs: int) -> list[tuple[Format, int]]:
    """Return the parts of one expert, which all others must have; none: they differ."""
    one, num = [], 0
    for part in parts:
        if num < outputs:
            one.append(part)
            num += part[1]
    return one if one and parts == one * (len(parts) // len(one)) else []

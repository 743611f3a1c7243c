"""In which formats checkpoints store matrices, and in which each tensor of ours is held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

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


FORMATS: list[StoredFormat] = []  # a row for each; the first that fits what is stored counts


def held_format(
    spec: TensorSpec, stored: Collection[Format], dtype: torch.dtype, *, keeps_bfloat16: bool
) -> Format:
    """Return the format in which a tensor is held: loading and forecasts ask it here.

    Args:
        stored: the formats of what it is made of; none: it is drawn at random.
        dtype: of the arithmetic.
        keeps_bfloat16: what is stored so and multiplied or looked up stays so.
    """
    if spec.is_precise:
        return Dense(torch.float32)
    own = next(iter(stored), None)
    if own is None or len(set(stored)) > 1 or not spec.is_widened:
        return Dense(dtype)
    is_kept = keeps_bfloat16 and own == Dense(torch.bfloat16)
    return own if is_kept or not isinstance(own, Dense) else Dense(dtype)

"""Weights in blocks of random bytes, of every form, and sizes that rounding depends on."""

from __future__ import annotations

import torch

from fminfer.compute.quantized.block_format import Blocks, Joined
from fminfer.compute.quantized.gguf_forms import GGUF_FORMS
from fminfer.compute.quantized.own_forms import OWN_FORMS
from fminfer.compute.weights import Dense, Format, Tensors, TensorSpec, Use, Weight

FORMS = {form.name: form for form in (*GGUF_FORMS, *OWN_FORMS)}
# Where blocks have float16 numbers; all others have one at their beginning. Behind a blank of a
# form's name tests say what they changed.
HALVES_AT = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K", "int4", "int4-128"), (0, 2)),
    **{"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "MXFP4": ()},
}
NEAR = 16  # inputs that certainly have the same scale


def random_blocks(form: Blocks, *shape: int) -> torch.Tensor:
    """Return bytes of a weight, (…, outputs, bytes), with scales that are finite."""
    *outer, inputs = shape
    block = form.block or inputs
    size = form.row_bytes(block)
    bytes_ = torch.randint(256, (*outer, inputs // block, size), dtype=torch.uint8)
    for place in HALVES_AT.get(form.name.partition(" ")[0], (0,)):
        scales = torch.randn((*outer, inputs // block, 1)) * 0.1
        bytes_[..., place : place + 2] = scales.half().view(torch.uint8)
    return bytes_.flatten(-2)


def random_weight(held: Format, *shape: int, use: Use = "product") -> Weight:
    """Return a weight of a format: of random bytes, or of random floats."""
    return Weight(TensorSpec(shape, use), held, _tensors(held, shape))


def _tensors(held: Format, shape: tuple[int, ...]) -> Tensors:
    if isinstance(held, Joined):
        *outer, _, inputs = shape
        parts = (_tensors(each, (*outer, num, inputs)) for each, num in held.parts)
        return tuple(tensor for part in parts for tensor in part)
    if isinstance(held, Dense):
        return (torch.randn(shape).to(held.dtype),)
    assert isinstance(held, Blocks), "a format of blocks"
    return (random_blocks(held, *shape),)


def summed_sizes(numbers: torch.Tensor) -> torch.Tensor:
    """Return at least what each number of a weight puts into a sum: its scale and its offset.

    A number near 0 may be the difference of two that are not. Its neighbours tell their sizes.
    """
    near = numbers.double().reshape(*numbers.shape[:-1], -1, NEAR)
    largest = near.abs().amax(-1, keepdim=True) + near.amax(-1, keepdim=True)
    return (largest - near.amin(-1, keepdim=True)).expand_as(near).flatten(-2)

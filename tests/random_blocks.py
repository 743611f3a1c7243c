"""Weights in blocks of random bytes, of every form, and sizes that rounding depends on."""

from __future__ import annotations

from functools import cache

import torch

from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.gguf_rows import GGUF_FORMATS
from fminfer.compute.formats.joined import Joined
from fminfer.compute.formats.own_rows import OWN_FORMATS
from fminfer.compute.formats.published_rows import make_float8, make_whole_numbers
from fminfer.compute.values.weights import Format, Tensors, TensorSpec, Use, Weight

PUBLISHED_FORMATS = (
    make_whole_numbers(4, 32),
    make_whole_numbers(4, 128),
    make_whole_numbers(4, 0),
    make_whole_numbers(8, 128),
    make_whole_numbers(8, 0),
    make_float8(128),
    make_float8(0),
)
FORMS = {form.name: form for form in (*GGUF_FORMATS, *OWN_FORMATS, *PUBLISHED_FORMATS)}
NEAR = 16  # inputs that certainly have the same scale


@cache
def halves_of(form: Blocks) -> list[int]:
    """Return where blocks have float16 numbers: nan at that byte makes some of the block nan."""
    size = form.row_bytes(form.block or NEAR)
    upper_bytes = torch.full((size - 1,), 0x7E, dtype=torch.uint8)
    # row n has nan at byte n, and is 0 elsewhere
    blocks = torch.diag(upper_bytes, 1)[:-1]
    is_half = form.unpack(blocks).isnan().flatten(1).any(1)
    return [*map(int, is_half.nonzero())]


def first_scale_bytes(form: Blocks) -> int:
    """Return the bytes of the scale that blocks begin with: 4 of float32, 1 of an exponent.

    0: none, or it is one of float16.
    """
    if form in PUBLISHED_FORMATS:
        return torch.float32.itemsize
    return int(form.name == "MXFP4")


def random_blocks(form: Blocks, *shape: int) -> torch.Tensor:
    """Return bytes of a weight, (…, outputs, bytes), with scales that are finite."""
    *outer, inputs = shape
    block = form.block or inputs
    size = form.row_bytes(block)
    bytes_ = torch.randint(256, (*outer, inputs // block, size), dtype=torch.uint8)
    for place in halves_of(form):
        scales = torch.randn((*outer, inputs // block, 1)) * 0.1
        bytes_[..., place : place + 2] = scales.half().view(torch.uint8)
    first = first_scale_bytes(form)
    if first == 1:
        bytes_[..., :1] = torch.randint(118, 126, bytes_[..., :1].shape)
    elif first:
        scales = torch.randn((*outer, inputs // block, 1)) * 0.1
        bytes_[..., :first] = scales.view(torch.uint8)
    if form.name.startswith("float8"):
        # e4m3 has nan there
        numbers = bytes_[..., first:]
        numbers[numbers & 127 == 127] ^= 1
    return bytes_.flatten(-2)


def random_weight(held: Format, *shape: int, use: Use = "product") -> Weight:
    """Return a weight of a format: of random bytes, or of random floats."""
    return Weight(TensorSpec(shape, use), held, _tensors(held, shape))


def _tensors(held: Format, shape: tuple[int, ...]) -> Tensors:
    if isinstance(held, Joined):
        *outer, _, inputs = shape
        parts = (_tensors(each, (*outer, num, inputs)) for each, num in held.rows)
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

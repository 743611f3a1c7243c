"""The forms of published checkpoints: bytes worked out by hand, and kernels with them."""

from __future__ import annotations

import pytest
import torch

from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.published_rows import (
    make_float8,
    make_whole_numbers,
    pack_float8,
    pack_mxfp4,
    pack_whole_numbers,
)
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers.products import ProductKernel
from fminfer.compute.values.weights import TensorSpec, Weight
from tests.conftest import built_library
from tests.random_blocks import FORMS, random_blocks

FLOATS = torch.float32
FLOAT8 = torch.float8_e4m3fn
needs_kernels = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


def bytes_of(text: str) -> torch.Tensor:
    """Return bytes written as hexadecimal numbers, (1, bytes)."""
    return torch.tensor([[*bytes.fromhex(text)]], dtype=torch.uint8)


def numbers_of(form: Blocks, packed: torch.Tensor) -> torch.Tensor:
    return form.dequantize((packed,), FLOATS)


def make_weight(form: Blocks, packed: torch.Tensor) -> Weight:
    shape = tuple(numbers_of(form, packed).shape)
    return Weight(TensorSpec(shape, "product"), form, (packed,))


def test_bytes_of_whole_numbers_of_4_bits() -> None:
    """A unit has inputs 0, 2, 4, 6 in its lower 16 bits, the first lowest, then the odd ones."""
    scale = "00 00 00 3f"  # 0.5
    zero = "00 42"  # 3 in float16
    of_0_to_7 = "20 64 31 75"
    of_8_to_15 = "a8 ec b9 fd"
    numbers = torch.arange(32, dtype=torch.uint8)[None, None] % 16
    scales = torch.tensor([[0.5]])
    zeros = torch.tensor([[3]])

    packed = pack_whole_numbers(numbers, scales, zeros, 4)

    assert torch.equal(packed, bytes_of(scale + zero + 2 * (of_0_to_7 + of_8_to_15)))
    expected = 0.5 * (torch.arange(32.0) % 16 - 3)
    assert torch.equal(numbers_of(make_whole_numbers(4, 32), packed), expected[None])
    assert torch.equal(numbers_of(make_whole_numbers(4, 0), packed), expected[None])


def test_bytes_of_whole_numbers_of_8_bits() -> None:
    """Numbers and zeros are 128 less in a block: the kernels have signs."""
    scale = "00 00 40 c0"  # -3
    zero = "00 40"  # 2 in float16
    some = torch.tensor([0, 127, 128, 255], dtype=torch.uint8)
    zeros = torch.tensor([[130]])

    packed = pack_whole_numbers(
        some.repeat(8)[None, None], torch.tensor([[-3.0]]), zeros, 8
    )

    assert torch.equal(packed, bytes_of(scale + zero + 8 * "80 ff 00 7f"))
    expected = torch.tensor([390.0, 9.0, 6.0, -375.0]).repeat(8)[None]
    assert torch.equal(numbers_of(make_whole_numbers(8, 32), packed), expected)


def test_bytes_of_float8() -> None:
    """Small numbers, which have an exponent of 0, are multiples of 2^-9."""
    scale = "00 00 00 40"  # 2
    stored = "00 01 07 08 38 3c 7e 81 b8 fe" + 22 * "00"
    sizes = [0, 1 / 512, 7 / 512, 1 / 64, 1, 1.5, 448, -1 / 512, -1, -448]
    numbers = bytes_of(stored).view(FLOAT8)

    packed = pack_float8(numbers, torch.tensor([[2.0]]))

    assert torch.equal(packed, bytes_of(scale + stored))
    expected = torch.tensor([[*sizes, *[0] * 22]]) * 2
    assert torch.equal(numbers_of(make_float8(32), packed), expected)
    assert torch.equal(numbers_of(make_float8(0), packed), expected)


def test_groups_have_scales_of_their_own() -> None:
    torch.manual_seed(0)
    for bits in (4, 8):
        for group in (32, 64, 128):
            numbers = torch.randint(2**bits, (5, 3, group), dtype=torch.uint8)
            scales = torch.randn(5, 3)
            zeros = torch.randint(2**bits, (5, 3))
            packed = pack_whole_numbers(numbers, scales, zeros, bits)
            form = make_whole_numbers(bits, group)
            assert packed.shape == (5, form.row_bytes(3 * group))
            expected = scales[..., None] * (numbers.float() - zeros[..., None])
            assert torch.equal(numbers_of(form, packed), expected.flatten(1))
    numbers = torch.randn(5, 384).to(FLOAT8)
    scales = torch.randn(5, 3)
    expected = scales[..., None] * numbers.float().view(5, 3, 128)
    packed = pack_float8(numbers, scales)
    assert torch.equal(numbers_of(make_float8(128), packed), expected.flatten(1))


def test_a_number_that_is_nan_makes_its_block_nan() -> None:
    """The kernels do not know e4m3's nan, and a sum with it is nan in any case."""
    numbers = torch.randn(3, 256).to(FLOAT8)
    numbers[1, 200] = float("nan")
    packed = pack_float8(numbers, torch.ones(3, 2))
    found = numbers_of(make_float8(128), packed)
    assert found[1, 128:].isnan().all()
    assert torch.equal(found[0], numbers[0].float())
    assert torch.equal(found[1, :128], numbers[1, :128].float())


def test_bytes_of_mxfp4() -> None:
    """gpt-oss's neighbours of a byte are 16 inputs apart in GGUF's."""
    # inputs 0 to 31 are 0 to 15 twice, the lower half of each byte first
    neighbours = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2)
    blocks = neighbours.to(torch.uint8)[None, None]
    scales = torch.tensor([[128]], dtype=torch.uint8)  # 2^1

    packed = pack_mxfp4(blocks, scales)

    assert torch.equal(
        packed, bytes_of("80 00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee ff")
    )
    halves = [0, 1, 2, 3, 4, 6, 8, 12]
    expected = torch.tensor([*halves, *[-n for n in halves]] * 2).float()[None]
    assert torch.equal(numbers_of(FORMS["MXFP4"], packed), expected)


def test_numbers_of_gpt_oss_are_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 10, 4), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=FLOATS)
    found = numbers_of(FORMS["MXFP4"], pack_mxfp4(blocks, scales))
    assert torch.equal(found, theirs.transpose(1, 2))


def test_bytes_of_iq4_xs() -> None:
    """Each 32 inputs have a scale of 6 bits, around 32. Here the first is 1, the last -32."""
    scale = "00 3c"  # 1 in float16
    upper_bits = "aa 2a"
    lower_bits = "01 00 00 00"
    numbers = 16 * "0f" + 6 * 16 * "37" + 16 * "80"
    packed = bytes_of(scale + upper_bits + lower_bits + numbers)
    first = [113.0] * 16 + [-127.0] * 16
    last = [32.0 * 127] * 16 + [-32.0] * 16
    expected = torch.tensor([[*first, *[0.0] * 192, *last]])
    assert torch.equal(numbers_of(FORMS["IQ4_XS"], packed), expected)


@needs_kernels
@pytest.mark.parametrize("of_rows", [FLOATS, torch.bfloat16])
def test_every_float8_is_exact_in_products(of_rows: torch.dtype) -> None:
    """Numbers with an exponent of 0 are, too: products of bfloat16 take small ones for 0."""
    finite = [n for n in range(256) if n % 128 != 127]
    stored = torch.tensor([*finite, 0, 0], dtype=torch.uint8)
    numbers = torch.stack([stored.roll(n) for n in range(70)]).view(FLOAT8)
    kernel = ProductKernel(built_library())
    # each row is of one input
    x = torch.eye(256).to(of_rows)
    for form, groups in ((make_float8(128), 2), (make_float8(0), 1)):
        packed = pack_float8(numbers, torch.full((70, groups), 0.5))
        product = kernel.pack_weight(make_weight(form, packed), None)
        expected = numbers.float().t() / 2
        assert torch.equal(product.multiply_unrounded(x), expected)
        for row in (0, 255):
            one = product.multiply_unrounded(x[row : row + 1])
            assert torch.equal(one, expected[row : row + 1])


@needs_kernels
def test_every_power_of_two_of_mxfp4() -> None:
    """llama.cpp has no nan among them: 0 is 2^-127, and 255 is beyond all others."""
    form = FORMS["MXFP4"]
    packed = random_blocks(form, 256, 64)
    packed[:, 0] = torch.arange(256)
    packed[:, 17] = torch.arange(256).flip(0)
    numbers = numbers_of(form, packed)
    assert not numbers.isnan().any()
    product = ProductKernel(built_library()).pack_weight(
        make_weight(form, packed), None
    )
    assert torch.equal(product.dequantize_rows(torch.arange(256)), numbers)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_are_whole_in_look_ups(bits: int) -> None:
    """A weight whose number is its zero is 0, whatever its scale."""
    numbers = torch.randint(2**bits, (70, 2, 128), dtype=torch.uint8)
    scales = torch.rand(70, 2) + 0.1
    packed = pack_whole_numbers(numbers, scales, numbers[..., 0].int(), bits)
    weight = make_weight(make_whole_numbers(bits, 128), packed)
    product = ProductKernel(built_library()).pack_weight(weight, None)
    found = product.dequantize_rows(torch.arange(70)).view(70, 2, 128)
    assert (found[numbers == numbers[..., :1]] == 0).all()
    assert torch.equal(found.flatten(1), weight.dequantize(FLOATS))

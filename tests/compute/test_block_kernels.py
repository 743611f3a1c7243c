"""The kernels' products with weights in blocks: right, each row for itself, for every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.dense import Dense, make_dense_weight
from fminfer.compute.formats.joined import Joined, join_formats
from fminfer.compute.formats.own_rows import INT4, INT8, INT8_32
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers import products
from fminfer.compute.layers.experts import Mixture, PackedExperts
from fminfer.compute.layers.products import (
    PackedProduct,
    ProductKernel,
    can_sum_in_float32,
    is_kernel_faster,
)
from fminfer.compute.values.spec import Mlp, Moe
from fminfer.compute.values.weights import Format, Use, Weight
from fminfer.core.errors import UsageError
from fminfer.forward.registry import Registry
from tests.compute.test_experts import choose, expected_of
from tests.conftest import built_library
from tests.random_blocks import FORMS, random_weight, summed_sizes

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)
KINDS = [form for form in FORMS.values() if form.kind is not None]
ROWS = [*range(1, 10), 13, 100]
OUTPUTS = (5, 64, 70, 130)  # less than a panel, whole ones, some more
FLOATS = torch.float32
HALVES = torch.bfloat16
of_both_types = pytest.mark.parametrize("of_rows", [FLOATS, HALVES])
of_kinds = pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
MIXED: list[list[tuple[Format, int]]] = [
    [(FORMS["Q4_K"], 70), (FORMS["Q6_K"], 30), (Dense(HALVES), 33)],
    [(FORMS["Q8_0"], 1), (INT4, 129), (FORMS["Q8_0"], 64)],
    [(Dense(HALVES), 64), (FORMS["Q5_1"], 64)],
]


@pytest.fixture(scope="module")
def kernel() -> ProductKernel:
    return ProductKernel(built_library())


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs_of(form: Blocks) -> tuple[int, ...]:
    """Return the shortest rows, some more, and those of several pieces of a panel."""
    block = form.block or 32
    return block, 3 * block, 2304


def assert_near(
    found: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor
) -> None:
    """See that sums are what they are in float64, up to float32's rounding of each term."""
    numbers = weight.dequantize(FLOATS)
    exact = x.double() @ numbers.double().t() + bias.double()
    size = x.double().abs() @ summed_sizes(numbers).t() + bias.double().abs()
    assert found.dtype == FLOATS and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= size * (x.shape[-1] + 8) * 2**-24).all()


@of_both_types
@of_kinds
def test_products_are_right_and_a_row_is_the_same_beside_any_others(
    form: Blocks,
    of_rows: torch.dtype,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    """With and without a bias, by one thread and by three, in registers and unpacked before."""
    for inputs in inputs_of(form):
        torch.manual_seed(inputs)
        x = torch.randn(300, inputs).to(of_rows)
        for outputs in OUTPUTS:
            weight = random_weight(form, outputs, inputs)
            for bias in (None, torch.randn(outputs)):
                product = kernel.pack_weight(weight, bias)
                set_threads(3)
                sums = product.multiply_unrounded(x)
                assert_near(
                    sums, x, weight, torch.zeros(outputs) if bias is None else bias
                )
                set_threads(1)
                assert torch.equal(product(x), sums.to(of_rows))
                for rows in ROWS:
                    set_threads(1 + 2 * (rows % 2))
                    first = 7 * rows % 200
                    found = product.multiply_unrounded(x[first : first + rows])
                    assert torch.equal(found, sums[first : first + rows]), (
                        f"{rows} rows"
                    )


@of_kinds
def test_rows_are_found_in_the_packed_form(
    form: Blocks, kernel: ProductKernel, set_threads: Callable[[int], None]
) -> None:
    """A tied embedding is looked up in the packed head."""
    for outputs, inputs in zip(OUTPUTS, (*inputs_of(form), 512), strict=True):
        weight = random_weight(form, outputs, inputs)
        numbers = weight.dequantize(FLOATS)
        product = kernel.pack_weight(weight, None)
        for num_threads in (1, 3):
            set_threads(num_threads)
            for ids in (
                torch.arange(outputs).flip(0),
                torch.tensor([outputs - 1, 0, 0]),
            ):
                assert torch.equal(product.dequantize_rows(ids), numbers[ids])
                assert torch.equal(
                    product.dequantize_rows(ids.repeat(2)[::2]),
                    numbers[ids.repeat(2)[::2]],
                )
        assert product.dequantize_rows(torch.arange(0)).shape == (0, inputs)


@of_kinds
def test_what_is_packed_takes_what_the_blocks_took(
    form: Blocks, kernel: ProductKernel
) -> None:
    """But for scales of 6 bits, which have 8 there."""
    weight = random_weight(form, 4 * kernel.panel, 512)
    (part,) = kernel.pack_weight(weight, None).parts
    padded = {"Q4_K": 148 / 144, "Q5_K": 180 / 176, "IQ4_XS": 138 / 136}
    more = padded.get(form.name, 1.0)
    assert part.packed.nbytes == pytest.approx(more * weight.num_bytes)


@of_both_types
@pytest.mark.parametrize("parts", MIXED)
def test_parts_of_several_formats_are_what_each_is_alone(
    parts: list[tuple[Format, int]],
    of_rows: torch.dtype,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    """To the last bit; queries, keys and values of a file may differ in their formats."""
    held = join_formats(parts)
    assert isinstance(held, Joined)
    outputs = sum(num for _, num in parts)
    torch_bias = torch.randn(200)
    weight = random_weight(held, outputs, 512)
    bias = torch_bias[:outputs]
    product = kernel.pack_weight(weight, bias)
    alone = []
    start = 0
    for own in weight.split_parts():
        num = own.shape[0]
        alone.append(kernel.pack_weight(own, bias[start : start + num]))
        start += num
    x = torch.randn(100, 512).to(of_rows)
    for rows in (1, 4, 5, 100):
        for num_threads in (1, 3):
            set_threads(num_threads)
            expected = torch.cat(
                [each.multiply_unrounded(x[:rows]) for each in alone], -1
            )
            assert torch.equal(product.multiply_unrounded(x[:rows]), expected)
            assert torch.equal(product(x[:rows]), expected.to(of_rows))
    assert_near(product.multiply_unrounded(x), x, weight, bias)


def test_parts_of_float32_take_rows_of_float32_alone(kernel: ProductKernel) -> None:
    held = join_formats([(FORMS["Q8_0"], 5), (Dense(FLOATS), 70)])
    weight = random_weight(held, 75, 64)
    x = torch.randn(3, 64)
    assert_near(kernel.pack_weight(weight, None)(x), x, weight, torch.zeros(75))
    with pytest.raises(AssertionError, match="rows"):
        kernel.pack_weight(weight, None)(x.bfloat16())
    wide = kernel.pack_weight(weight, None).multiply_unrounded(x.bfloat16())
    assert torch.equal(wide, kernel.pack_weight(weight, None)(x.bfloat16().float()))


@of_both_types
def test_a_row_that_is_not_finite_costs_no_other(of_rows: torch.dtype) -> None:
    kernel = ProductKernel(built_library())
    for form in KINDS:
        product = kernel.pack_weight(random_weight(form, 65, 256), None)
        for rows in (4, 20):
            x = torch.randn(rows, 256).to(of_rows)
            expected = product(x)
            x[3, 17] = float("nan")
            found = product(x)
            others = torch.arange(rows) != 3
            assert (
                torch.equal(found[others], expected[others]) and found[3].isnan().all()
            )


@pytest.mark.parametrize("place", [0, 255])
def test_a_block_that_is_not_finite_costs_its_own_output_alone(
    place: int, kernel: ProductKernel
) -> None:
    """What no scale holds is nan in each form, and is seen by whoever reads the sum."""
    for form in (each for each in KINDS if each.pack is not None):
        numbers = torch.randn(70, 256)
        right = kernel.pack_weight(_quantized(form, numbers), None)
        numbers[33, place] = float("inf")
        wrong = kernel.pack_weight(_quantized(form, numbers), None)
        others = torch.arange(70) != 33
        for rows in (2, 20):
            x = torch.randn(rows, 256)
            found = wrong(x)
            expected = right(x)
            assert torch.equal(found[:, others], expected[:, others])
            assert not found[:, 33].isfinite().any()


def _quantized(form: Blocks, numbers: torch.Tensor) -> Weight:
    return Weight(
        make_dense_weight(numbers, "product").spec, form, (form.quantize(numbers),)
    )


EXPERTS: list[tuple[str, str, Mlp]] = [
    ("int4", "int8-32", Mlp("silu", 96)),
    ("int8-row", "int4-128", Mlp("gelu_pytorch_tanh", 128)),
    ("Q4_K", "Q6_K", Mlp("silu", 256)),
    ("Q5_K", "Q5_0", Mlp("relu", 64, is_gated=False)),
    ("int4-symmetric", "Q8_0", Mlp("silu", 160)),
    ("Q4_1", "bfloat16", Mlp("silu", 70)),
    ("bfloat16", "Q5_1", Mlp("silu", 64)),
    *((form.name, form.name, Mlp("silu", 256)) for form in KINDS),
]


def format_of(name: str) -> Format:
    return Dense(HALVES) if name == "bfloat16" else FORMS[name]


@of_both_types
@pytest.mark.parametrize(("of_up", "of_down", "expert"), EXPERTS)
def test_experts_of_blocks_are_those_of_their_numbers(
    of_up: str,
    of_down: str,
    expert: Mlp,
    of_rows: torch.dtype,
    set_threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # tiles are left to oneDNN
    monkeypatch.setattr(products, "has_unit", lambda name: False)
    how = Moe(5, 2, expert)
    hidden = 256
    torch.manual_seed(4)
    up = random_weight(format_of(of_up), 5, expert.up_size, hidden)
    down = random_weight(format_of(of_down), 5, hidden, expert.size)
    mix = registry_of(of_rows).choose_experts_kernel(Mixture(how, up, down))
    assert isinstance(mix, PackedExperts)
    numbers = up.dequantize(FLOATS), down.dequantize(FLOATS)
    x = (torch.randn(150, hidden) / 16).to(of_rows)
    chosen, shares = choose(how, len(x))
    chosen[40:120] = torch.tensor([3, 1])
    found = mix(x, chosen, shares)
    expected = expected_of(how, x, *numbers, chosen, shares)
    limit = 2e-5 if of_rows == FLOATS else 0.02
    assert (found - expected).abs().max() <= limit * expected.abs().max()
    for num_threads, tokens in ((1, 1), (3, 2), (1, 7), (3, 61)):
        set_threads(num_threads)
        some = mix(x[:tokens], chosen[:tokens], shares[:tokens])
        assert torch.equal(some, found[:tokens])


def registry_of(dtype: torch.dtype, asked: Any = "auto") -> Registry:
    registry = Registry(asked, built_library(), dtype, torch.device("cpu"))
    registry.of_products[1:] = []  # ours alone
    return registry


def test_what_the_kernel_serves(
    kernel: ProductKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks on every processor; forms without a kind are not in it."""
    for has_tiles in (False, True):
        monkeypatch.setattr(products, "has_unit", lambda name, tiles=has_tiles: tiles)
        for form in FORMS.values():
            for dtype in (FLOATS, HALVES):
                assert is_kernel_faster(form, dtype) == (form.kind is not None)
            assert can_sum_in_float32(form) == (form.kind is not None)
            assert kernel.can_pack(random_weight(form, 3, 256)) == (
                form.kind is not None
            )
            assert not is_kernel_faster(form, torch.float16)
        for parts in MIXED:
            held = join_formats(parts)
            assert is_kernel_faster(held, FLOATS) and is_kernel_faster(held, HALVES)
            assert kernel.can_pack(
                random_weight(held, sum(num for _, num in parts), 256)
            )
            assert not can_sum_in_float32(held), "a head is one part"
        assert not is_kernel_faster(
            join_formats([(INT8, 4), (FORMS["Q2_K"], 4)]), FLOATS
        )
        assert not is_kernel_faster(
            join_formats([(INT8, 4), (Dense(FLOATS), 4)]), HALVES
        )


@of_both_types
def test_a_model_gets_the_kernels_products(of_rows: torch.dtype) -> None:
    """Each form and each mixture passes its trial, for products and for heads."""
    registry = registry_of(of_rows, "require")
    for form in KINDS:
        product = registry.choose_product(
            random_weight(form, 200, 256), torch.randn(200).to(of_rows)
        )
        head = registry.choose_head(random_weight(form, 200, 256, use="head"), None)
        assert isinstance(product, PackedProduct) and isinstance(head, PackedProduct)
    for parts in MIXED:
        weight = random_weight(join_formats(parts), sum(num for _, num in parts), 256)
        assert isinstance(registry.choose_product(weight, None), PackedProduct)


@of_both_types
def test_a_trial_refuses_a_kernel_that_is_wrong(of_rows: torch.dtype) -> None:
    """One that takes int4's bytes for those of Q4_1, which are as many: plain torch is right."""
    wrong = replace(INT4, name="int4 in another order", kind=FORMS["Q4_1"].kind)
    registry = registry_of(of_rows)
    required = registry_of(of_rows, "require")
    x = torch.randn(5, 256).to(of_rows)
    weight = random_weight(wrong, 70, 256)
    plain = torch.nn.functional.linear(x, weight.dequantize(of_rows))
    assert plain.isfinite().all() and torch.equal(
        registry.choose_product(weight, None)(x), plain
    )
    assert "products of 70 × 256: the kernel cannot be used (what it gives is off" in (
        registry.why_plain
    )
    uses: list[Use] = ["product", "head"]
    for use, ask in zip(
        uses, (required.choose_product, required.choose_head), strict=True
    ):
        with pytest.raises(UsageError, match="what it gives is off by"):
            ask(random_weight(wrong, 70, 256, use=use), None)
    how = Moe(3, 2, Mlp("silu", 64))
    up = random_weight(wrong, 3, 128, 256)
    down = random_weight(INT8_32, 3, 256, 64)
    assert registry.choose_experts_kernel(Mixture(how, up, down)) is None
    mixed = random_weight(join_formats([(INT8, 30), (wrong, 30)]), 60, 256)
    assert not isinstance(registry.choose_product(mixed, None), PackedProduct)


def test_a_trial_is_of_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts were tried by the format of their first weight alone."""
    wrong = replace(INT4, name="int4 in another order", kind=FORMS["Q4_1"].kind)
    registry = registry_of(FLOATS)
    how = Moe(3, 2, Mlp("silu", 64))
    up = random_weight(INT8, 3, 128, 256)
    right = random_weight(INT4, 3, 256, 64)
    other = random_weight(wrong, 3, 256, 64)
    assert isinstance(
        registry.choose_experts_kernel(Mixture(how, up, right)), PackedExperts
    )
    assert registry.choose_experts_kernel(Mixture(how, up, other)) is None

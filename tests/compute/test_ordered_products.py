"""Products with weights whose inputs stand in an order of their own, as act-order leaves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.joined import join_formats
from fminfer.compute.formats.ordered import Ordered
from fminfer.compute.formats.published_rows import make_whole_numbers
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers.experts import Mixture
from fminfer.compute.layers.products import (
    Linear,
    OrderedProduct,
    PackedProduct,
    ProductKernel,
)
from fminfer.compute.values.spec import Mlp, Moe
from fminfer.compute.values.weights import Format, TensorSpec, Weight
from fminfer.forward.registry import Registry
from tests.conftest import built_library
from tests.random_blocks import FORMS, random_blocks, random_weight

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)
FLOATS = torch.float32
HALVES = torch.bfloat16
INPUTS = 256
WHOLE4 = make_whole_numbers(4, 128)
WHOLE8 = make_whole_numbers(8, 0)
of_both_types = pytest.mark.parametrize("of_rows", [FLOATS, HALVES])


def random_order() -> torch.Tensor:
    return torch.randperm(INPUTS).int()


def draw_part(
    form: Blocks, outputs: int, order: torch.Tensor | None
) -> tuple[Format, int, tuple[torch.Tensor, ...]]:
    """Return format, outputs and tensors of rows in an order, or in the usual one."""
    packed = random_blocks(form, outputs, INPUTS)
    if order is None:
        return form, outputs, (packed,)
    return Ordered(form), outputs, (packed, order)


def join_parts(
    *parts: tuple[Format, int, tuple[torch.Tensor, ...]],
) -> Weight:
    joined = join_formats([(part_format, num) for part_format, num, _ in parts])
    spec = TensorSpec((sum(num for _, num, _ in parts), INPUTS), "product")
    return Weight(spec, joined, sum((tensors for _, _, tensors in parts), ()))


def make_registry(of_rows: torch.dtype) -> Registry:
    registry = Registry("require", built_library(), of_rows, torch.device("cpu"))
    registry.of_products[1:] = []  # ours alone
    return registry


def check_product(
    product: OrderedProduct, weight: Weight, of_rows: torch.dtype
) -> None:
    """See that rows give what they give with the weight as floats, each for itself."""
    bias = torch.randn(weight.shape[0]).to(of_rows)
    linear = Linear(weight, bias)
    biased = ProductKernel(built_library()).make_product(linear)
    x = torch.randn(40, INPUTS).to(of_rows)
    exact = x.double() @ weight.dequantize(FLOATS).double().t()
    limit = 1e-5 if of_rows == FLOATS else 0.01
    for rows in (1, 5, 40):
        found = product(x[:rows])
        assert found.dtype == of_rows and found.shape == (rows, weight.shape[0])
        assert (found - exact[:rows]).abs().max() <= limit * exact.abs().max()
        assert torch.equal(found, product(x)[:rows])
        both = exact[:rows] + bias.double()
        assert (biased(x[:rows]) - both).abs().max() <= limit * both.abs().max()
    by_two = product(x.view(8, 5, INPUTS))
    assert torch.equal(by_two.view(40, -1), product(x))


@of_both_types
@pytest.mark.parametrize("form", [WHOLE4, WHOLE8], ids=lambda form: form.name)
def test_a_product_in_another_order(form: Blocks, of_rows: torch.dtype) -> None:
    weight = join_parts(draw_part(form, 70, random_order()))
    product = make_registry(of_rows).choose_product(weight, None)
    assert isinstance(product, OrderedProduct)
    check_product(product, weight, of_rows)


@of_both_types
def test_parts_with_one_order_are_one_product(of_rows: torch.dtype) -> None:
    """As queries, keys and values are, which were quantized with the same inputs."""
    order = random_order()
    weight = join_parts(
        draw_part(WHOLE4, 64, order),
        draw_part(WHOLE4, 70, order.clone()),
        draw_part(WHOLE8, 33, order),
    )
    product = make_registry(of_rows).choose_product(weight, None)
    assert isinstance(product, OrderedProduct) and len(product.products) == 1
    check_product(product, weight, of_rows)


@of_both_types
def test_parts_with_other_orders_stand_side_by_side(of_rows: torch.dtype) -> None:
    order = random_order()
    weight = join_parts(
        draw_part(WHOLE4, 5, None),
        draw_part(WHOLE8, 6, None),
        draw_part(WHOLE4, 64, order),
        draw_part(WHOLE4, 70, random_order()),
        draw_part(WHOLE4, 33, order),
        draw_part(FORMS["Q6_K"], 2, None),
    )
    product = make_registry(of_rows).choose_product(weight, None)
    assert isinstance(product, OrderedProduct) and len(product.products) == 5
    check_product(product, weight, of_rows)


def test_products_in_the_usual_order_are_as_they_were() -> None:
    """Parts without an order are one product, which whole layers take."""
    weight = random_weight(join_formats([(WHOLE4, 64), (Dense(HALVES), 3)]), 67, INPUTS)
    linear = Linear(weight, torch.randn(67))
    kernel = ProductKernel(built_library())
    product = kernel.make_product(linear)
    assert isinstance(product, PackedProduct)
    x = torch.randn(7, INPUTS)
    assert torch.equal(product(x), kernel.pack_weight(weight, linear.bias)(x))


def test_heads_and_mixtures_with_an_order_are_left_to_others() -> None:
    weight = join_parts(draw_part(WHOLE4, 70, random_order()))
    registry = make_registry(FLOATS)
    head = replace(weight, spec=TensorSpec(weight.shape, "head"))
    assert registry.choose_head(head, None) is None
    with pytest.raises(AssertionError, match="a weight to pack"):
        ProductKernel(built_library()).pack_weight(weight, None)

    experts = Moe(2, 1, Mlp("silu", 128))
    packed = random_blocks(WHOLE4, 2, 256, INPUTS)
    orders = torch.stack([random_order(), random_order()])
    spec = TensorSpec((2, 256, INPUTS), "product")
    down = random_weight(WHOLE4, 2, INPUTS, 128)
    up = Weight(spec, Ordered(WHOLE4), (packed, orders))
    assert registry.choose_experts_kernel(Mixture(experts, up, down)) is None
    plain_up = Weight(spec, WHOLE4, (packed,))
    assert registry.choose_experts_kernel(Mixture(experts, plain_up, down)) is not None
    one = registry.choose_product(up.expert(1), None)
    x = torch.randn(3, INPUTS)
    expected = x @ up.expert(1).dequantize(FLOATS).t()
    torch.testing.assert_close(one(x), expected, rtol=1e-4, atol=1e-3)

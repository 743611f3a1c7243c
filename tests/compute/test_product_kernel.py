"""The kernels' packed products: right, each row for itself, used where fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fminfer
from fminfer.compute.formats.dense import Dense, make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers import products
from fminfer.compute.layers.products import (
    PackedProduct,
    ProductKernel,
    is_kernel_faster,
    make_library_candidates,
    onednn_packs_bfloat16,
)
from fminfer.compute.values.weights import Weight
from fminfer.forward.registry import Registry
from tests.conftest import built_library

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)
needs_onednn = pytest.mark.skipif(
    not onednn_packs_bfloat16(), reason="on this processor oneDNN packs no bfloat16"
)
# Less than a panel, whole ones, one output more; a step of the transpose, two, many;
# tails of it.
SHAPES = [
    (1, 32),
    (15, 64),
    (64, 32),
    (65, 96),
    (130, 1024),
    (256, 3072),
    (33, 2),
    (70, 50),
]
FLOATS = torch.float32
HALVES = torch.bfloat16
WAYS = [(FLOATS, FLOATS), (HALVES, FLOATS), (HALVES, HALVES)]  # of weights, of rows
of_all_ways = pytest.mark.parametrize(("of_weight", "of_rows"), WAYS)


@pytest.fixture(scope="module")
def kernel() -> ProductKernel:
    return ProductKernel(built_library())


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_layer(
    outputs: int, inputs: int, dtype: torch.dtype = HALVES
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(outputs)
    return torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


def pack(
    kernel: ProductKernel, weight: torch.Tensor, bias: torch.Tensor | None
) -> PackedProduct:
    return kernel.pack_weight(make_dense_weight(weight, "product"), bias)


def can_pack(*shape: int, dtype: torch.dtype = HALVES) -> bool:
    return ProductKernel.can_pack(
        make_dense_weight(torch.empty(shape, dtype=dtype), "product")
    )


@of_all_ways
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_rounded_once(
    outputs: int,
    inputs: int,
    has_bias: bool,
    num_threads: int,
    of_weight: torch.dtype,
    of_rows: torch.dtype,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    set_threads(num_threads)
    weight, bias = random_layer(outputs, inputs, of_weight)
    product = pack(kernel, weight, bias if has_bias else None)
    for rows in [*range(1, 40), 300, 600]:  # and more than are widened at once
        x = torch.randn(rows, inputs).to(of_rows)
        exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
        size = x.double().abs() @ weight.double().abs().t() + 1
        found = product(x)
        assert found.shape == (rows, outputs) and found.dtype == of_rows
        limit = size * (inputs + 2) * 2**-24
        if of_rows == HALVES:
            limit = limit + exact.abs() * 2**-8
        assert ((found.double() - exact).abs() <= limit).all(), f"{rows} rows"


@pytest.mark.parametrize("num_inputs", [768, 5000])
@of_all_ways
def test_a_row_is_the_same_beside_any_others(
    num_inputs: int,
    of_weight: torch.dtype,
    of_rows: torch.dtype,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    """For whatever rows, threads and pieces of a long weight: sums are in the inputs' order."""
    weight, bias = random_layer(200, num_inputs, of_weight)
    product = pack(kernel, weight, bias)
    x = torch.randn(131, num_inputs).to(of_rows)
    set_threads(1)
    alone = torch.cat([product(row) for row in x.split(1)])
    for num_threads in (1, 2, 5):
        set_threads(num_threads)
        for rows in (2, 5, 6, 7, 13, 61, 131):
            assert torch.equal(product(x[:rows]), alone[:rows])


def test_weights_of_16_bits_give_what_floats_do(kernel: ProductKernel) -> None:
    """To the last bit: they are widened, and nothing else is rounded."""
    weight, bias = random_layer(200, 770)
    halves = pack(kernel, weight, bias)
    floats = pack(kernel, weight.float(), bias.float())
    for rows in (1, 6, 25, 99):
        x = torch.randn(rows, 770)
        assert torch.equal(halves(x), floats(x))


@of_all_ways
def test_rows_that_are_not_in_one_piece(
    of_weight: torch.dtype, of_rows: torch.dtype, kernel: ProductKernel
) -> None:
    weight, bias = random_layer(70, 64, of_weight)
    product = pack(kernel, weight, bias)
    x = torch.randn(1, 4, 9, 64).to(of_rows).transpose(1, 2)[..., ::2, :]
    found = product(x)
    assert found.shape == (1, 9, 2, 70)
    assert torch.equal(found.view(-1, 70), product(x.reshape(-1, 64)))
    assert product(x[:, :0]).shape == (1, 0, 2, 70)


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_rows_of_a_weight_are_found_in_its_packed_form(
    dtype: torch.dtype, kernel: ProductKernel
) -> None:
    """A tied embedding was kept as it is stored, beside what is multiplied."""
    for outputs, inputs in SHAPES:
        weight, bias = random_layer(outputs, inputs, dtype)
        ids = torch.tensor([outputs - 1, 0, outputs // 2, 0])
        for some in (ids, ids[:0]):
            found = pack(kernel, weight, bias).dequantize_rows(some)
            assert found.dtype == dtype and torch.equal(found, weight[some])


@of_all_ways
def test_sums_of_16_bit_products_may_stay_float32(
    of_weight: torch.dtype, of_rows: torch.dtype, kernel: ProductKernel
) -> None:
    weight, bias = random_layer(150, 96, of_weight)
    product = pack(kernel, weight, bias)
    for rows in (1, 7, 30, 600):
        x = torch.randn(rows, 96).to(of_rows)
        found = product.multiply_unrounded(x)
        assert found.dtype == torch.float32
        assert torch.equal(found.to(of_rows), product(x))
        assert of_rows == FLOATS or not torch.equal(found.bfloat16().float(), found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_costs_no_other(
    value: float, kernel: ProductKernel
) -> None:
    weight, bias = random_layer(65, 64)
    product = pack(kernel, weight, bias)
    x = torch.randn(8, 64).bfloat16()
    expected = product(x)
    x[3, 17] = value
    found = product(x)
    others = torch.arange(8) != 3
    assert torch.equal(found[others], expected[others])
    assert not found[3].isfinite().any()


def test_it_packs_what_it_can_multiply(kernel: ProductKernel) -> None:
    assert can_pack(3, 48)
    assert not can_pack(3, 33), "half a unit"
    assert can_pack(3, 33, dtype=FLOATS)
    assert not can_pack(0, 4, dtype=FLOATS)
    assert not can_pack(3, 64, dtype=torch.float16)
    for wrong in (
        torch.empty(1, 32, dtype=HALVES),
        torch.empty(1, 64, dtype=torch.float16),
    ):
        with pytest.raises(AssertionError, match="rows"):
            pack(kernel, *random_layer(3, 64))(wrong)
    with pytest.raises(AssertionError, match="rows"):
        pack(kernel, *random_layer(3, 64, FLOATS))(torch.empty(1, 64, dtype=HALVES))


def test_a_product_without_memory_is_a_memory_error(
    kernel: ProductKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the process: what a thread of the pool throws goes nowhere."""
    product = pack(kernel, *random_layer(3, 64))
    monkeypatch.setattr(kernel, "multiply", lambda product: 1)
    with pytest.raises(MemoryError, match="no memory"):
        product(torch.ones(2, 64, dtype=HALVES))


@pytest.mark.parametrize("has_tiles", [False, True])
def test_it_is_used_where_onednn_is_slower(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_unit", lambda name: has_tiles)
    assert is_kernel_faster(Dense(FLOATS), FLOATS)
    assert is_kernel_faster(Dense(HALVES), HALVES) == (not has_tiles)
    assert is_kernel_faster(Dense(HALVES), FLOATS)


@needs_onednn
def test_linear_layers_are_packed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_unit", lambda name: False)
    layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(33, 96)]).bfloat16()
    layers.requires_grad_(False)
    xs = [torch.randn(1, 7, 64).bfloat16(), torch.randn(1, 7, 33).bfloat16()]
    with torch.inference_mode():
        expected = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        registry = Registry("auto", built_library(), HALVES, torch.device("cpu"))
        registry.of_products[1:] = make_library_candidates(HALVES, is_fast=True)
        packed = [
            registry.choose_product(
                make_dense_weight(layer.weight, "product"), layer.bias
            )
            for layer in layers
        ]
        with torch.profiler.profile() as seen:
            found = [product(x) for product, x in zip(packed, xs, strict=True)]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    names = [event.name for event in seen.events()]
    assert names.count("mkldnn::_linear_pointwise") == 1, "33 is odd"


@needs_onednn
def test_a_model_answers_with_it(
    llama_checkpoint: tuple[Path, Any],
    kernel: ProductKernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = []
    own = ProductKernel._pack_parts

    def spy(self: ProductKernel, parts: list[Weight], *rest: Any) -> Any:
        packed.append([part.shape for part in parts])
        return own(self, parts, *rest)

    monkeypatch.setattr(ProductKernel, "_pack_parts", spy)
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    rows = [{"prompt": [1, 2, 3, 4 + i]} | scored for i in range(9)]
    scores = {}
    monkeypatch.setattr(products, "has_unit", lambda name: False)
    for body in ("off", "require"):
        engine = fminfer.Engine(
            str(llama_checkpoint[0]), dtype="bfloat16", kernels=body
        )
        results = [record.result for record in engine.run(rows)]
        engine.close()
        scores[body] = [
            r["choices"][0]["logprobs"]["token_logprobs"][1:] for r in results if r
        ]
        assert len(scores[body]) == len(rows)
        # The weights of three layers; the head's, and as many of it as its trial takes.
        assert len(packed) == (3 * 4 + 2 if body == "require" else 0)
    torch.testing.assert_close(scores["require"], scores["off"], atol=0.05, rtol=0.05)

"""The kernels' products of bfloat16: right, each row for itself, used where fastest."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fminfer
from fminfer import product_kernel
from fminfer.compute.products import PackedProducts
from fminfer.kernel_build import find_compiler
from fminfer.packed_linear import onednn_packs_bfloat16
from fminfer.processor import compiler_flags
from fminfer.product_kernel import ProductKernel

from .conftest import built_library

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
needs_onednn = pytest.mark.skipif(
    not onednn_packs_bfloat16(), reason="on this processor oneDNN packs no bfloat16"
)
# Less than a panel, whole ones, one output more; a step of the transpose, two, many.
SHAPES = [(1, 32), (15, 64), (64, 32), (65, 96), (130, 1024), (256, 3072)]


@pytest.fixture(scope="module")
def any_kernel() -> ProductKernel:
    return ProductKernel(built_library())


@pytest.fixture
def kernel(any_kernel: ProductKernel) -> ProductKernel:
    if not any_kernel.is_there:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    return any_kernel


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_layer(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(outputs)
    return torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()


def test_a_processor_with_pairs_has_the_kernel(any_kernel: ProductKernel) -> None:
    compiler = find_compiler()
    assert compiler is not None
    command = [*compiler, *compiler_flags(), "-dM", "-E", "-x", "c++", "/dev/null"]
    defined = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert any_kernel.is_there == ("__AVX512BF16__" in defined)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_rounded_once(
    outputs: int,
    inputs: int,
    has_bias: bool,
    num_threads: int,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    set_threads(num_threads)
    weight, bias = random_layer(outputs, inputs)
    product = kernel.pack(weight, bias if has_bias else None)
    for rows in [*range(1, 40), 512]:
        x = torch.randn(rows, inputs).bfloat16()
        exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
        size = x.double().abs() @ weight.double().abs().t() + 1
        found = product(x)
        assert found.shape == (rows, outputs) and found.dtype == torch.bfloat16
        limit = exact.abs() * 2**-8 + size * inputs * 2**-24
        assert ((found.double() - exact).abs() <= limit).all(), f"{rows} rows"


def test_a_row_is_the_same_beside_any_others(
    kernel: ProductKernel, set_threads: Callable[[int], None]
) -> None:
    weight, bias = random_layer(200, 768)
    product = kernel.pack(weight, bias)
    x = torch.randn(61, 768).bfloat16()
    set_threads(1)
    alone = torch.cat([product(row) for row in x.split(1)])
    for num_threads in (1, 2, 5):
        set_threads(num_threads)
        for rows in (2, 5, 6, 7, 13, 61):
            assert torch.equal(product(x[:rows]), alone[:rows])


def test_rows_that_are_not_in_one_piece(kernel: ProductKernel) -> None:
    weight, bias = random_layer(70, 64)
    product = kernel.pack(weight, bias)
    x = torch.randn(1, 4, 9, 64).bfloat16().transpose(1, 2)[..., ::2, :]
    found = product(x)
    assert found.shape == (1, 9, 2, 70)
    assert torch.equal(found.view(-1, 70), product(x.reshape(-1, 64)))
    assert product(x[:, :0]).shape == (1, 0, 2, 70)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_costs_no_other(value: float, kernel: ProductKernel) -> None:
    weight, bias = random_layer(65, 64)
    product = kernel.pack(weight, bias)
    x = torch.randn(8, 64).bfloat16()
    expected = product(x)
    x[3, 17] = value
    found = product(x)
    others = torch.arange(8) != 3
    assert torch.equal(found[others], expected[others])
    assert not found[3].isfinite().any()


def test_it_packs_what_it_can_multiply(kernel: ProductKernel) -> None:
    assert kernel.can_pack(torch.empty(3, 64, dtype=torch.bfloat16))
    assert not kernel.can_pack(torch.empty(3, 48, dtype=torch.bfloat16))
    assert not kernel.can_pack(torch.empty(3, 64))
    with pytest.raises(AssertionError, match="rows"):
        kernel.pack(*random_layer(3, 64))(torch.empty(1, 32, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="rows"):
        kernel.pack(*random_layer(3, 64))(torch.empty(1, 64))


@pytest.mark.parametrize(
    ("has_pairs", "has_tiles", "num_threads", "outputs", "is_best"),
    [
        (True, False, 1, 256, True),
        (True, False, 1, 255, False),
        (True, False, 2, 256, False),
        (True, False, 2, 512, True),
        (True, True, 1, 256, False),
        (False, False, 1, 256, False),
    ],
)
def test_it_is_used_where_onednn_is_slower(
    has_pairs: bool,
    has_tiles: bool,
    num_threads: int,
    outputs: int,
    is_best: bool,
    any_kernel: ProductKernel,
    set_threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_threads(num_threads)
    monkeypatch.setattr(any_kernel, "is_there", has_pairs)
    monkeypatch.setattr(product_kernel, "has_unit", lambda name: has_tiles)
    weight = torch.empty(outputs, 64, dtype=torch.bfloat16)
    assert any_kernel.is_best_for(weight) == is_best


@needs_onednn
def test_linear_layers_are_packed_for_it(
    kernel: ProductKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProductKernel, "is_best_for", ProductKernel.can_pack)
    layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(48, 96)]).bfloat16()
    layers.requires_grad_(False)
    xs = [torch.randn(1, 7, 64).bfloat16(), torch.randn(1, 7, 48).bfloat16()]
    with torch.inference_mode():
        expected = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        packed = PackedProducts(is_fast_in_bfloat16=True, kernel=kernel)
        products = [packed.make(layer.weight, layer.bias) for layer in layers]
        with torch.profiler.profile() as seen:
            found = [product(x) for product, x in zip(products, xs, strict=True)]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    names = [event.name for event in seen.events()]
    assert names.count("mkldnn::_linear_pointwise") == 1, "48 is no multiple of 32"


@needs_onednn
def test_a_model_answers_with_it(
    llama_checkpoint: tuple[Path, Any],
    kernel: ProductKernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = []
    pack = ProductKernel.pack

    def spy(self: ProductKernel, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        packed.append(weight.shape)
        return pack(self, weight, bias)

    monkeypatch.setattr(ProductKernel, "pack", spy)
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    rows = [{"prompt": [1, 2, 3, 4 + i]} | scored for i in range(9)]
    scores = {}
    monkeypatch.setattr(ProductKernel, "is_best_for", ProductKernel.can_pack)
    for body in ("eager", "compiled"):
        engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="bfloat16", attention=body)
        results = [record.result for record in engine.run(rows)]
        engine.close()
        scores[body] = [r["choices"][0]["logprobs"]["token_logprobs"][1:] for r in results if r]
        assert len(scores[body]) == len(rows)
        assert len(packed) == (3 * 4 + 1 if body == "compiled" else 0)
    torch.testing.assert_close(scores["compiled"], scores["eager"], atol=0.05, rtol=0.05)

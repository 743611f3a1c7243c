"""Products with packed weights are the plain products, for any number of rows."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fminfer
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.layers.products import (
    Linear,
    make_library_candidates,
    onednn_packs_bfloat16,
)
from fminfer.compute.trial import Candidate
from fminfer.compute.values.weights import Function, Weight
from fminfer.core.errors import UsageError
from fminfer.forward.registry import Registry
from tests.conftest import plain_registry

needs_packed_bfloat16 = pytest.mark.skipif(
    not onednn_packs_bfloat16(), reason="on this processor oneDNN packs no bfloat16"
)
needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="torch without MKL"
)

CPU = torch.device("cpu")


def product_of(linear: nn.Linear, *, is_fast: bool = False) -> Function:
    """Return the product of a layer, packed where that can be."""
    bias = None if linear.bias is None else linear.bias.detach()
    weight = linear.weight.detach()
    registry = plain_registry(weight.dtype)
    registry.of_products += make_library_candidates(weight.dtype, is_fast=is_fast)
    return registry.choose_product(make_dense_weight(weight, "product"), bias)


def registry_of_wrong_products(asked: Any = "auto") -> Registry:
    """Return a registry whose packed products are off by one."""

    def make(asked: Linear) -> Function:
        return lambda x: x @ asked.weight.plain.t() + 1

    registry = Registry(asked, None, torch.float32, CPU)
    registry.of_products[:] = [
        Candidate(make, lambda asked: asked.make_trial(torch.float32))
    ]
    return registry


@torch.inference_mode()
def is_packed(product: Function, x: torch.Tensor) -> bool:
    with torch.profiler.profile() as seen:
        product(x)
    return "aten::linear" not in [event.name for event in seen.events()]


@needs_mkl
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(768, 96), (96, 768), (1, 64), (300, 17), (33, 1)]
)
def test_any_number_of_rows_is_right(
    outputs: int, inputs: int, num_threads: int
) -> None:
    """The weight is packed for 512 rows; torch's operator is told the number that there are."""
    before = torch.get_num_threads()
    linear = nn.Linear(inputs, outputs, bias=outputs % 2 == 0).requires_grad_(False)
    product = product_of(linear)
    assert is_packed(product, torch.ones(1, inputs))
    torch.set_num_threads(num_threads)
    try:
        for rows in [
            *range(1, 70),
            *random.Random(1).choices(range(70, 1500), k=40),
            512,
        ]:
            x = torch.randn(rows, inputs)
            expected = linear(x)
            error = (product(x) - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{rows} rows"
    finally:
        torch.set_num_threads(before)


def test_bfloat16_is_packed_where_the_machine_is_fast_in_it() -> None:
    linear = nn.Linear(64, 96, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert not is_packed(product_of(linear, is_fast=False), x)
    product = product_of(linear, is_fast=True)
    assert is_packed(product, x) == onednn_packs_bfloat16()
    torch.testing.assert_close(product(x), linear(x), atol=0.02, rtol=0.02)


def test_bfloat16_is_left_plain_where_onednn_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a processor without AVX-512 oneDNN raises an error, which ended the run."""

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError(
            "bf16 path needs the cpu support avx_ne_convert or avx512bw, …"
        )

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    onednn_packs_bfloat16.cache_clear()
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    try:
        product = product_of(linear, is_fast=True)
    finally:
        onednn_packs_bfloat16.cache_clear()
    assert not is_packed(product, torch.ones(1, 64, dtype=torch.bfloat16))


@needs_packed_bfloat16
@pytest.mark.parametrize("outputs", [512, 768, 896])
def test_many_rows_of_few_outputs_in_bfloat16(outputs: int) -> None:
    """Two threads multiply them in halves."""
    linear = nn.Linear(64, outputs, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, 513, 2, 64, dtype=torch.bfloat16).transpose(1, 2)[:, :, :300]
    before = torch.get_num_threads()
    with torch.inference_mode():
        expected = linear(x)
        product = product_of(linear, is_fast=True)
        try:
            for num_threads, num_products in ((1, 1), (2, 2)):
                torch.set_num_threads(num_threads)
                with torch.profiler.profile() as seen:
                    found = product(x)
                torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
                names = [event.name for event in seen.events()]
                assert names.count("mkldnn::_linear_pointwise") == num_products
        finally:
            torch.set_num_threads(before)


def test_what_packs_wrong_is_left_plain() -> None:
    """It was, and nobody was told."""
    linear = nn.Linear(16, 16, bias=False)
    x = torch.randn(3, 16)
    weight = make_dense_weight(linear.weight.detach(), "product")
    packed = registry_of_wrong_products()
    torch.testing.assert_close(packed.choose_product(weight, None)(x), linear(x))
    assert (
        "products of 16 × 16: the kernel cannot be used (what it gives is"
        in packed.why_plain
    )
    packed = registry_of_wrong_products("require")
    with pytest.raises(UsageError, match="--kernels require: products of 16 × 16"):
        packed.choose_product(weight, None)


def test_nan_in_one_weight_does_not_vouch_for_the_others() -> None:
    """What cannot be compared was taken for right, and so was the next of its shape."""
    first, second = (
        nn.Linear(16, 16, bias=False).requires_grad_(False) for _ in range(2)
    )
    first.weight[:] = float("nan")
    packed = registry_of_wrong_products()
    found = packed.choose_product(make_dense_weight(first.weight, "product"), None)
    x = torch.randn(3, 16)
    assert found(x).isnan().all() and not packed.why_plain, "nothing can be compared"
    found = packed.choose_product(make_dense_weight(second.weight, "product"), None)
    torch.testing.assert_close(found(x), second(x))


def test_the_next_candidate_is_tried_where_the_first_fails() -> None:
    """A kernel that failed left the product to plain torch, though MKL or oneDNN were there."""
    calls: list[str] = []

    def product_named(name: str, off: float) -> Candidate[Linear, Function]:
        def make(asked: Linear) -> Function:
            calls.append(name)
            return lambda x: x @ asked.weight.plain.t() + off

        return Candidate(make, lambda asked: asked.make_trial(torch.float32))

    registry = plain_registry()
    registry.of_products += [product_named("first", 1.0), product_named("second", 0.0)]
    weight = make_dense_weight(torch.randn(16, 16), "product")
    x = torch.randn(3, 16)
    for _ in range(2):
        torch.testing.assert_close(
            registry.choose_product(weight, None)(x), x @ weight.tensors[0].t()
        )
    assert calls == ["first", "second", "second"], "the first is tried once"
    assert registry.why_plain.count("products of 16 × 16") == 1


@needs_mkl
def test_weights_are_only_once_in_memory(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were packed are let go."""
    seen: list[weakref.ref[torch.Tensor]] = []
    own = Registry.choose_product

    def product(self: Registry, weight: Weight, bias: torch.Tensor | None) -> Function:
        seen.append(weakref.ref(weight.tensors[0]))
        return own(self, weight, bias)

    monkeypatch.setattr(Registry, "choose_product", product)
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    gc.collect()
    assert len(seen) == 3 * 4 and all(weight() is None for weight in seen)
    engine.close()

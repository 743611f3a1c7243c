"""Products with packed weights are the plain products, for any number of rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

import fminfer
from fminfer import packed_linear
from fminfer.packed_linear import onednn_packs_bfloat16, pack_linears

needs_packed_bfloat16 = pytest.mark.skipif(
    not onednn_packs_bfloat16(), reason="on this processor oneDNN packs no bfloat16"
)


def pack(module: nn.Module, is_fast_in_bfloat16: bool = False) -> int:
    return pack_linears(module.requires_grad_(False), is_fast_in_bfloat16=is_fast_in_bfloat16)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(768, 96), (96, 768), (1, 64), (300, 17), (33, 1)])
def test_any_number_of_rows_is_right(outputs: int, inputs: int, num_threads: int) -> None:
    """The weight is packed for 512 rows; torch's operator is told the number that there are."""
    before = torch.get_num_threads()
    linear = nn.Linear(inputs, outputs, bias=outputs % 2 == 0)
    weight, bias = linear.weight.clone(), linear.bias
    assert pack(linear) == 1
    torch.set_num_threads(num_threads)
    try:
        for rows in [*range(1, 70), *random.Random(1).choices(range(70, 1500), k=40), 512]:
            x = torch.randn(1, rows, inputs)
            expected = nn.functional.linear(x, weight, bias)
            error = (linear(x) - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{rows} rows"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [Conv1D, FalconLinear])
def test_other_spellings_of_a_linear_layer(kind: Any) -> None:
    layer = kind(24, 40)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 40 if kind is Conv1D else 24)
    with torch.inference_mode():
        expected = layer(x)
        num_packed = pack(layer)
        torch.testing.assert_close(layer(x), expected)
    assert num_packed == int(torch.backends.mkl.is_available())


def test_bfloat16_is_packed_where_the_machine_is_fast_in_it() -> None:
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    x = torch.randn(1, 7, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = linear(x)
        assert pack(linear, is_fast_in_bfloat16=False) == 0
        assert pack(linear, is_fast_in_bfloat16=True) == onednn_packs_bfloat16()
        torch.testing.assert_close(linear(x), expected, atol=0.02, rtol=0.02)
        assert bool(linear.weight.isnan().all()) == onednn_packs_bfloat16()


def test_bfloat16_is_left_plain_where_onednn_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without AVX-512 oneDNN raises an error, which ended the run."""

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, …")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    onednn_packs_bfloat16.cache_clear()
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    try:
        assert pack(linear, is_fast_in_bfloat16=True) == 0
    finally:
        onednn_packs_bfloat16.cache_clear()
    assert not linear.weight.isnan().any()


@needs_packed_bfloat16
@pytest.mark.parametrize("outputs", [512, 768, 896])
def test_many_rows_of_few_outputs_in_bfloat16(outputs: int) -> None:
    """Two threads multiply them in halves."""
    linear = nn.Linear(64, outputs, dtype=torch.bfloat16)
    x = torch.randn(1, 513, 2, 64, dtype=torch.bfloat16).transpose(1, 2)[:, :, :300]
    before = torch.get_num_threads()
    with torch.inference_mode():
        expected = linear(x)
        assert pack(linear, is_fast_in_bfloat16=True) == 1
        try:
            for num_threads, num_products in ((1, 1), (2, 2)):
                torch.set_num_threads(num_threads)
                with torch.profiler.profile() as seen:
                    found = linear(x)
                torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
                names = [event.name for event in seen.events()]
                assert names.count("mkldnn::_linear_pointwise") == num_products
        finally:
            torch.set_num_threads(before)


def test_what_packs_wrong_is_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "pack", lambda weight, *_: lambda x: x @ weight.t() + 1)
    linear = nn.Linear(16, 16, bias=False)
    x = torch.randn(3, 16)
    expected = linear(x)
    assert pack(linear) == 0
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
@pytest.mark.parametrize("most", [0, 10**6])
def test_a_tied_head_is_packed_unless_the_copy_is_large(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "MAX_TWICE_BYTES", most)
    model = nn.ModuleList([nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)])
    model[1].weight = model[0].weight
    ids, x = torch.arange(50), torch.randn(3, 16)
    embedded, logits = model[0](ids), model[1](x)
    assert pack(model) == (1 if most else 0)
    assert torch.equal(model[0](ids), embedded)
    torch.testing.assert_close(model[1](x), logits)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_a_model_is_packed_whole_and_only_once_in_memory(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    """Its own weights are let go, and hold nan: whoever read them would be told."""
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", attention="eager")
    stage: Any = engine._pipeline._run.__self__  # type: ignore[attr-defined]
    linears = [m for m in stage._decoder.modules() if type(m) is nn.Linear] + [stage._head._layer]
    assert len(linears) == 3 * 7 + 1
    for linear in linears:
        assert linear.weight.isnan().all() and linear.weight.untyped_storage().nbytes() == 4
    engine.close()


def test_nan_in_one_weight_does_not_vouch_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be compared was taken for right, and so was the next of its shape."""
    monkeypatch.setattr(packed_linear, "pack", lambda weight, *_: lambda x: x @ weight.t() + 1)
    model = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
    model[0].weight.data[3] = float("nan")
    x = torch.randn(3, 16)
    expected = model[1](x)
    pack(model)
    torch.testing.assert_close(model[1](x), expected)

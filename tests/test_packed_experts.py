"""Experts with packed weights give what transformers' own give."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer.draw_kernel import DrawKernel
from fminfer.kernel_build import find_compiler
from fminfer.layer_kernels import LayerKernels
from fminfer.packed_experts import PackedExperts, pack_experts
from fminfer.packed_linear import find_packable, onednn_packs_bfloat16
from fminfer.product_kernel import ProductKernel

from .conftest import built_library, make_model, save_byte_tokenizer

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
needs_packed_bfloat16 = pytest.mark.skipif(
    not onednn_packs_bfloat16(), reason="on this processor oneDNN packs no bfloat16"
)
PACKED_DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_packed_bfloat16)]
LAYERS = {"mixtral": 3, "qwen3_moe": 2}  # that have experts


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def routed(module: Any, tokens: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, k experts of each, all different, and weights."""
    num_experts, _, width = module.gate_up_proj.shape
    generator = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(tokens)])
    x = torch.randn((tokens, width), generator=generator)
    return x, index[:, :k], torch.rand((tokens, k), generator=generator)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@torch.inference_mode()
def test_any_tokens_have_the_experts_own_answer(
    family: str, is_compiled: bool, dtype: torch.dtype
) -> None:
    if is_compiled and find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    library = built_library() if is_compiled else None
    model = make_model(family)
    expected = {}
    for number, module in enumerate(experts_of(model)):
        for tokens in (1, 3, 70):  # of one token, most experts have none
            for k in (1, 2, 4):
                x, index, weights = routed(module, tokens, k)
                x = x.to(dtype).float()
                expected[number, tokens, k] = module(x, index, weights)
    model = model.to(dtype)
    foreseen = find_packable(model, dtype, is_fast_in_bfloat16=True)
    assert sum(weight.dim() == 3 for weight in foreseen) == 2 * LAYERS[family]
    num_packed = pack_experts(
        model,
        is_fast_in_bfloat16=True,
        kernel=None if library is None else ProductKernel(library),
        layers=None if library is None else LayerKernels(library),
    )
    assert num_packed == LAYERS[family]
    for (number, tokens, k), answer in expected.items():
        module = experts_of(model)[number]
        x, index, weights = routed(module, tokens, k)
        found = module(x.to(dtype), index, weights)  # which mixtral's router gives in float32
        assert found.dtype == dtype
        limit = (1e-5 if dtype == torch.float32 else 0.03) * answer.abs().max()
        assert (found.float() - answer).abs().max() < limit
        assert module.gate_up_proj.isnan().all() and module.down_proj.isnan().all()


def test_a_run_packs_experts_and_draws_with_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    calls: Counter[str] = Counter()
    for kind in (PackedExperts, DrawKernel):
        own = kind.__call__

        def call(*given: Any, own: Any = own, name: str = kind.__name__) -> torch.Tensor:
            calls[name] += 1
            answer: torch.Tensor = own(*given)
            return answer

        monkeypatch.setattr(kind, "__call__", call)
    make_model("mixtral").save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    engine = fminfer.Engine(str(tmp_path), dtype="float32")
    calls.clear()  # packing compares
    rows = [{"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 1.0, "ignore_eos": True}]
    (record,) = engine.run(rows)
    engine.close()
    assert record.error is None
    steps_of_layers = 4 * LAYERS["mixtral"]
    assert calls["DrawKernel"] == 4 and calls["PackedExperts"] == steps_of_layers


def test_what_is_slow_or_differs_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mixtral").bfloat16()
    assert pack_experts(model, is_fast_in_bfloat16=False) == 0
    kind = type(experts_of(model)[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: 2 * own(*given))
    for dtype in (torch.bfloat16, torch.float32):
        model = model.to(dtype)
        assert pack_experts(model, is_fast_in_bfloat16=True) == 0
        assert not experts_of(model)[0].gate_up_proj.isnan().any()

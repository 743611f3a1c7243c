"""Logits are float32 whatever the weights are: sums are kept as they are, and not rounded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fminfer
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers.products import ProductKernel
from fminfer.forward import transformer as head_module
from fminfer.forward.registry import Registry
from fminfer.forward.transformer import Head
from tests.conftest import built_library, make_model, save_byte_tokenizer

# (rows, inputs, outputs): one of each; parts of vectors, of tiles and of blocks; several blocks.
SHAPES = [
    (1, 32, 64),
    (3, 1, 40),
    (5, 33, 1),
    (16, 100, 31),
    (17, 96, 33),
    (33, 768, 97),
]
SHAPES += [(70, 64, 300), (13, 300, 130)]
TYPES = [torch.float32, torch.bfloat16]
PAIRS = [(of_rows, of_weight) for of_rows in TYPES for of_weight in TYPES]


@pytest.fixture(scope="module")
def kernel() -> ProductKernel:
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    return ProductKernel(built_library())


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_layer(
    inputs: int, outputs: int, dtype: torch.dtype, *, has_bias: bool
) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=has_bias).to(dtype).requires_grad_(False)


def make_head(
    layer: nn.Linear, kernel: ProductKernel | None, of_rows: torch.dtype | None = None
) -> Head:
    """Return the head of a network whose weights are a layer's, packed if they can be."""
    library = None if kernel is None else built_library()
    registry = Registry(
        "auto", library, of_rows or layer.weight.dtype, torch.device("cpu")
    )
    bias = None if layer.bias is None else layer.bias.detach()
    weight = make_dense_weight(layer.weight.detach(), "head")
    head = Head(weight, bias, registry)
    assert (head.packed is not None) == (kernel is not None and kernel.can_pack(weight))
    return head


def assert_exact(found: torch.Tensor, x: torch.Tensor, layer: nn.Linear) -> None:
    """See that no sum was rounded to 16 bits: that would cost 2^-9 of it, or 2^-12."""
    exact = x.double() @ layer.weight.double().t()
    size = x.double().abs() @ layer.weight.double().abs().t() + 1
    if layer.bias is not None:
        exact += layer.bias.double()
    assert found.dtype == torch.float32 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= size * (x.shape[1] + 8) * 2**-24).all()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("of_rows", "of_weight"), PAIRS)
def test_the_kernel_keeps_float32(
    of_rows: torch.dtype,
    of_weight: torch.dtype,
    has_bias: bool,
    num_threads: int,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    set_threads(num_threads)
    chance = random.Random(4)
    some = [tuple(chance.randint(1, most) for most in (40, 290, 290)) for _ in range(8)]
    for rows, inputs, outputs in [*SHAPES, *some]:
        layer = make_layer(inputs, outputs, of_weight, has_bias=has_bias)
        x = torch.randn(rows, inputs).to(of_rows)
        assert_exact(make_head(layer, kernel, of_rows)(x), x, layer)


@pytest.mark.parametrize(("of_rows", "of_weight"), PAIRS)
def test_nothing_beside_the_operands_is_read(
    of_rows: torch.dtype, of_weight: torch.dtype, kernel: ProductKernel
) -> None:
    """Before and behind rows, weight and bias lies nan; one that is read shows."""
    for rows, inputs, outputs in SHAPES:
        layer = make_layer(inputs, outputs, of_weight, has_bias=True)
        x = torch.randn(rows, inputs).to(of_rows)
        weight = make_dense_weight(between_nan(layer.weight), "head")
        if kernel.can_pack(weight):  # of whole units
            product = kernel.pack_weight(weight, between_nan(layer.bias.float()))
            assert_exact(product.multiply_unrounded(between_nan(x)), x, layer)


def between_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies at an odd place in a larger tensor of nan."""
    larger = torch.full((tensor.numel() + 401,), float("nan"), dtype=tensor.dtype)
    inner = larger[201 : 201 + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor.detach())


def test_a_bfloat16_weight_gives_what_it_gives_widened(kernel: ProductKernel) -> None:
    """To the last bit: how a weight is stored must not show in an answer."""
    for rows, inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs).bfloat16()
        x = torch.randn(rows, inputs)
        both = (
            make_dense_weight(weight, "head"),
            make_dense_weight(weight.float(), "head"),
        )
        if kernel.can_pack(both[0]):  # of whole units
            kept, widened = (kernel.pack_weight(each, None) for each in both)
            assert torch.equal(
                kept.multiply_unrounded(x), widened.multiply_unrounded(x)
            )


@pytest.mark.parametrize(("of_rows", "of_weight"), PAIRS)
def test_a_row_is_the_same_beside_any_others(
    of_rows: torch.dtype,
    of_weight: torch.dtype,
    kernel: ProductKernel,
    set_threads: Callable[[int], None],
) -> None:
    head = make_head(make_layer(200, 150, of_weight, has_bias=True), kernel, of_rows)
    x = torch.randn(61, 200).to(of_rows)
    set_threads(1)
    alone = torch.cat([head(row) for row in x.split(1)])
    for num_threads, rows in itertools.product((1, 2, 5), (2, 15, 16, 17, 32, 33, 61)):
        set_threads(num_threads)
        assert torch.equal(head(x[:rows]), alone[:rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_is_not_finite_costs_no_other(
    dtype: torch.dtype, value: float, kernel: ProductKernel
) -> None:
    head = make_head(make_layer(64, 65, dtype, has_bias=False), kernel)
    x = torch.randn(20, 64).to(dtype)
    expected = head(x)
    x[3, 17] = value
    found = head(x)
    others = torch.arange(20) != 3
    assert torch.equal(found[others], expected[others])
    assert not found[3].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_torch_keeps_float32(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # some outputs at a time
    monkeypatch.setattr(head_module, "WIDENED_BYTES", 4 * 96 * 7)
    layer = make_layer(96, 33, dtype, has_bias=has_bias)
    x = torch.randn(5, 96).to(dtype)
    assert_exact(make_head(layer, None)(x), x, layer)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is a GPU's."""

    is_cuda = True  # type: ignore[assignment]


def test_a_gpu_is_asked_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product gave bfloat16: up to 0.06 nat a logprob."""
    asked = []

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        asked.append(out_dtype)
        product: torch.Tensor = a.to(out_dtype) @ b.to(out_dtype)
        return product.as_subclass(torch.Tensor)

    monkeypatch.setattr(torch, "mm", mm)
    layer = make_layer(96, 33, torch.bfloat16, has_bias=True)
    on_gpu = make_layer(96, 33, torch.bfloat16, has_bias=True)
    on_gpu.weight = nn.Parameter(
        on_gpu.weight.data.as_subclass(OnGpu), requires_grad=False
    )
    x = torch.randn(5, 96).bfloat16()
    assert on_gpu.weight.is_cuda
    assert_exact(make_head(on_gpu, None)(x), x, layer)
    assert asked == [torch.float32]


def test_a_float32_head_is_the_layer_itself() -> None:
    layer = make_layer(96, 33, torch.float32, has_bias=True)
    x = torch.randn(5, 96)
    assert torch.equal(make_head(layer, None)(x), layer(x))


@pytest.fixture(scope="module")
def certain_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Give a model that only its head can get wrong: logits about 25, layers that add little."""
    folder = tmp_path_factory.mktemp("certain")
    model = make_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name or name == "model.norm.weight":
                parameter.fill_(1)
            elif "layers" in name:
                parameter.mul_(0.01)
        model.lm_head.weight.mul_(35)
    model.to(torch.bfloat16).requires_grad_(False).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder, model


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_logprobs_in_bfloat16_are_finer_than_transformers(
    kernels: Any, certain_model: tuple[Path, Any]
) -> None:
    """The head gave 16-bit logits: gaps were multiples of 1/8 nat, and the best ones tied."""
    folder, model = certain_model
    prompts = [[(7 * i + 31 * row) % 300 for i in range(12)] for row in range(6)]
    exact = torch.log_softmax(model.float()(torch.tensor(prompts)).logits.double(), -1)
    theirs = torch.log_softmax(
        model.bfloat16()(torch.tensor(prompts)).logits.float(), -1
    )
    engine = fminfer.Engine(str(folder), dtype="bfloat16", kernels=kernels)
    rows = [
        {"prompt": p, "echo": True, "max_tokens": 0, "logprobs": 5} for p in prompts
    ]
    records = sorted(engine.run(rows), key=lambda record: record.line.number)
    engine.close()
    errors = []
    their_errors = []
    gaps = []
    for row, record in enumerate(records):
        assert record.result is not None, record.error
        logprobs = record.result["choices"][0]["logprobs"]
        for place in range(1, 12):
            token_id = prompts[row][place]
            truth = exact[row, place - 1, token_id]
            errors.append(abs(logprobs["token_logprobs"][place] - truth))
            their_errors.append(abs(theirs[row, place - 1, token_id] - truth))
            best = sorted(logprobs["top_logprobs"][place].values(), reverse=True)[:5]
            gaps += [a - b for a, b in itertools.pairwise(best)]
    assert torch.tensor(errors).mean() < 0.6 * torch.tensor(their_errors).mean()
    is_coarse = [abs(gap * 8 - round(gap * 8)) < 1e-3 for gap in gaps]
    assert sum(is_coarse) < 0.2 * len(gaps), "multiples of 1/8 nat"

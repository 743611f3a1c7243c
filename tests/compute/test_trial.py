"""A compiled body that gives something else is not used, and the run says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.compute.attention.kernel_attention import CpuAttention
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.kernels.library_calls import PackedCall
from fminfer.compute.layers.bodies import CpuPartKernels
from fminfer.compute.layers.products import Linear, PackedProduct
from fminfer.compute.sampling.draw_kernel import DrawKernel, ScoreKernel
from fminfer.compute.sampling.sampler import Ranking
from fminfer.compute.trial import Candidate, Trial, compare_pairs
from fminfer.core.errors import UsageError
from fminfer.forward.layer import TransformerLayer
from fminfer.forward.layer_step import PartBuilder
from fminfer.forward.registry import Registry
from fminfer.forward.whole_layers import WholeLayers
from fminfer.models.checkpoint import open_random_checkpoint
from tests.conftest import built_library, plain_registry
from tests.models.test_oracle import Oracle, check_all, mixed_requests

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)
PARTS = ["norm", "add_and_norm", "rotate", "gate"]
EVERY = [(CpuPartKernels, name) for name in (*PARTS, "gelu")]
EVERY += [(CpuAttention, "__call__"), (PackedProduct, "multiply_unrounded")]


def make_wrong(owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
    """Have a kernel give an element in each row that is off."""
    compute = getattr(owner, name)

    def compute_wrong(*args: Any, **how: Any) -> Any:
        found = compute(*args, **how)
        part = found[-1] if isinstance(found, tuple) else found
        part = found.best if isinstance(found, Ranking) else part
        part[..., -1] += 1
        return found

    patch.setattr(owner, name, compute_wrong)


@needs_compiler
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (CpuPartKernels, "norm"),
        (CpuPartKernels, "gate"),
        (CpuAttention, "__call__"),
        (DrawKernel, "__call__"),
        (ScoreKernel, "__call__"),
    ],
)
def test_a_wrong_kernel_of_the_cpu_costs_speed_alone(
    owner: type,
    name: str,
    llama_checkpoint: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a GPU's kernels were tried: of the CPU's, such a one gave wrong answers."""
    make_wrong(owner, name, monkeypatch)
    folder, model = llama_checkpoint
    engine = check_all(folder, Oracle(model), mixed_requests()[:12], {"block_size": 16})
    assert (
        "the kernel cannot be used (what it gives is off by"
        in engine.facts.measured.why_slower
    )
    with pytest.raises(UsageError, match=r"--kernels require: .* is off by"):
        fminfer.Engine(str(folder), kernels="require")


@needs_compiler
@pytest.mark.parametrize(("owner", "name"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kernel_of_the_cpu_is_tried(
    owner: type, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, why_plain = find_all(dtype)
    assert not why_plain and all(kernel is not None for kernel in found)
    make_wrong(owner, name, monkeypatch)
    found, why_plain = find_all(dtype)
    assert [kernel is None for kernel in found].count(True) == 1
    assert why_plain.count("the kernel cannot be used") == 1


def find_all(dtype: torch.dtype) -> tuple[list[object], str]:
    registry = Registry("auto", built_library(), dtype, torch.device("cpu"))
    how = open_random_checkpoint("llama-160m").model.layers[0].attention
    head = registry.choose_head(
        make_dense_weight(torch.randn(200, 96).to(dtype), "head"), None
    )
    return [
        registry.choose_attention([how], 16, dtype),
        registry.parts.kernels,
        head,
    ], registry.why_plain


@needs_compiler
def test_a_whole_layer_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the one call, which not every processor can do."""

    class Whole:
        def __init__(self, parts: TransformerLayer, *_: object) -> None:
            self.parts = parts

        def __call__(self, *given: Any) -> Any:
            x, more = self.parts(*given)
            return x + more + off, None

    monkeypatch.setattr("fminfer.forward.whole_layers.WholeLayer", Whole)
    how = open_random_checkpoint("llama-160m").model.layers[0]
    size = 768
    width = how.attention.heads * how.attention.head_dim
    sizes = {"qkv": (3 * width, size), "out": (size, width)}
    mlp: Any = how.mlp
    sizes |= {"up": (mlp.up_size, size), "down": (size, mlp.size)}
    weights = {
        f"{k}.weight": make_dense_weight((torch.randn(v) / 30).bfloat16(), "product")
        for k, v in sizes.items()
    }
    norms = (f"before_{k}.weight" for k in ("attention", "mlp"))
    weights |= {
        name: make_dense_weight(torch.ones(size).bfloat16(), "norm") for name in norms
    }
    layer = TransformerLayer(
        how, weights, PartBuilder(plain_registry(torch.bfloat16), 8)
    )
    nothing: Any = None
    layer.products = {
        k: PackedProduct(
            nothing, (), None, v[1], v[0], (PackedCall * 0)(), torch.bfloat16
        )
        for k, v in sizes.items()
    }
    for off in (0.0, 1.0):
        registry = Registry(
            "auto", built_library(), torch.bfloat16, torch.device("cpu")
        )
        whole = WholeLayers(registry)
        for _ in range(2):
            joined = whole.join_layer(layer)
            assert isinstance(joined, Whole if off == 0.0 else TransformerLayer)
        assert bool(registry.why_plain) == bool(off)
    registry = Registry("require", built_library(), torch.bfloat16, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"whole layers: .* is off by"):
        WholeLayers(registry).join_layer(layer)


def test_what_is_compared() -> None:
    nan = torch.tensor([math.nan, 2.0])
    one = torch.tensor([1.0, 2.0])
    compare_pairs([(one, one), (nan, nan), (one, nan), (one * 0, one * 0)], 0.0)
    compare_pairs([(one + 0.1, one)], 0.06)
    for found, expected in ((nan, one), (one + 0.1, one), (one * math.inf, one)):
        with pytest.raises(
            ValueError, match=r"what it gives is off by (nan|0\.05|inf)"
        ):
            compare_pairs([(found, expected)], 0.01)
    trial: Trial[int] = Trial("sums", lambda body: [(one * body, one)], 0.01)
    registry = plain_registry()
    assert registry.find([Candidate(lambda asked: 1, lambda asked: trial)], None) == 1
    assert not registry.why_plain
    assert (
        registry.find([Candidate(lambda asked: 3, lambda asked: trial)], None) is None
    )
    said = "sums: the kernel cannot be used (what it gives is off by 2)"
    assert registry.why_plain == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 48])
@pytest.mark.parametrize("fault", ["rows", "inputs", "scale"])
def test_a_product_that_is_wrong_for_one_number_of_rows_is_refused(
    fault: str, rows: int, dtype: torch.dtype
) -> None:
    """Rows that were nearly the same hid that the last one had some inputs of another."""
    weight = make_dense_weight(
        torch.randn(64, 288, generator=torch.Generator().manual_seed(1)), "product"
    )
    asked = Linear(weight, None)

    def product(x: torch.Tensor) -> torch.Tensor:
        if len(x) != rows:
            return asked(x)
        if fault == "scale" or rows == 1:
            return asked(x * 1.05)
        x = x.clone()
        if fault == "rows":
            x[-1] = x[0]
        else:
            x[-1, -10:] = x[0, -10:]
        return asked(x)

    trial = asked.make_trial(dtype)
    compare_pairs(trial.pairs(asked), trial.limit)
    with pytest.raises(ValueError, match="is off by"):
        compare_pairs(trial.pairs(product), trial.limit)


def test_memory_that_runs_out_in_a_trial_ends_loading() -> None:
    """That says nothing of the kernel, and plain torch would have no more."""

    def fail(asked: None) -> int:
        raise MemoryError

    trial: Trial[int] = Trial("sums", lambda body: [], 0.0)
    registry = plain_registry()
    with pytest.raises(MemoryError):
        registry.find([Candidate(fail, lambda asked: trial)], None)
    assert not registry.why_plain


@needs_compiler
def test_a_quiet_run_says_that_a_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With -q nobody was told but --stats."""
    make_wrong(CpuPartKernels, "norm", monkeypatch)
    given = ["run", "--prompt", "How do I get", "-q", "--kernels"]
    found = CliRunner().invoke(main, [*given, "auto"])
    assert (
        "slower than it could be: norms and activations: the kernel cannot"
        in found.stderr
    )
    found = CliRunner().invoke(main, [*given, "off"])
    assert found.stderr == ""

"""Compiled parts and packed experts are used where they can be, and the rest is plain torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fminfer.compute.attention.scoring import Scoring
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers.bodies import CpuPartKernels, PartKernels
from fminfer.compute.layers.products import (
    make_library_candidates,
    make_product_candidate,
    onednn_packs_bfloat16,
)
from fminfer.compute.values.spec import Mlp, Moe
from fminfer.compute.values.weights import Weight
from fminfer.forward.layer import ExpertLayer
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.forward.registry import Registry
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from fminfer.models.tensor_specs import Weights
from tests.conftest import (
    VOCAB,
    built_library,
    make_model,
    plain_registry,
    some_families,
)
from tests.forward.test_transformer import CPU, Dense, logits_of, one_stage

ALONE: Any = SimpleNamespace(shards=None)  # of a step

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)
needs_packed_bfloat16 = pytest.mark.skipif(
    not onednn_packs_bfloat16(), reason="on this processor oneDNN packs no bfloat16"
)
NAMES = ("norm", "add_and_norm", "rotate", "gate", "gelu")
# Calls of three layers and the final norm, in the order of NAMES.
CALLS = {
    "llama": (1, 6, 3, 3, 0),
    "qwen3": (7, 6, 6, 3, 0),  # queries and keys are normed, and turned, apart
    "olmo2": (12, 1, 6, 3, 0),  # norms of outputs, and one of a sum
    "glm4": (7, 6, 0, 3, 0),  # neighbours are a pair in its rotary positions
    "phi": (1, 3, 3, 0, 3),
    "starcoder2": (1, 6, 3, 0, 3),
    "bloom": (2, 6, 0, 0, 3),
    "mpt": (0, 0, 0, 0, 3),  # a LayerNorm without a bias, and gelu without tanh
    "opt-bare": (0, 0, 0, 0, 0),  # a norm without a weight
    "stablelm-serial": (1, 6, 6, 3, 0),  # norms with a weight for each head
}
EXPERTS = 6
WIDTH = 32


class Counting(CpuPartKernels):
    """The CPU's kernels, counted."""

    def __init__(self) -> None:
        super().__init__(built_library())
        self.calls: Counter[str] = Counter()
        for name in NAMES:
            setattr(self, name, self._counted(name))

    def _counted(self, name: str) -> Any:
        own = getattr(super(), name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return own(*given, **named)

        return call


@needs_compiler
@pytest.mark.parametrize("name", sorted(CALLS))
def test_kernels_compute_what_they_can(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    kernels = Counting()
    found = logits_of(
        tmp_path, one_stage(), [[3, 4, 5]], bodies=lambda: bodies_of(kernels)
    )
    assert tuple(kernels.calls[each] for each in NAMES) == CALLS[name]
    torch.testing.assert_close(found, logits_of(tmp_path, one_stage(), [[3, 4, 5]]))


def bodies_of(
    kernels: PartKernels | None = None, dtype: torch.dtype = torch.float32
) -> PartBuilder:
    return PartBuilder(plain_registry(dtype, kernels), 256)


@torch.inference_mode()
def logprobs_in_bfloat16(
    folder: Path, kernels: PartKernels | None, rows: list[list[int]]
) -> torch.Tensor:
    checkpoint = open_checkpoint(str(folder))
    dtype = torch.bfloat16
    tensors = open_weights(
        checkpoint, one_stage()[0], holding=Holding(dtype), device=CPU, seed=0
    )
    network = Transformer(checkpoint.model, tensors, builder=bodies_of(kernels, dtype))
    make_dense_weight = Dense(checkpoint.model, [len(row) for row in rows])

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: Scoring,
    ) -> torch.Tensor:
        return make_dense_weight(
            layer, query.float(), key.float(), value.float(), how
        ).to(dtype)

    x = network.embed(
        torch.tensor([each for row in rows for each in row]),
        make_dense_weight.positions,
    )
    x = network.run(x, LayerStep(make_dense_weight.positions, attend))
    assert network.head is not None
    logits = network.head(x)
    cap = checkpoint.model.logit_cap
    return (logits if cap is None else torch.tanh(logits / cap) * cap).log_softmax(-1)


@torch.inference_mode()
def own_logprobs(model: Any, rows: list[list[int]]) -> torch.Tensor:
    logits = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    return torch.cat(logits).float().log_softmax(-1)


@pytest.mark.parametrize("name", some_families())
def test_bfloat16_errs_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    """Errors are of all logprobs, from what transformers gives of these weights in float32.

    With experts they are the median token's: one that is sent to another expert errs by chance.
    """
    model = make_model(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path)
    rows = torch.randint(
        VOCAB, (4, 60), generator=torch.Generator().manual_seed(3)
    ).tolist()
    truth = own_logprobs(model, rows)
    layers = open_checkpoint(str(tmp_path)).model.layers
    has_experts = any(isinstance(layer.mlp, Moe) for layer in layers)

    def error_of(found: torch.Tensor) -> float:
        errors = (found - truth).abs().mean(-1)
        return float(errors.median() if has_experts else errors.mean())

    limit = 1.1 * error_of(own_logprobs(model.bfloat16(), rows))
    bodies: list[PartKernels | None] = [None]
    if find_compiler() is not None:
        bodies.append(CpuPartKernels(built_library()))
    for kernels in bodies:
        found = logprobs_in_bfloat16(tmp_path, kernels, rows)
        assert error_of(found) <= limit


def make_experts(dtype: torch.dtype) -> tuple[Moe, Weights]:
    how = Moe(EXPERTS, 2, Mlp("silu", 48))
    shapes = {"router": (EXPERTS, WIDTH), "experts.up": (EXPERTS, 96, WIDTH)}
    shapes |= {"experts.down": (EXPERTS, WIDTH, 48)}
    torch.manual_seed(5)
    drawn = {n: torch.randn(s).mul(0.3).to(dtype) for n, s in shapes.items()}
    return how, {
        f"{name}.weight": make_dense_weight(each, "product")
        for name, each in drawn.items()
    }


@torch.inference_mode()
def expected_of(how: Moe, given: Weights, x: torch.Tensor) -> torch.Tensor:
    """Return the mixture of all experts, token by token, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    scores = (x @ given["router.weight"].plain.t()).float().softmax(-1)
    weights, chosen = scores.topk(how.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    for token, row in enumerate(x.double()):
        for weight, number in zip(weights[token], chosen[token], strict=True):
            both = given["experts.up.weight"].plain[number].double() @ row
            gated = torch.nn.functional.silu(both[:48]) * both[48:]
            out[token] += weight * (
                given["experts.down.weight"].plain[number].double() @ gated
            )
    return out


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_packed_bfloat16)]
)
@torch.inference_mode()
def test_packed_experts_mix_as_plain_ones(dtype: torch.dtype) -> None:
    """Of one token most experts have none; equal tokens all go to the same two."""
    how, tensors = make_experts(dtype)
    registry = plain_registry(dtype)
    if find_compiler() is not None:
        registry.of_products.append(make_product_candidate(built_library(), dtype))
    registry.of_products += make_library_candidates(dtype, is_fast=True)
    packed = ExpertLayer(how, tensors, PartBuilder(registry, 8))
    plain = ExpertLayer(how, tensors, bodies_of(dtype=dtype))
    many = torch.randn(70, WIDTH).to(dtype)
    limit = 1e-5 if dtype == torch.float32 else 0.03
    for x in (many[:1], many[:3], many, many[:1].repeat(9, 1)):
        expected = expected_of(how, tensors, x)
        for found in (packed(x, ALONE), plain(x, ALONE)):
            assert found.dtype == dtype
            assert (
                found.double() - expected
            ).abs().max() <= limit * expected.abs().max()


def test_a_router_stays_plain() -> None:
    """Another rounding would choose other experts."""
    made: list[tuple[int, ...]] = []

    class Recording(Registry):
        def choose_product(self, weight: Weight, bias: torch.Tensor | None) -> Any:
            made.append(weight.shape)
            return super().choose_product(weight, bias)

    how, tensors = make_experts(torch.float32)
    ExpertLayer(
        how, tensors, PartBuilder(Recording("off", None, torch.float32, CPU), 8)
    )
    assert made == [(96, WIDTH), (WIDTH, 48)] * EXPERTS

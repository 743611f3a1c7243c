"""The compiled mixture of experts: right, each token for itself, used where it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers import plain, products
from fminfer.compute.layers.experts import Mix, Mixture, PackedExperts, can_mix
from fminfer.compute.values.spec import Mlp, Moe
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.forward.layer import ExpertLayer
from fminfer.forward.registry import Registry
from fminfer.models.checkpoint import open_checkpoint
from fminfer.plan.expected_bytes import HOLE_BYTES
from fminfer.plan.planning import plan_ahead
from tests.conftest import built_library, make_model

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)

FLOATS = torch.float32
HALVES = torch.bfloat16
# of weights, of hidden states
WAYS = [(FLOATS, FLOATS), (HALVES, FLOATS), (HALVES, HALVES)]
of_all_ways = pytest.mark.parametrize(("of_weight", "of_rows"), WAYS)
SILU = Mlp("silu", 48)
# (experts, chosen of each token, an expert, hidden size): tails of panels, more than one panel.
SHAPES = [
    (6, 2, SILU, 32),
    (4, 4, Mlp("gelu_new", 70), 66),
    (3, 1, Mlp("relu", 130, is_gated=False), 96),
    (5, 3, Mlp("gelu_new", 2, is_gated=False), 130),
    (2, 2, Mlp("silu", 64), 1030),
    # as gpt-oss has them, and with a limit that many numbers reach
    (4, 2, Mlp("quick_gelu", 70, has_bias=True, limit=7.0), 66),
    (6, 2, Mlp("silu", 130, has_bias=True, limit=0.5), 64),
    (3, 2, Mlp("gelu_new", 70, is_gated=False, has_bias=True), 34),
    (3, 2, Mlp("quick_gelu", 32), 96),
]
Biases = tuple[torch.Tensor | None, torch.Tensor | None]  # of `up` and `down`


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them multiply also where tiles are faster."""
    monkeypatch.setattr(products, "has_unit", lambda name: False)


class Maker(Registry):
    """Makes compiled experts of tensors; None: they are not served."""

    def __init__(self, dtype: torch.dtype, asked: Any = "auto") -> None:
        super().__init__(asked, built_library(), dtype, torch.device("cpu"))

    def make(
        self,
        how: Moe,
        up: torch.Tensor,
        down: torch.Tensor,
        biases: Biases = (None, None),
    ) -> Mix | None:
        weights = (make_dense_weight(each, "product") for each in (up, down))
        return self.choose_experts_kernel(Mixture(how, *weights, *biases))


make = Maker


def draw(
    how: Moe, hidden: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(hidden)
    expert = how.expert
    up = torch.randn(how.num_experts, expert.up_size, hidden) * hidden**-0.5
    down = torch.randn(how.num_experts, hidden, expert.size) * expert.size**-0.5
    return up.to(dtype), down.to(dtype)


def draw_biases(how: Moe, hidden: int, dtype: torch.dtype) -> Biases:
    """Return the biases of experts that have some."""
    if not how.expert.has_bias:
        return None, None
    up, down = (
        torch.randn(how.num_experts, size).to(dtype)
        for size in (how.expert.up_size, hidden)
    )
    return up, down


def choose(how: Moe, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(reversed(torch.rand(tokens, how.num_experts).topk(how.top_k)))  # type: ignore[return-value]


def expected_of(
    how: Moe,
    x: Any,
    up: Any,
    down: Any,
    chosen: Any,
    shares: Any,
    biases: Biases = (None, None),
) -> torch.Tensor:
    """Return the mixture, choice by choice, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    up_bias, down_bias = (
        torch.zeros(weight.shape[:2]) if bias is None else bias
        for bias, weight in zip(biases, (up, down), strict=True)
    )
    for token, row in enumerate(x.double()):
        for number, share in zip(chosen[token], shares[token].double(), strict=True):
            both = up[number].double() @ row + up_bias[number].double()
            inner = act(how.expert, both)
            sums = down[number].double() @ inner + down_bias[number].double()
            out[token] += share * sums
    return out


def act(expert: Mlp, both: torch.Tensor) -> torch.Tensor:
    """Return what stands between an expert's products; see `Mlp`."""
    activation = plain.ACTIVATIONS[expert.activation]
    if not expert.is_gated:
        return activation(both)
    gates, others = both.chunk(2)
    if expert.limit is None:
        return activation(gates) * others
    return activation(gates.clamp(max=expert.limit)) * (
        others.clamp(-expert.limit, expert.limit) + 1
    )


@pytest.mark.usefixtures("own_products")
@of_all_ways
@pytest.mark.parametrize(("num_experts", "top_k", "expert", "hidden"), SHAPES)
def test_what_they_give(
    num_experts: int,
    top_k: int,
    expert: Mlp,
    hidden: int,
    of_weight: torch.dtype,
    of_rows: torch.dtype,
) -> None:
    how = Moe(num_experts, top_k, expert)
    up, down = draw(how, hidden, of_weight)
    biases = draw_biases(how, hidden, of_rows)
    made = make(of_rows)
    mix = made.make(how, up, down, biases)
    assert mix is not None, made.why_plain
    limit = 1e-5 if of_rows == FLOATS else 0.02
    for tokens in (1, 2, 7, 200):
        x = torch.randn(tokens, hidden).to(of_rows)
        chosen, shares = choose(how, tokens)
        expected = expected_of(how, x, up, down, chosen, shares, biases)
        found = mix(x, chosen, shares)
        assert found.dtype == of_rows and found.shape == x.shape
        assert (found - expected).abs().max() <= limit * expected.abs().max()
    assert mix(x[:0], chosen[:0], shares[:0]).shape == (0, hidden)


@pytest.mark.usefixtures("own_products")
@of_all_ways
def test_a_token_is_the_same_beside_any_others(
    of_weight: torch.dtype, of_rows: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """Also where an expert has more tokens than a piece takes, and where all go to the
    same two."""
    how = Moe(5, 2, Mlp("silu", 80))
    mix = make(of_rows).make(how, *draw(how, 768, of_weight))
    assert mix is not None
    torch.manual_seed(1)
    x = torch.randn(400, 768).to(of_rows)
    chosen, shares = choose(how, len(x))
    chosen[:300] = torch.tensor([3, 1])
    set_threads(1)
    alone = torch.cat(
        [
            mix(*each)
            for each in zip(x.split(1), chosen.split(1), shares.split(1), strict=True)
        ]
    )
    for num_threads in (1, 2, 5):
        set_threads(num_threads)
        for tokens in (2, 6, 61, 400):
            assert torch.equal(
                mix(x[:tokens], chosen[:tokens], shares[:tokens]), alone[:tokens]
            )


def test_weights_of_16_bits_give_what_floats_do() -> None:
    """To the last bit: they are widened, and nothing else is rounded."""
    how = Moe(4, 2, SILU)
    up, down = draw(how, 66, HALVES)
    halves = make(FLOATS).make(how, up, down)
    floats = make(FLOATS).make(how, up.float(), down.float())
    assert halves is not None and floats is not None
    for tokens in (1, 5, 90):
        given = torch.randn(tokens, 66), *choose(how, tokens)
        assert torch.equal(halves(*given), floats(*given))


@pytest.mark.usefixtures("own_products")
@of_all_ways
def test_a_token_that_is_not_finite_costs_no_other(
    of_weight: torch.dtype, of_rows: torch.dtype
) -> None:
    how = Moe(3, 2, SILU)
    mix = make(of_rows).make(how, *draw(how, 64, of_weight))
    assert mix is not None
    x = torch.randn(9, 64).to(of_rows)
    (chosen, shares) = choose(how, 9)
    expected = mix(x, chosen, shares)
    x[4, 17] = float("nan")
    found = mix(x, chosen, shares)
    others = torch.arange(9) != 4
    assert torch.equal(found[others], expected[others]) and found[4].isnan().all()


def test_what_the_kernel_serves() -> None:
    relu = Mlp("relu", 8, is_gated=False)
    for expert in (
        SILU,
        relu,
        replace(SILU, has_bias=True),
        replace(SILU, activation="quick_gelu", limit=7.0),
    ):
        assert can_mix(Moe(4, 2, expert))
    for expert in (
        replace(SILU, activation="relu"),
        replace(SILU, activation="xielu"),
        replace(SILU, limit=0.0),
        replace(relu, limit=7.0),
    ):
        assert not can_mix(Moe(4, 2, expert))


def test_what_is_left_to_single_products() -> None:
    how = Moe(4, 2, SILU)
    up, down = draw(how, 33, HALVES)
    made = make(FLOATS)
    assert made.make(how, up, down) is None, "half a unit"
    assert made.make(how, up.half(), down.half()) is None
    assert (
        made.make(replace(how, expert=Mlp("relu2", 48)), up.float(), down.float())
        is None
    )
    assert not made.why_plain, "nothing is wrong with any of them"


def test_each_shape_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    how = Moe(4, 2, SILU)
    calls = []
    up, down = draw(how, 64, FLOATS)
    own = PackedExperts.__call__

    def call(self: PackedExperts, *given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        return own(self, *given) + off

    monkeypatch.setattr(PackedExperts, "__call__", call)
    for off in (0.0, 1.0):
        made = make(FLOATS)
        for _ in range(2):
            assert (made.make(how, up, down) is None) == bool(off)
        assert bool(made.why_plain) == bool(off)
    assert len(calls) == 3, "the first that is wrong ends a trial"
    with pytest.raises(UsageError, match=r"4 experts of 48: .* is off by"):
        make(FLOATS, "require").make(how, up, down)


def test_packed_experts_take_what_the_plain_ones_took() -> None:
    how = Moe(6, 2, Mlp("silu", 128))
    up, down = draw(how, 256, HALVES)
    mix: Any = make(FLOATS).make(how, up, down)
    assert mix.up.packed.nbytes == up.nbytes and mix.down.packed.nbytes == down.nbytes


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize(
    "family_checkpoint", ["mixtral", "qwen3_moe", "gpt_oss"], indirect=True
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_has_them(dtype: str, family_checkpoint: tuple[Path, Any]) -> None:
    bodies = {}
    for kernels in ("require", "off"):
        engine = fminfer.Engine(
            str(family_checkpoint[0]), dtype=dtype, kernels=kernels, budget=256
        )
        stage: Any = engine.pipeline.stages._run.__self__  # type: ignore[attr-defined]
        mlps = [layer.mlp for layer in stage._network.layers]
        bodies[kernels] = {
            type(mlp.mix) for mlp in mlps if isinstance(mlp, ExpertLayer)
        }
        engine.close()
    assert bodies["require"] == {PackedExperts} and PackedExperts not in bodies["off"]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_a_forecast_counts_no_holes_for_them(tmp_path: Path) -> None:
    """Packed one by one, as MKL does, they leave holes in memory: 1 MiB for each product."""
    make_model("mixtral").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    weights = {}
    for kernels in ("require", "off"):
        config = EngineConfig(
            model=str(tmp_path),
            dtype="float32",
            device="cpu",
            kernels=kernels,
            budget=1024,
        )
        weights[kernels] = plan_ahead(config, checkpoint).this_rank.takes.weights
    of_head = HOLE_BYTES["float32"]  # which the kernels pack, and MKL does not
    assert weights["off"] - weights["require"] + of_head == (3 * 4 * 2) << 20

"""A token's numbers have the same bits, whatever other rows its step has, on a CPU with kernels.

Attention has tests of its own: here each row is one token, which sees no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fminfer.compute.attention.kernel_attention import CpuAttention
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers import plain, products
from fminfer.compute.layers.products import PackedItems, PackedProduct, multiply_items
from fminfer.compute.sampling.draw_kernel import MOST_TOP, ScoreKernel
from fminfer.compute.sampling.masks import make_mask_tensors
from fminfer.compute.values.spec import Mlp, Moe, Norm, Pooling, Reading
from fminfer.compute.values.step import Rows
from fminfer.core.messages import Mask
from fminfer.core.partition import Part
from fminfer.forward.layer import choose_experts
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.forward.registry import Registry
from fminfer.forward.transformer import Pooler, Transformer
from fminfer.forward.whole_layers import WholeLayers
from fminfer.models.checkpoint import Checkpoint, find_text_config
from fminfer.models.config_fields import architecture_of
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from tests.conftest import FIELDS, IS_ALL, VOCAB, built_library, family_config

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("without_tiles"),
]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = (1, 2, 3, 5, 17, 64, 300)  # of steps
NUM_ROWS = 600
MOST_STEPS = 24  # of one size
NAMES = (
    "llama",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "opt",
    "opt-bare",
    "gpt2",
    "gemma2",
    "apertus",
    "cohere-qk",
    "phimoe",
    "gpt_oss",
    "olmo2",
)
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have our kernels multiply also where tiles are faster, and restore the threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(products, "has_unit", lambda name: False)
    yield
    torch.set_num_threads(before)


def open_kernels(dtype: torch.dtype) -> Registry:
    return Registry("require", built_library(), dtype, CPU)


@torch.inference_mode()
def check_rows(compute: Function, x: torch.Tensor, sizes: Any = SIZES) -> None:
    """Compute rows together and in steps of each size, with 1 to 3 threads: no bit differs."""
    torch.set_num_threads(1)
    expected = compute(x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(compute(x), expected), f"{num_threads} threads"
        for size in sizes:
            for first in range(0, len(x) - size + 1, size)[:MOST_STEPS]:
                rows = slice(first, first + size)
                assert torch.equal(compute(x[rows].clone()), expected[rows]), (
                    f"rows {rows} with {num_threads} threads"
                )


def load_random_network(name: str, dtype: torch.dtype) -> Transformer:
    config = family_config(name)
    architecture = architecture_of(config)
    checkpoint = Checkpoint(name, None, find_text_config(config), architecture, None)
    model = checkpoint.model
    source = open_weights(
        checkpoint,
        Part(0, 1, 0, len(model.layers)),
        holding=Holding(dtype),
        device=CPU,
        seed=1,
    )
    registry = open_kernels(dtype)
    join = WholeLayers(registry).join_layer
    return Transformer(
        model, source, builder=PartBuilder(registry, num_positions=16), join=join
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(FIELDS) if IS_ALL else NAMES)
def test_logits_of_tokens(name: str, dtype: torch.dtype) -> None:
    """180,000 logits are compared: embeddings, all layers, final norm and head."""
    network = load_random_network(name, dtype)
    specs = [layer.attention for layer in network.model.layers]

    def compute(ids: torch.Tensor) -> torch.Tensor:
        num = len(ids)
        cache = KvCache(
            specs,
            num_blocks=num,
            block_size=16,
            dtype=dtype,
            device=CPU,
            kernel=CpuAttention(built_library()),
        )
        rows = Rows.from_tables(*[(0, 1, [block]) for block in range(num)])
        positions = torch.zeros(num, dtype=torch.int64)
        step = LayerStep(positions, cache.make_attention(rows))
        hidden = network.run(network.embed(ids, positions), step)
        assert network.head is not None
        return network.head(hidden)

    ids = torch.randint(VOCAB, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    check_rows(compute, ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 8), (20, 32), (130, 61), (64, 1)])
def test_steady_products(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Routers, shared gates and projections, by sums before they are rounded."""
    torch.manual_seed(0)
    weight = make_dense_weight(torch.randn(outputs, inputs).to(dtype), "other")
    product = open_kernels(dtype).choose_steady_product(weight, torch.randn(outputs))
    assert isinstance(product, PackedProduct)
    x = torch.randn(NUM_ROWS, inputs).to(dtype)
    check_rows(product.multiply_unrounded, x)
    check_rows(product, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 20, 32), (4, 32, 12), (16, 128, 96)])
def test_products_of_items(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Latent attention's: also of queries that lie apart."""
    torch.manual_seed(0)
    num_items, inputs, _ = shape
    weight = torch.randn(shape).to(dtype)
    product = open_kernels(dtype).choose_items_product(weight)
    assert isinstance(product, PackedItems)
    x = torch.randn(NUM_ROWS, num_items, inputs + 6).to(dtype)[..., :inputs]
    check_rows(product, x)
    expected = multiply_items(x.double(), weight.double())
    limit = (1e-6 if dtype == torch.float32 else 8e-3) * expected.abs().amax()
    assert (product(x).double() - expected).abs().amax() < limit


def test_items_without_a_kernel() -> None:
    """An odd number of 16-bit inputs fills no units, and float16 has no kernel."""
    for dtype, inputs in ((torch.bfloat16, 5), (torch.float16, 6)):
        weight = torch.randn(2, inputs, 3).to(dtype)
        product = open_kernels(dtype).choose_items_product(weight)
        assert not isinstance(product, PackedItems)
        x = torch.randn(4, 2, inputs).to(dtype)
        assert torch.equal(product(x), multiply_items(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["quick_gelu", "relu2", "sigmoid", "xielu"])
def test_activations_in_plain_torch(activation: str, dtype: torch.dtype) -> None:
    """torch.sigmoid gives the last numbers of a tensor other bits than those before."""
    numbers = [torch.tensor([each], dtype=dtype) for each in (0.7, -0.2, 0.5, -1e-6)]
    functions = plain.ACTIVATIONS | {
        "sigmoid": plain.sigmoid,
        "xielu": lambda x: plain.xielu(x, *numbers),
    }
    torch.manual_seed(0)
    check_rows(functions[activation], (3 * torch.randn(NUM_ROWS, 173)).to(dtype))


def test_sigmoid() -> None:
    x = torch.cat([torch.linspace(-120, 120, 5001), torch.tensor([1e30, -1e30])])
    torch.testing.assert_close(plain.sigmoid(x), x.sigmoid(), rtol=3e-7, atol=1e-37)
    assert plain.sigmoid(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sparsemixer"])
@pytest.mark.parametrize("num_experts", [6, 60, 64])
def test_choices_of_experts(num_experts: int, scores: str) -> None:
    torch.manual_seed(0)
    spec = Moe(num_experts, 3, Mlp("silu", 8), scores=scores, mixer_eps=0.01, groups=2)
    logits = torch.randn(NUM_ROWS, num_experts)
    for part in (0, 1):
        check_rows(lambda x, part=part: choose_experts(spec, x, None)[part], logits)


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "weightedmean"])
def test_pooled_vectors(mode: str) -> None:
    """Dense layers, their activations and norms; a prompt comes with others or alone."""
    torch.manual_seed(0)
    readings = (
        Reading(70, "gelu", has_bias=True, norm=Norm(1e-5, is_rms=False)),
        Reading(33, "silu", has_bias=True),
        Reading(50, "tanh", has_bias=True),
        Reading(3),
    )
    exit = {}
    inputs = 40
    for number, reading in enumerate(readings):
        name = f"reading_{number}"
        tensors = {
            f"{name}.weight": torch.randn(reading.size, inputs) / 6,
            f"{name}.bias": torch.randn(reading.size),
            f"{name}_norm.weight": torch.rand(reading.size),
        }
        exit |= {name: make_dense_weight(t, "other") for name, t in tensors.items()}
        inputs = reading.size
    spec = Pooling(mode, readings, is_normalized=True)
    pooler = Pooler(spec, exit, open_kernels(torch.bfloat16))
    lengths = np.ones(NUM_ROWS, np.int64) if mode == "cls" else np.arange(NUM_ROWS) % 7
    lengths = np.maximum(lengths, 1)
    hidden = torch.randn(int(lengths.sum()), 40)
    ends = lengths.cumsum()

    def compute(prompts: torch.Tensor) -> torch.Tensor:
        parts = [hidden[ends[n] - lengths[n] : ends[n]] for n in prompts.tolist()]
        return pooler(torch.cat(parts), lengths[prompts.numpy()])

    check_rows(compute, torch.arange(NUM_ROWS))


def test_logprobs_beside_a_row_with_more_of_them() -> None:
    """More than the kernel finds at once; torch's own sum of a single row has another order."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(60, 50_000)
    rank = ScoreKernel(built_library())
    expected = rank(logits, 2)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        ranking = rank(rows, MOST_TOP + 1)
        return torch.cat([ranking.normalizer[:, None], ranking.best[:, :2]], 1)

    check_rows(compute, logits, sizes=(1, 2))
    normalizers, best = compute(logits).split([1, 2], -1)
    assert torch.equal(normalizers[:, 0], expected.normalizer)
    assert torch.equal(best, expected.best)


def test_few_tokens_beside_a_mask_of_more() -> None:
    """Rows of 3 numbers and of 15 with -inf behind have another order of sums in torch."""
    logits = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(400)

    def make_mask(num: int) -> Mask:
        few = tuple(range(1, 1 + num))
        bits = np.packbits(np.isin(np.arange(64), few), bitorder="little").tobytes()
        return Mask(bits, few=few)

    def weigh(nums: list[int]) -> torch.Tensor:
        masks = make_mask_tensors([make_mask(n) for n in nums], [0] * 400, 64, CPU)
        few, _ = masks.gather_few(logits, rows)
        return few.softmax(-1)[:, :5]

    expected = weigh([5])
    for num in (7, 15, 16, 17, 40):
        assert torch.equal(weigh([5, num]), expected), num

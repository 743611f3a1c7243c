"""A query's attention has the same bits, whatever other tokens and rows are in its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fminfer.compute.attention.kernel_attention import CpuAttention
from fminfer.compute.attention.scoring import AttentionCall, Scoring
from fminfer.compute.kernels.kernel_build import KernelBuild, find_compiler
from fminfer.compute.values.step import Rows
from fminfer.machine.processor import LEVELS, has_unit
from tests.conftest import IS_ALL, more

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

LENGTH = 420  # of a sequence
CHUNKS = (1, 2, 3, 5, 7, 17, 64, 300, LENGTH)
ROWS = (1, 2, 3, 5, 17, 64, 300) if IS_ALL else (2, 5, 22)
NUM_BLOCKS = 2000 if IS_ALL else 320
GROUPS = (1, 3, 4, 5, 7, 8)  # query heads of a KV head
DTYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "float32 of float16": (torch.float32, torch.float16),
}
Row = tuple[int, int, list[int]]  # position, tokens, table


# Tiles have an order of their own.
OTHERS = [
    pytest.param(name, marks=more)
    for name, level in LEVELS.items()
    if name != "amx" and all(map(has_unit, level.units))
]


@pytest.fixture(scope="module", params=["native", *OTHERS])
def kernel(request: pytest.FixtureRequest) -> Iterator[CpuAttention]:
    """The kernel, built for each processor that this one can stand for."""
    name = request.param
    if name == "native" and has_unit("amx_bf16"):
        name = "avx512_bf16"  # tiles have an order of their own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMINFER_CPU", name)
        build = KernelBuild()
        library = build.wait_for_library()
    assert library is not None, build.error
    yield CpuAttention(library)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Layer:
    """A layer's cache, and the queries, keys and values of each token of some sequences."""

    def __init__(
        self,
        kernel: CpuAttention,
        *,
        dtype: str,
        group: int,
        dim: int,
        block: int,
        kv_heads: int = 2,
        **scoring: Any,
    ) -> None:
        self.kernel = kernel
        self.block = block
        self.dtype, kept = DTYPES[dtype]
        self.heads = kv_heads * group
        self.kv_heads = kv_heads
        self.dim = dim
        self.scoring = Scoring(dim**-0.5 * 1.1, **scoring)
        shape = (2, NUM_BLOCKS, kv_heads, block, dim)
        self.caches = torch.full(shape, torch.nan).to(kept)
        self.generator = torch.Generator().manual_seed(group * dim)

    def draw(self, tokens: int) -> list[torch.Tensor]:
        """Return queries, keys and values of so many tokens, (heads, tokens, dim)."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        return [
            (1.5 * torch.randn(n, tokens, self.dim, generator=self.generator)).to(
                self.dtype
            )
            for n in counts
        ]

    def attend(self, rows: list[Row], tokens: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return (tokens, heads, dim) of rows with their tokens' queries, keys and values."""
        query, keys, values = (
            torch.cat([row[i] for row in tokens], 1)[None] for i in range(3)
        )
        layout = self.kernel.lay_out(Rows.from_tables(*rows), self.block)
        call = AttentionCall(query, keys, values, *self.caches, layout, self.scoring)
        return self.kernel(call)[0].clone()


def part_of(tokens: list[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
    return [each[:, first:last] for each in tokens]


def feed(
    layer: Layer, tokens: list[torch.Tensor], table: list[int], chunk: int
) -> torch.Tensor:
    """Return the outputs of a sequence that comes in chunks."""
    num = tokens[0].shape[1]
    outs = []
    for first in range(0, num, chunk):
        last = min(first + chunk, num)
        rows = [(first, last - first, table)]
        outs.append(layer.attend(rows, [part_of(tokens, first, last)]))
    return torch.cat(outs)


def _list_kinds() -> Iterator[dict[str, Any]]:
    """Yield what layers differ in, each with a few groups, sizes and blocks."""
    sizes = [(64, 32), (80, 16), (128, 32)]
    for number, group in enumerate(GROUPS):
        for dtype in DTYPES:
            for place, (dim, block) in enumerate(sizes):
                kind = {"dtype": dtype, "group": group, "dim": dim, "block": block}
                is_sample = (number + place) % 3 == 0 and dtype != "float32 of float16"
                if IS_ALL or (is_sample and (number % 2 or dtype == "bfloat16")):
                    yield kind
                if IS_ALL or (is_sample and not number % 2):
                    yield kind | {"window": 100}


KINDS = [*_list_kinds()]


def list_bends(heads: int) -> list[dict[str, Any]]:
    biases = (0.37 * torch.arange(heads * 301)).sin().view(heads, -1)
    return [
        {"softcap": 3.0},
        {"slopes": torch.rand(heads)},
        {"sinks": torch.randn(heads)},
        {"relative": biases, "window": 70},
    ]


def check_chunks(layer: Layer) -> None:
    tokens = layer.draw(LENGTH)
    num_blocks = LENGTH // layer.block + 1
    torch.set_num_threads(1)
    alone = feed(layer, tokens, [*range(num_blocks)], 1)
    assert not alone.isnan().any() and alone.numel() >= 10_000
    for place, chunk in enumerate(CHUNKS):
        torch.set_num_threads(1 + place % 3)
        table = [*range(num_blocks, 2 * num_blocks)]
        out = feed(layer, tokens, table, chunk)
        assert torch.equal(out, alone), f"chunks of {chunk}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chunks_of_any_size(kernel: CpuAttention, kind: dict[str, Any]) -> None:
    check_chunks(Layer(kernel, **kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS if IS_ALL else (1, 3))
def test_chunks_of_scores_that_are_bent(
    kernel: CpuAttention, group: int, dtype: str
) -> None:
    for bend in list_bends(2 * group):
        check_chunks(Layer(kernel, dtype=dtype, group=group, dim=64, block=32, **bend))


def test_chunks_beside_values_that_are_infinite(kernel: CpuAttention) -> None:
    """A later token's must not be multiplied, even by 0: the queries before go singly."""
    for group in GROUPS if IS_ALL else (1, 5):
        for window in (None, 50):
            kind = {"dtype": "bfloat16", "group": group, "dim": 64, "block": 32}
            layer = Layer(kernel, **kind, window=window)
            tokens = layer.draw(300)
            tokens[2][0, 150::70] = torch.inf
            alone = feed(layer, tokens, [*range(20)], 1)
            for chunk in (3, 7, 64):
                out = feed(layer, tokens, [*range(20, 40)], chunk)
                assert out.view(torch.int16).equal(alone.view(torch.int16)) or (
                    out.nan_to_num(7.0).equal(alone.nan_to_num(7.0))
                )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_beside_any_others(kernel: CpuAttention, kind: dict[str, Any]) -> None:
    """Rows that share prefixes, with prefixes within them, and rows that share nothing."""
    layer = Layer(kernel, **kind)
    block = layer.block
    shared = 320 // block  # two pieces, and a part of one
    nested = 128 // block
    free = iter(range(10_000))
    prefix = [next(free) for _ in range(shared)]
    longer = [prefix + [next(free) for _ in range(nested)] for _ in range(2)]
    for table in longer:
        feed(layer, layer.draw(len(table) * block), table, 64)
    rows: list[Row] = []
    tokens = []
    for number in range(ROWS[-1]):
        table = (prefix, longer[0], longer[1], [])[number % 4]
        own = (37 * number) % 90
        table = table + [next(free) for _ in range(own // block + 1)]
        position = (len(table) - own // block - 1) * block + own
        if own:
            before = (position - own, own, table)
            layer.attend([before], [layer.draw(own)])
        rows.append((position, 1, table))
        tokens.append(layer.draw(1))
    torch.set_num_threads(1)
    alone = torch.cat(
        [layer.attend([row], [own]) for row, own in zip(rows, tokens, strict=True)]
    )
    assert not alone.isnan().any()
    chunk = layer.draw(40)
    for num in ROWS:
        torch.set_num_threads(1 + num % 3)
        layout = kernel.lay_out(Rows.from_tables(*rows[:num]), block)
        assert bool(len(layout.runs)) == (num > 3), "rows that share"
        out = layer.attend(rows[:num], tokens[:num])
        assert torch.equal(out, alone[:num]), f"{num} rows"
        beside = [(0, 40, [next(free) for _ in range(40 // block + 1)]), *rows[:num]]
        out = layer.attend(beside, [chunk, *tokens[:num]])
        assert torch.equal(out[40:], alone[:num]), f"{num} rows beside a chunk"

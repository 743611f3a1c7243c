"""Paged attention against the plain formula, with every kind of row in one step."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fminfer.compute.attention import paged_attention
from fminfer.compute.attention.kernel_attention import (
    CpuAttention,
    lay_out_rows,
    skip_tokens,
)
from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.attention.scoring import AttentionCall, Scoring
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.values.spec import Attention, Latent, Norm
from fminfer.compute.values.step import Rows
from fminfer.machine.host_memory import advise_small_pages
from tests.conftest import IS_ALL, built_library, more, triton_device

HEADS = 4
KV_HEADS = 2
DIM = 16
BLOCK = 8
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BODIES: list[Any] = ["plain", pytest.param("compiled", marks=needs_compiler)]
CPU = torch.device("cpu")


def compiled_kernel() -> CpuAttention:
    return CpuAttention(built_library())


def make_kernel(
    body: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[AttentionKernel | None, torch.device]:
    """Return a body of attention and its device; "triton" is the GPU's, or interpreted."""
    if body == "triton":
        from fminfer.compute.attention.triton_attention import TritonAttention

        device = triton_device()
        return TritonAttention(heads, kv_heads, dim, dtype=dtype, device=device), device
    return (None if body == "plain" else compiled_kernel()), CPU


class PagedLayer:
    """The only layer of a cache."""

    def __init__(self, cache: KvCache) -> None:
        self.body = cache.kernel
        (self.keys, self.values) = cache.layers[0]

    def __call__(self, plan: Any, *given: Any) -> torch.Tensor:
        *new, how = given
        return self.body(AttentionCall(*new, self.keys, self.values, plan, how))


def paged_layer(
    num_blocks: int,
    block: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    kernel: AttentionKernel | None = None,
    is_shared: bool = False,
) -> PagedLayer:
    """Return the only layer of a cache; if `is_shared`, values are the keys, and lie there."""
    latent = Latent(dim, None, dim, 0, dim, Norm(1e-5)) if is_shared else None
    how = Attention(kv_heads, kv_heads, dim, 1.0, latent=latent)
    cache = KvCache(
        [how],
        num_blocks=num_blocks,
        block_size=block,
        dtype=dtype,
        device=device,
        kernel=kernel,
    )
    return PagedLayer(cache)


def plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    slopes: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as a textbook does: (new, heads, dim) to keys and values of (all,
    kv_heads, dim)."""
    num_new, heads, dim = query.shape
    keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
    scores = torch.einsum("ihd,jhd->hij", query, keys) * dim**-0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    places = torch.arange(len(keys))
    ahead = places - (len(keys) - num_new + torch.arange(num_new))[:, None]
    if slopes is not None:
        scores = scores + slopes[:, None, None] * ahead
    is_hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, num_new, 1)], -1)
    weights = torch.softmax(scores, -1)[..., : len(keys)]
    if values.isfinite().all():
        return torch.einsum("hij,jhd->ihd", weights, values)
    # a value that is no number must reach only who sees it, and 0 times nan is nan
    rows = []
    for i, is_seen in enumerate(~is_hidden):
        rows.append(torch.einsum("hj,jhd->hd", weights[:, i, is_seen], values[is_seen]))
    return torch.stack(rows)


def check_every_kind_of_row(
    body: str,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    block: int = BLOCK,
    window: int | None = None,
    slopes: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tolerance: float = 5e-5,
    piece: int = 128,
    before: int = 0,
    is_shared: bool = False,
) -> None:
    """Feed rows in chunks and token by token, and compare each output with the plain formula.

    Args:
        kv_dtype: of the cache, which rounds what is kept; None: dtype.
        piece: how many keys the body has at a time; the longest row has more than two of them.
        before: so many tokens of the longest row, and half as many of the next, lie
        there already.
        is_shared: values are the keys, and lie where these do.
    """
    torch.manual_seed(0)
    kernel, device = make_kernel(body, heads, kv_heads, dim, dtype)
    kept = kv_dtype or dtype
    where: Any = {"dtype": kept, "device": device, "kernel": kernel}
    paged = paged_layer(90, block, kv_heads, dim, **where, is_shared=is_shared)
    paged.keys.fill_(float("nan"))  # whatever other rows left there must not matter
    paged.values.fill_(float("nan"))
    long = 2 * piece + 44
    lengths = [29, 8, long, 17, 1, 16, 40, piece + 3, 3]
    free = random.Random(1).sample(range(90), 90)
    tables = [[free.pop() for _ in range(-(-n // block))] for n in lengths]
    q = [torch.randn(n, heads, dim).to(dtype) for n in lengths]
    k = [torch.randn(n, kv_heads, dim).to(dtype) for n in lengths]
    v = k if is_shared else [torch.randn(n, kv_heads, dim).to(dtype) for n in lengths]
    for r, num in ((2, before), (7, before // 2)):
        place = torch.arange(num)
        at = torch.tensor(tables[r])[place // block], slice(None), place % block
        for cache, new in ((paged.keys, k), (paged.values, v)):
            cache[at] = new[r][:num].to(device, kept)

    # (row, first token, last token)
    def run(parts: list[tuple[int, int, int]]) -> None:
        rows = Rows.from_tables(*((a, b - a, tables[r]) for r, a, b in parts))
        plan = paged.body.lay_out(rows, block)
        packed = [
            torch.cat([x[r][a:b] for r, a, b in parts]).to(device).transpose(0, 1)[None]
            for x in (q, k, v)
        ]
        there = [None if each is None else each.to(device) for each in (slopes, sinks)]
        how = Scoring(dim**-0.5, window, there[0], softcap, there[1])
        out = paged(plan, *packed, how)[0].cpu()
        first = 0
        for r, a, b in parts:
            seen = (x[r][:b].to(kept).float() for x in (k, v))
            expected = plain(q[r][a:b].float(), *seen, window, slopes, softcap, sinks)
            found = out[first : first + b - a].float()
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            first += b - a

    middle = (before + long) // 2
    run([(0, 0, 13), (2, before, middle), (4, 0, 1)])
    run([(0, 13, 28), (2, middle, long - 1), (1, 0, 7), (3, 0, 16)])
    run([(6, 0, 40), (0, 28, 29), (1, 7, 8), (2, long - 1, long), (3, 16, 17)])
    run([(7, before // 2, piece - 2), (8, 0, 2)])
    # the last of three sees a key more than a piece
    run([(7, piece - 2, piece + 1), (8, 2, 3)])
    run([(7, piece + 1, piece + 3)])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_every_kind_of_row(
    body: str, window: int, has_alibi: bool, softcap: float | None
) -> None:
    slopes = torch.rand(HEADS) if has_alibi else None
    check_every_kind_of_row(body, window=window, slopes=slopes, softcap=softcap)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 0.03)]
)
def test_a_score_of_no_key_is_in_the_sum(
    body: str, window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    """Also one far above all others, whose exponential is beyond float32."""
    for sinks in (torch.rand(HEADS), torch.linspace(-300, 300, HEADS)):
        how: Any = {"window": window, "dtype": dtype, "tolerance": tolerance}
        check_every_kind_of_row(body, sinks=sinks, **how)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_the_keys_lie_there_once(body: str, dtype: torch.dtype) -> None:
    how: Any = {"dtype": dtype, "tolerance": 5e-5 if dtype == torch.float32 else 0.03}
    check_every_kind_of_row(body, heads=40, kv_heads=1, dim=72, is_shared=True, **how)


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [
        (12, 12, 64, 32),
        (71, 1, 64, 32),  # falcon-7b: more heads on one than the kernel takes at a time
        (8, 1, 256, 16),
        (16, 2, 80, 32),
        (3, 3, 65, 8),  # falcon's ALiBi models: one more dimension, no multiple of 16
        (4, 2, 7, 5),
    ],
)
def test_the_kernel_with_every_shape(
    heads: int, kv_heads: int, dim: int, block: int
) -> None:
    how: Any = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "block": max(block, 8),
    }
    check_every_kind_of_row("compiled", **how)
    check_every_kind_of_row("compiled", **how, window=11, slopes=torch.rand(heads))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_16_bits(body: str, dtype: torch.dtype) -> None:
    check_every_kind_of_row(body, dtype=dtype, tolerance=0.03)
    check_every_kind_of_row(
        body, dtype=dtype, tolerance=0.03, window=9, heads=12, dim=64
    )


OF_CACHES = [
    (torch.float32, torch.bfloat16, 5e-5),
    (torch.float32, torch.float16, 5e-5),
    (torch.bfloat16, torch.float16, 0.03),
    (torch.bfloat16, torch.float32, 0.03),
    (torch.float16, torch.float32, 0.03),
    (torch.float16, torch.bfloat16, 0.03),
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("dtype", "kv_dtype", "tolerance"), OF_CACHES)
def test_a_cache_of_another_type(
    body: str, dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float
) -> None:
    """It rounds keys and values as torch does, and they are read as what they are.

    Queries of float32 see no other error than that.
    """
    types: Any = {"dtype": dtype, "kv_dtype": kv_dtype, "tolerance": tolerance}
    check_every_kind_of_row(body, **types)
    check_every_kind_of_row(
        body, **types, window=9, heads=12, kv_heads=12, dim=64, block=32
    )
    check_every_kind_of_row(
        body, **types, slopes=torch.rand(9), heads=9, kv_heads=1, dim=80
    )
    check_every_kind_of_row(body, **types, softcap=0.7, heads=3, kv_heads=3, dim=65)
    for dim, block in ((16, 8), (64, 32), (7, 5)):
        shape: Any = {"heads": 4, "kv_heads": 2, "dim": dim, "block": block}
        check_rows_that_share(body, **types, **shape)
        for odd in (float("nan"), float("inf")):
            check_odd_values(body, odd, 4, dim=dim, block=block, **types)


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_in_random_shapes_and_types(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        group = draw.choice([1, 2, 3, 4, 7])
        kv_heads = draw.choice([1, 2, 5])
        heads = group * kv_heads
        dim = draw.randint(3, 140)
        block = draw.randint(8, 40)
        dtype, kv_dtype, tolerance = draw.choice(
            [*OF_CACHES, (torch.float32, None, 5e-5)]
        )
        check_every_kind_of_row(
            "compiled",
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            block=block,
            window=draw.choice([None, draw.randint(1, 150)]),
            slopes=draw.choice([None, torch.rand(heads)]),
            softcap=draw.choice([None, 0.7]),
            sinks=draw.choice([None, 6 * torch.rand(heads) - 3]),
            is_shared=draw.random() < 0.2,
            dtype=dtype,
            kv_dtype=kv_dtype,
            tolerance=tolerance,
        )


@needs_compiler
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_what_is_kept_is_rounded_as_torch_rounds(kv_dtype: torch.dtype) -> None:
    """Ties, subnormal numbers and those beyond the largest too, in whole vectors and
    their rest."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    exact = bits.view(kv_dtype).float()
    numbers = torch.cat(
        [exact, (exact + exact.roll(-1)) / 2, exact * 1.0001, exact * 0.9999]
    )
    numbers = numbers[~numbers.isnan()]
    numbers = numbers[: len(numbers) // 69 * 69].view(-1, 1, 1, 69)
    rows = Rows.from_tables(*((0, 1, [block]) for block in range(len(numbers))))
    keys, values = (torch.empty_like(numbers, dtype=kv_dtype) for _ in "kv")
    given = numbers.view(1, 1, -1, 69)
    plan = lay_out_rows(rows, 1)
    compiled_kernel()(
        AttentionCall(given, given, given, keys, values, plan, Scoring(1.0))
    )
    for found in (keys, values):
        assert found.view(torch.int16).equal(numbers.to(kv_dtype).view(torch.int16))


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [
        (12, 12, 64, 32),
        (8, 2, 128, 64),
        (4, 2, 128, 32),
        (71, 1, 32, 32),
        (40, 40, 64, 32),  # more KV heads than one thread takes at a time
        (24, 12, 64, 64),
        (2, 2, 96, 96),
        (2, 2, 80, 32),  # these two do not fit pairs and tiles
        (2, 2, 96, 48),
    ],
)
def test_pairs_and_tiles_of_bfloat16_where_the_processor_has_them(
    heads: int, kv_heads: int, dim: int, block: int
) -> None:
    shape: Any = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block": block}
    for how in ({}, {"window": 45, "slopes": torch.rand(heads)}, {"softcap": 0.7}):
        check_every_kind_of_row(
            "compiled", dtype=torch.bfloat16, tolerance=0.02, **shape, **how
        )


def test_rows_attend_from_the_first_token_that_is_kept() -> None:
    plan = lay_out_rows(Rows.from_tables((10, 5, [0, 1]), (3, 1, [2]), (0, 4, [3])), 8)
    for tokens, expected in (
        ([2, 5, 9], [[2, 3, 12], [5, 1, 3], [9, 1, 3]]),
        # of the first none: its last
        ([5, 6, 7, 8, 9], [[4, 1, 14], [5, 1, 3], [6, 4, 0]]),
        ([9], [[4, 1, 14], [5, 1, 3], [9, 1, 3]]),
    ):
        kept = skip_tokens(plan, torch.tensor(tokens))
        assert kept.rows[:, :3].tolist() == expected
        assert kept.rows[:, 3:].equal(plan.rows[:, 3:]) and kept.slots.equal(plan.slots)


def check_rows_that_share(
    body: str,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    num_rows: int = 38,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tolerance: float = 5e-5,
    **how: Any,
) -> None:
    """Let rows of one token share a prefix, half of them a longer one, beside others without."""
    torch.manual_seed(0)
    kernel, device = make_kernel(body, heads, kv_heads, dim, dtype)
    unit = math.lcm(128, block) // block  # blocks of a run are so many, or twice
    num_blocks = 160 + 3 * unit
    free = random.Random(1).sample(range(num_blocks), num_blocks)

    def take(num: int) -> list[int]:
        return [free.pop() for _ in range(num)]

    all_share = take(2 * unit)
    some_share = take(unit)
    rows = [(block, 9, take(3))]  # a chunk: its position, tokens and blocks
    for i in range(num_rows):
        shared = all_share + (some_share if i % 2 else [])
        rows.append((len(shared) * block + (5 * i) % (2 * block), 1, shared + take(2)))
    rows.insert(7, (block + 3, 1, take(2)))
    rows.append((unit * block + 3, 1, all_share[:unit] + take(1)))
    kept = kv_dtype or dtype
    paged = paged_layer(
        num_blocks, block, kv_heads, dim, dtype=kept, device=device, kernel=kernel
    )
    paged.keys.fill_(float("nan"))
    paged.values.fill_(float("nan"))
    total = sum(tokens for _, tokens, _ in rows)
    query, new_keys, new_values = (
        torch.randn(1, num, total, dim).to(device, dtype)
        for num in (heads, kv_heads, kv_heads)
    )
    used = {
        (table[i // block], i % block)
        for before, _, table in rows
        for i in range(before)
    }
    blocks, places = torch.tensor(sorted(used)).unbind(1)
    for cache in (paged.keys, paged.values):
        cache[blocks, :, places] = torch.randn(len(used), kv_heads, dim).to(
            device, kept
        )
    plan = paged.body.lay_out(Rows.from_tables(*rows), block)
    if body == "compiled":
        counts = sorted(run[1] for run in plan.runs.tolist())
        assert counts == [num_rows // 2, num_rows, num_rows + 1]
    out = paged(plan, query, new_keys, new_values, Scoring(dim**-0.5, **how))[0]
    first = 0
    for position, tokens, table in rows:
        last = first + tokens
        keys, values = (
            cache[table].transpose(1, 2).flatten(0, 1)[: position + tokens]
            for cache in (paged.keys, paged.values)
        )
        expected = plain(
            query[0, :, first:last].transpose(0, 1).float(),
            keys.float(),
            values.float(),
            how.get("window"),
            how.get("slopes"),
            how.get("softcap"),
            how.get("sinks"),
        )
        torch.testing.assert_close(
            out[first:last].float(), expected, atol=tolerance, rtol=tolerance
        )
        first = last


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [
        (4, 2, 16, 8),
        (12, 12, 64, 32),
        (71, 1, 32, 32),
        pytest.param(16, 2, 80, 32, marks=more),
        (3, 3, 65, 8),
        (4, 2, 7, 5),
    ],
)
def test_rows_that_share(
    body: str, heads: int, kv_heads: int, dim: int, block: int
) -> None:
    if body == "plain" and heads > 4 and not IS_ALL:
        pytest.skip("plain torch computes all shapes alike; scripts/test --all")
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block": block}
    kinds: list[dict[str, Any]] = [{}, {"softcap": 0.7}, {"slopes": torch.rand(heads)}]
    kinds.append({"sinks": 6 * torch.rand(heads) - 3})
    for how in [*kinds, {"window": 2 * block + 3}]:
        check_rows_that_share(body, **shape, **how)
        check_rows_that_share(
            body, **shape, **how, dtype=torch.bfloat16, tolerance=0.03
        )
    # of which some are left over when 32 are taken at a time
    for num_rows in (32, 34, 66):
        for dtype, tolerance in ((torch.float32, 5e-5), (torch.bfloat16, 0.03)):
            check_rows_that_share(
                body, **shape, num_rows=num_rows, dtype=dtype, tolerance=tolerance
            )
    check_rows_that_share(body, **shape, dtype=torch.float16, tolerance=0.03)


def test_rows_that_share_ever_more_are_in_few_runs() -> None:
    """Each row a prefix of the next: what is kept of every run would need memory by the
    square."""
    blocks = list(range(16 * 80))
    rows = Rows.from_tables(
        *((16 * n * BLOCK, 1, [*blocks[: 16 * n], 2000 + n]) for n in range(1, 80))
    )
    plan = lay_out_rows(rows, BLOCK)
    assert 0 < len(plan.members) <= 4 * len(rows) == 4 * len(plan.rows)
    members = plan.members.tolist()
    for row, (_, _, position, _, own) in enumerate(plan.rows.tolist()):
        runs = [run for run in plan.runs.tolist() if row in members[run[0] :][: run[1]]]
        ends = [0] + [end for _, _, _, end, _ in runs]
        assert [first for _, _, first, _, _ in runs] == ends[:-1], "one after the other"
        assert [before for *_, before in runs] == [*range(len(runs))]
        assert own == ends[-1] <= position


@needs_compiler
def test_the_kernel_reads_16_bits_as_they_are() -> None:
    """Subnormal, infinite and nan too: one key and one value at a time come out as they
    went in."""
    kernel = compiled_kernel()
    assert kernel is not None
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = bits.view(dtype).view(-1, 1, 1, 64)
        rows = Rows.from_tables(*((0, 1, [block]) for block in range(len(values))))
        call = AttentionCall(
            torch.zeros(1, 1, len(values), 64),
            torch.zeros(1, 1, len(values), 64, dtype=dtype),
            values.view(1, 1, -1, 64),
            torch.zeros_like(values),
            torch.empty_like(values),
            lay_out_rows(rows, 1),
            Scoring(1.0),
        )
        out = kernel(call)
        expected = values.view(1, -1, 1, 64).float()
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@needs_compiler
@pytest.mark.parametrize("num_queries", [1, 3, 5, 20, 40])
def test_a_nan_of_a_key_reaches_those_that_see_it_and_no_others(
    num_queries: int,
) -> None:
    kernel = compiled_kernel()
    paged = paged_layer(8, BLOCK, 1, DIM, kernel=kernel)
    for value in (float("nan"), float("inf")):
        for tables in ([[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5], [6, 7]]):
            lengths = [num_queries, 9][: len(tables)]
            rows = Rows.from_tables(
                *((0, *each) for each in zip(lengths, tables, strict=True))
            )
            total = sum(lengths)
            q, k, v = (torch.randn(1, 1, total, DIM).abs() for _ in range(3))
            k[0, 0, num_queries // 2] = value
            plan = lay_out_rows(rows, BLOCK)
            is_nan = paged(plan, q, k, v, Scoring(1.0))[0, :, 0].isnan().all(-1)
            expected = [num_queries // 2 <= i < num_queries for i in range(total)]
            assert is_nan.tolist() == expected


def check_odd_values(
    body: str,
    odd: float,
    window: int | None,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    block: int = BLOCK,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tolerance: float = 5e-5,
) -> None:
    """Give one token of a row a value that is no number, and look whom it reaches."""
    torch.manual_seed(0)
    kernel, device = make_kernel(body, heads, kv_heads, dim, dtype)
    num_blocks = -(-64 // block)
    kept = kv_dtype or dtype
    where: Any = {"dtype": kept, "device": device}
    paged = paged_layer(num_blocks, block, kv_heads, dim, **where, kernel=kernel)
    paged.keys.zero_()
    paged.values.fill_(odd)
    q, k, v = (
        torch.randn(60, num, dim).to(dtype) for num in (heads, kv_heads, kv_heads)
    )
    v[23] = odd
    table = list(range(num_blocks))[::-1]
    for a, b in ((0, 21), (21, 24), (24, 26), (26, 27), (27, 57), (57, 58), (58, 60)):
        plan = paged.body.lay_out(Rows.from_tables((a, b - a, table)), block)
        packed = [x[a:b].to(device).transpose(0, 1)[None] for x in (q, k, v)]
        found = paged(plan, *packed, Scoring(dim**-0.5, window))[0].float().cpu()
        seen = (x[:b].to(kept).float() for x in (k, v))
        expected = plain(q[a:b].float(), *seen, window, None, None)
        assert torch.equal(found.isfinite(), expected.isfinite()), (a, b)
        zeros = (x.masked_fill(~x.isfinite(), 0.0) for x in (found, expected))
        torch.testing.assert_close(*zeros, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 4, 20])
def test_a_value_that_is_no_number_reaches_those_that_see_it_and_no_others(
    body: str, odd: float, window: int | None
) -> None:
    """A nan of a later token, or of one behind the window, reached others: 0 times nan
    is nan."""
    check_odd_values(body, odd, window)
    check_odd_values(body, odd, window, heads=3, kv_heads=3, dim=33)
    # the former in pairs and tiles, where these are
    for dim, block in ((64, 32), (16, 8)):
        shape: Any = {
            "dim": dim,
            "block": block,
            "dtype": torch.bfloat16,
            "tolerance": 0.03,
        }
        check_odd_values(body, odd, window, **shape)


@pytest.mark.parametrize("body", BODIES)
def test_a_value_that_is_no_number_among_rows_that_share(body: str) -> None:
    """With a window, one of those that read a block together may see a nan, and others not."""
    torch.manual_seed(0)
    kernel, _ = make_kernel(body, HEADS, KV_HEADS, DIM, torch.float32)
    paged = paged_layer(20, BLOCK, KV_HEADS, DIM, kernel=kernel)
    torch.nn.init.normal_(paged.keys)
    torch.nn.init.normal_(paged.values)
    paged.values[0, :, 5] = float("nan")
    rows = Rows.from_tables(
        *((16 + i, 1, [0, 1, 2 + 2 * i, 3 + 2 * i]) for i in range(6))
    )
    plan = paged.body.lay_out(rows, BLOCK)
    packed = [torch.randn(1, num, 6, DIM) for num in (HEADS, KV_HEADS, KV_HEADS)]
    out = paged(plan, *packed, Scoring(1.0, 14))[0]
    seen = [16 + i - 5 < 14 for i in range(6)]
    assert out.isnan().all((-1, -2)).tolist() == seen
    assert out.isnan().any(-1).any(-1).tolist() == seen


@needs_compiler
def test_a_nan_of_one_row_does_not_reach_another() -> None:
    """What it left in the kernel's own memory was read as the padding of the next row's keys."""
    dim = 65
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # one thread, so that both rows meet the same memory
    try:
        kernel = compiled_kernel()
        paged = paged_layer(8, 32, 1, dim, dtype=torch.bfloat16, kernel=kernel)
        q, k, v = (torch.randn(1, 1, 41, dim).bfloat16() for _ in range(3))
        k[0, 0, :40] = float("nan")
        plan = lay_out_rows(Rows.from_tables((0, 40, [0, 1]), (0, 1, [2])), 32)
        out = paged(plan, q, k, v, Scoring(1.0))[0, :, 0]
    finally:
        torch.set_num_threads(before)
    assert out[:40].isnan().all() and not out[40].isnan().any()


@needs_compiler
def test_torchs_defaults_do_not_matter_to_the_kernel() -> None:
    """It wrote float32 into a buffer of torch's default dtype: of twice the size, or wrong."""
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            check_every_kind_of_row("compiled", tolerance=0.02)
    finally:
        torch.set_default_dtype(before)


@needs_compiler
def test_a_window_wider_than_any_text() -> None:
    for window in (2**31 - 1, 2**31, 10**12):
        check_every_kind_of_row("compiled", window=window)


@needs_compiler
@pytest.mark.parametrize(
    ("query", "key"), [((1, 4, 5, 16), (1, 2, 5, 8)), ((1, 4, 5, 16), (1, 4, 5, 16))]
)
def test_the_kernel_gets_only_what_fits_the_cache(
    query: tuple[int, ...], key: tuple[int, ...]
) -> None:
    """It would read and write past the tensors' ends."""
    kernel = compiled_kernel()
    paged = paged_layer(4, BLOCK, KV_HEADS, DIM, kernel=kernel)
    plan = lay_out_rows(Rows.from_tables((0, 5, [1])), BLOCK)
    with pytest.raises(AssertionError, match="keys of a step"):
        paged(
            plan, torch.zeros(query), torch.zeros(key), torch.zeros(key), Scoring(1.0)
        )


def test_a_context_too_long_for_one_product_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    query = torch.randn(HEADS, 20, DIM)
    keys = torch.randn(KV_HEADS, 50, DIM)
    values = torch.randn(KV_HEADS, 50, DIM)
    how = Scoring(0.25, 9, softcap=0.5)
    whole = paged_attention.attend_chunk(query, keys, values, 30, how)
    monkeypatch.setattr(paged_attention, "MAX_SCORES", 3 * HEADS * 50)
    parts = paged_attention.attend_chunk(query, keys, values, 30, how)
    torch.testing.assert_close(whole, parts, atol=1e-6, rtol=1e-6)


SMAPS = Path("/proc/self/smaps")


def flags_of(address: int) -> list[str]:
    """Return the system's flags of the mapping with this address."""
    is_inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping has the address")


@pytest.mark.skipif(
    not (SMAPS.exists() and Path("/sys/kernel/mm/transparent_hugepage").exists()),
    reason="a system without huge pages",
)
def test_the_cache_takes_memory_in_small_pages() -> None:
    """Memory beside it stays as the system gave it, which on some systems is in small pages too.

    The test asked malloc for memory beside it, which may be what an earlier cache had.
    """
    cache = paged_layer(512, 32, 4, 64)
    for tensor in (cache.keys, cache.values):
        for place in (1 << 20, tensor.nbytes // 2, tensor.nbytes - (1 << 20)):
            assert "nh" in flags_of(tensor.data_ptr() + place)
    mib = 1 << 20
    with closing(
        mmap.mmap(-1, 32 * mib, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ) as memory:
        byte = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(byte)
        del byte  # it would keep the memory from closing
        is_small = "nh" in flags_of(address)
        advise_small_pages(address + 8 * mib, 16 * mib)
        assert "nh" in flags_of(address + 16 * mib)
        for place in (mib, 31 * mib):
            assert ("nh" in flags_of(address + place)) == is_small, (
                "others are left alone"
            )

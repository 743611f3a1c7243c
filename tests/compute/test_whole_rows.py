"""Attention of whole prompts, biases by distance and memories, against the plain formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.attention.scoring import (
    MOST_RELATIVE,
    NO_LIMIT,
    Scoring,
    compute_relative_buckets,
    compute_relative_reach,
    make_scoring,
)
from fminfer.compute.values.spec import Attention, Relative
from fminfer.compute.values.step import BlockTables, Rows, Step
from tests.compute.test_attention import BODIES, DIM, make_kernel
from tests.conftest import IS_ALL, triton_device

LENGTHS = np.array([37, 1, 5, 70, 2, 1])
ERRORS = {torch.float32: 5e-5, torch.bfloat16: 0.03}


@pytest.fixture(params=[*BODIES, "triton"])
def body(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return str(request.param)


def formula(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    how: Scoring,
    first: int,
) -> torch.Tensor:
    """Attend as a textbook does: (new, heads, dim) from position `first` on."""
    heads = query.shape[1]
    keys, values = (
        x.float().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values)
    )
    scores = torch.einsum("ihd,jhd->hij", query.float(), keys) * how.scaling
    distance = first + torch.arange(len(query))[:, None] - torch.arange(len(keys))
    if how.relative is not None:
        reach = how.relative.shape[1] // 2
        scores = scores + how.relative[:, distance.clamp(-reach, reach) + reach]
    is_hidden = distance < -how.ahead
    if how.window is not None:
        is_hidden |= distance >= how.window
    weights = torch.softmax(scores.masked_fill(is_hidden, float("-inf")), -1)
    return torch.einsum("hij,jhd->ihd", weights, values)


def dim_of(dtype: torch.dtype) -> int:
    """Return a size of heads: of bfloat16 one that pairs and tiles are multiplied of."""
    return 64 if dtype == torch.bfloat16 else DIM


def make_how(
    kv_heads: int, dtype: torch.dtype = torch.float32, **changes: Any
) -> Attention:
    dim = dim_of(dtype)
    return replace(Attention(4, kv_heads, dim, dim**-0.5, is_causal=False), **changes)


def some_biases(how: Attention, dtype: torch.dtype) -> torch.Tensor | None:
    if how.relative is None:
        return None
    return torch.randn((how.relative.buckets, how.heads)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 9},
        {"relative": Relative(16, 20, is_causal=False)},
        {"relative": Relative(8, 300, is_causal=True), "is_causal": True},
    ],
    ids=["all", "window", "relative", "causal"],
)
def test_prompts_see_themselves_alone(
    body: str, dtype: torch.dtype, kv_heads: int, changes: dict[str, Any]
) -> None:
    """A second layer overwrites what the first one has kept, and smaller prompts lie in
    it, too."""
    if body == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    is_slow = body == "triton" and triton_device().type == "cpu" and not IS_ALL
    if is_slow and kv_heads == 4:
        pytest.skip("more of the same, in the interpreter; scripts/test --all")
    torch.manual_seed(0)
    how = make_how(kv_heads, dtype, **changes)
    kernel, device = make_kernel(body, how.heads, kv_heads, how.head_dim, dtype)
    biases = some_biases(how, dtype)
    scoring = make_scoring(
        how, device, None, None if biases is None else biases.to(device)
    )
    own = replace(
        scoring, relative=None if scoring.relative is None else scoring.relative.cpu()
    )
    whole = KvCache(
        [how], num_blocks=0, block_size=16, dtype=dtype, device=device, kernel=kernel
    )
    some = (LENGTHS, LENGTHS[::-1].copy(), LENGTHS[2:5])
    for lengths in some[2 if changes else 0 :: 2] if is_slow else some:
        attend = whole.make_prompt_attention(lengths, 2, None)
        for layer in range(2):
            tokens = int(lengths.sum())
            parts = (
                torch.randn(tokens, n, how.head_dim).to(dtype)
                for n in (4, kv_heads, kv_heads)
            )
            q, k, v = parts
            found = attend(layer, *(x.to(device) for x in (q, k, v)), scoring).cpu()
            split = (x.split(lengths.tolist()) for x in (found, q, k, v))
            for each, *given in zip(*split, strict=True):
                expected = formula(*given, own, 0)
                assert torch.allclose(
                    each.float(), expected, atol=ERRORS[dtype], rtol=0.02
                )


def test_without_memory_for_more_blocks_those_of_before_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in halves then had a cache that counted blocks which were not there."""
    how = make_how(2)
    kernel, device = make_kernel(BODIES[-1], how.heads, 2, DIM, torch.float32)
    whole = KvCache(
        [how],
        num_blocks=0,
        block_size=8,
        dtype=torch.float32,
        device=device,
        kernel=kernel,
    )

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="allocate"):
            whole.make_prompt_attention(LENGTHS, 1, None)
    half = LENGTHS[:3]
    ((keys, values),) = whole.make_prompt_attention(half, 1, None).layers
    assert len(keys) == len(values) == whole.num_blocks >= half.sum() / 8


def test_only_kept_tokens_have_outputs(body: str) -> None:
    torch.manual_seed(0)
    how = make_how(2)
    kernel, device = make_kernel(body, how.heads, 2, DIM, torch.float32)
    whole = KvCache(
        [how],
        num_blocks=0,
        block_size=8,
        dtype=torch.float32,
        device=device,
        kernel=kernel,
    )
    parts = [torch.randn(int(LENGTHS.sum()), n, DIM).to(device) for n in (4, 2, 2)]
    kept = torch.from_numpy(LENGTHS.cumsum() - LENGTHS).to(device)
    scoring = make_scoring(how, device)
    first = whole.make_prompt_attention(LENGTHS, 1, kept)(0, *parts, scoring)
    everything = whole.make_prompt_attention(LENGTHS, 1, None)(0, *parts, scoring)
    assert torch.allclose(first, everything[kept], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_rows_have_biases_by_distance(body: str, dtype: torch.dtype) -> None:
    """Prompts in chunks, and then tokens, beside each other."""
    if body == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    torch.manual_seed(0)
    how = make_how(4, dtype, is_causal=True, relative=Relative(16, 25, is_causal=True))
    kernel, device = make_kernel(body, 4, 4, how.head_dim, dtype)
    cache = KvCache(
        [how], num_blocks=12, block_size=16, dtype=dtype, device=device, kernel=kernel
    )
    biases = some_biases(how, dtype)
    assert biases is not None
    scoring = make_scoring(how, device, None, biases.to(device))
    assert scoring.relative is not None
    own = replace(scoring, relative=scoring.relative.cpu())
    tables = ([0, 2, 4, 6, 8], [1, 3, 5])
    q, k, v = (torch.randn(2, 80, 4, how.head_dim).to(dtype) for _ in "qkv")
    for parts in ([(0, 30), (0, 11)], [(30, 49), (11, 1)], [(79, 1), (12, 28)]):
        # rows of one token come last
        order = sorted(range(2), key=lambda n: parts[n][1] == 1)
        rows = [(parts[n][0], parts[n][1], tables[n]) for n in order]
        of = [(n, slice(parts[n][0], sum(parts[n]))) for n in order]
        step = [torch.cat([x[n, part] for n, part in of]).to(device) for x in (q, k, v)]
        found = cache.make_attention(Rows.from_tables(*rows))(0, *step, scoring).cpu()
        expected = [
            formula(q[n, p], k[n, : p.stop], v[n, : p.stop], own, p.start)
            for n, p in of
        ]
        assert torch.allclose(
            found.float(), torch.cat(expected), atol=ERRORS[dtype], rtol=0.02
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoders_see_all_of_a_memory(body: str, dtype: torch.dtype) -> None:
    """Two rows share one; a second step brings nothing, and has other numbers of tokens."""
    if body == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    torch.manual_seed(0)
    how = make_how(4, dtype, is_causal=True)
    kernel, device = make_kernel(body, 4, 4, how.head_dim, dtype)
    cache = KvCache(
        [how], num_blocks=9, block_size=16, dtype=dtype, device=device, kernel=kernel
    )
    scoring = make_scoring(how, device)
    sizes = np.array([35, 35, 70, 35])
    memories = [torch.randn(2, n, 4, how.head_dim).to(dtype) for n in (35, 70)]
    blocks = [[0, 4, 2], [1, 3, 5, 7, 8]]
    new = [
        (slot, i, b) for slot, t in ((4, 0), (5, 1)) for i, b in enumerate(blocks[t])
    ]
    tables = BlockTables()
    for number, lengths in enumerate(([3, 1, 7, 2], [1, 1, 1, 1], [1, 4, 1, 1])):
        step = Step(
            number,
            slots=np.arange(4, dtype=np.int32),
            positions=np.zeros(4, np.int64),
            lengths=np.array(lengths),
            token_ids=np.zeros(sum(lengths), np.int64),
            cross_slots=np.array([4, 4, 5, 4], np.int32),
            cross_lengths=sizes,
            encoder_output_lengths=np.array([35, 0, 70, 0])
            if number == 0
            else np.zeros(4, np.int64),
            new_blocks=np.array(new if number == 0 else [], np.int32).reshape(-1, 3),
        )
        tables.update(step)
        total = sum(lengths)
        for first, last in ((0, 2), (2, total)) if number == 0 else ((0, total),):
            q = torch.randn(last - first, 4, how.head_dim).to(dtype)
            brings = number == 0 and first == 0
            keys, values = (
                torch.cat([each[n] for each in memories])
                if brings
                else torch.empty(0, 4, how.head_dim, dtype=dtype)
                for n in range(2)
            )
            kept = np.arange(1, last - first, 2) if last - first > 2 else None
            attend = cache.make_cross_attention(
                tables.make_cross_rows(step, first, last), kept
            )
            given = q if kept is None else q[kept]
            found = attend(
                0, *(x.to(device) for x in (given, keys, values)), scoring
            ).cpu()
            token_rows = np.repeat(np.arange(4), lengths)[first:last]
            for token, row in enumerate(token_rows):
                if kept is not None and token not in kept:
                    continue
                memory = memories[1 if row == 2 else 0]
                every = replace(scoring, ahead=1000)
                expected = formula(q[token : token + 1], *memory, every, 0)[0]
                place = token if kept is None else int((kept == token).argmax())
                assert torch.allclose(
                    found[place].float(), expected, atol=ERRORS[dtype], rtol=0.02
                )


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("num", [2, 40])
def test_a_value_that_is_no_number_reaches_those_that_see_it(
    body: str, odd: float, num: int
) -> None:
    """Behind a window, too, and never another prompt."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if body == "triton" else 2]:
        how = make_how(4, dtype, window=4)
        kernel, device = make_kernel(body, 4, 4, how.head_dim, dtype)
        whole = KvCache(
            [how],
            num_blocks=0,
            block_size=16,
            dtype=dtype,
            device=device,
            kernel=kernel,
        )
        q, k, v = (torch.randn(num + 5, 4, how.head_dim).to(dtype) for _ in "qkv")
        v[num // 2] = odd
        attend = whole.make_prompt_attention(np.array([num, 5]), 1, None)
        given = (x.to(device) for x in (q, k, v))
        found = attend(0, *given, make_scoring(how, device)).cpu()
        is_odd = ~found.isfinite().all(-1).all(-1)
        sees = (torch.arange(num + 5) - num // 2).abs() < 4
        assert is_odd.tolist() == (sees & (torch.arange(num + 5) < num)).tolist()


def test_buckets_are_those_of_transformers() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    for buckets, most in ((32, 128), (8, 20), (64, 1000), (16, 128), (33, 128), (7, 5)):
        for is_causal in (True, False):
            distance = torch.arange(-most - 3, most + 4)
            expected = T5Attention._relative_position_bucket(
                -distance, not is_causal, buckets, most
            )
            found = compute_relative_buckets(
                Relative(buckets, most, is_causal=is_causal)
            )
            assert torch.equal(found[distance.clamp(-most, most) + most], expected)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("buckets", "most"), [(64, 20), (65, 31), (32, 9), (16, 3), (128, 1)]
)
def test_buckets_reach_beyond_the_largest_distance(
    buckets: int, most: int, is_causal: bool
) -> None:
    """Keys farther than `max_distance` had its bucket, where many have buckets of their own.

    Farther than the reach, transformers computes a bucket below 0 and fails.
    """
    from transformers.models.t5.modeling_t5 import T5Attention

    how = Relative(buckets, most, is_causal=is_causal)
    reach = compute_relative_reach(how)
    if reach == NO_LIMIT:
        reach = most
    elif reach < MOST_RELATIVE - 1:
        beyond = torch.tensor([-reach - 1])
        assert (
            T5Attention._relative_position_bucket(beyond, not is_causal, buckets, most)
            < 0
        )
    distance = torch.arange(-reach, reach + 1)
    expected = T5Attention._relative_position_bucket(
        -distance, not is_causal, buckets, most
    )
    assert torch.equal(compute_relative_buckets(how), expected)


def test_as_many_buckets_as_distances_have_no_steps() -> None:
    """32 buckets over a distance of 16 ended in a bare IndexError."""
    how = Relative(32, 16, is_causal=True)
    assert compute_relative_reach(how) == 15
    assert compute_relative_buckets(how)[15:].tolist() == [*range(16)]

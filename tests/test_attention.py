"""Paged attention against the plain formula, with every kind of row in one step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fminfer import attention, decode_attention
from fminfer.attention import PagedAttention, plan_attention
from fminfer.config import AttentionBody
from fminfer.decode_attention import (
    PartialAttention,
    PartialBody,
    eager_partial,
    fusable_partial,
)
from fminfer.errors import UsageError
from fminfer.messages import StepRow

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
CPU = torch.device("cpu")


def plain(
    query: torch.Tensor,  # (queries, heads, dim), the last tokens of the row
    keys: torch.Tensor,  # (keys, kv_heads, dim)
    values: torch.Tensor,
    window: int | None,
    slopes: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    out = torch.empty_like(query)
    for i in range(len(query)):
        position = len(keys) - len(query) + i
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            scores = keys[seen, shared] @ query[i, head] * DIM**-0.5
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if slopes is not None:
                scores = scores + slopes[head] * torch.arange(len(keys))[seen]
            out[i, head] = torch.softmax(scores, 0) @ values[seen, shared]
    return out


@pytest.mark.parametrize("partial", [eager_partial, fusable_partial])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_every_kind_of_row(
    partial: PartialBody, window: int, has_alibi: bool, softcap: float | None
) -> None:
    torch.manual_seed(0)
    slopes = torch.rand(HEADS) if has_alibi else None
    paged = PagedAttention(
        64, BLOCK, KV_HEADS, DIM, dtype=torch.float32, device=CPU, partial=partial
    )
    paged.keys.fill_(float("nan"))  # whatever other rows left there must not matter
    paged.values.fill_(float("nan"))
    lengths = [29, 8, 300, 17, 1, 16, 40]
    free = random.Random(1).sample(range(64), 64)
    tables = [[free.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
    q = [torch.randn(n, HEADS, DIM) for n in lengths]
    k = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
    v = [torch.randn(n, KV_HEADS, DIM) for n in lengths]

    def run(parts: list[tuple[int, int, int]]) -> None:  # (row, first token, last token)
        rows = [StepRow([0] * (b - a), a, tables[r]) for r, a, b in parts]
        paged.plan = plan_attention(rows, BLOCK, KV_HEADS, CPU)
        packed = [
            torch.cat([x[r][a:b] for r, a, b in parts]).transpose(0, 1)[None] for x in (q, k, v)
        ]
        how: Any = {"sliding_window": window, "alibi_slopes": slopes, "softcap": softcap}
        out = paged(*packed, scaling=DIM**-0.5, **how)[0]
        first = 0
        for r, a, b in parts:
            expected = plain(q[r][a:b], k[r][:b], v[r][:b], window, slopes, softcap)
            torch.testing.assert_close(out[first : first + b - a], expected, atol=5e-5, rtol=5e-5)
            first += b - a

    run([(0, 0, 13), (2, 0, 150), (4, 0, 1)])
    run([(0, 13, 28), (2, 150, 299), (1, 0, 7), (3, 0, 16)])
    run([(6, 0, 40), (0, 28, 29), (1, 7, 8), (2, 299, 300), (3, 16, 17)])


def test_a_context_too_long_for_one_product_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(HEADS, 20, DIM), torch.randn(KV_HEADS, 50, DIM)
    values = torch.randn(KV_HEADS, 50, DIM)
    whole = attention.chunk_attention(query, keys, values, 30, 0.25, 9, None, 0.5)
    monkeypatch.setattr(attention, "MAX_SCORES", 3 * HEADS * 50)
    parts = attention.chunk_attention(query, keys, values, 30, 0.25, 9, None, 0.5)
    torch.testing.assert_close(whole, parts, atol=1e-6, rtol=1e-6)


def test_auto_compiles_after_enough_work_and_only_with_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[object] = []

    def fake_compile(body: PartialBody, **kwargs: object) -> PartialBody:
        compiled.append(body)
        return body

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(decode_attention, "COMPILE_AFTER", 3 * 2 * 5 * KV_HEADS * BLOCK * DIM)
    cache = torch.zeros(8, KV_HEADS, BLOCK, DIM)
    grouped = torch.zeros(5, KV_HEADS, HEADS // KV_HEADS, DIM)
    numbers = torch.arange(5)
    rows = (numbers, numbers, numbers, torch.zeros(5, dtype=torch.int64), None, None)

    def steps_until_compiled(body: AttentionBody) -> int:
        compiled.clear()
        partial = PartialAttention(body, CPU)
        for step in range(6):
            partial(grouped, cache, cache, *rows)
            if compiled:
                return step
        return -1

    monkeypatch.setattr(decode_attention, "has_compiler", lambda: True)
    assert [steps_until_compiled(b) for b in ("auto", "eager", "compiled")] == [2, -1, 0]
    monkeypatch.setattr(decode_attention, "has_compiler", lambda: False)
    assert steps_until_compiled("auto") == -1
    with pytest.raises(UsageError, match="compiler"):
        PartialAttention("compiled", CPU)

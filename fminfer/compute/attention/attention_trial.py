"""The trial of compiled attention: beside plain torch, with every kind of row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fminfer.compute.attention.paged_attention import AttentionBody, PlainAttention
from fminfer.compute.attention.scoring import Scoring
from fminfer.compute.spec import Attention
from fminfer.compute.trial import Limits, Pair, Trial
from fminfer.core.messages import StepRow

CPU = torch.device("cpu")
# Of the largest expected number. 16 bits round weights and results.
ATTENTION_ERRORS: Limits = {torch.float32: 2e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# Of the longer row of a trial. The GPU's kernel has 64 keys on the way at once.
TRIED_KEYS = {"cpu": 67, "cuda": 327}


@dataclass(slots=True, frozen=True)
class AttentionAsked:
    """The attention that is asked for."""

    how: Attention  # of one layer; keys of all have the same shape
    block_size: int  # tokens a block of the KV cache
    kv_dtype: torch.dtype


def attention_trial(
    asked: AttentionAsked, dtype: torch.dtype, device: torch.device
) -> Trial[AttentionBody]:
    """Return how it is tried, with queries, new keys and values of a dtype."""
    num_keys = TRIED_KEYS[device.type]
    pairs = partial(attention_pairs, asked=asked, num_keys=num_keys, dtype=dtype, device=device)
    return Trial("attention", pairs, ATTENTION_ERRORS[dtype], asked)


def attention_pairs(
    kernel: AttentionBody,
    asked: AttentionAsked,
    num_keys: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Pair]:
    """Attend with a kernel, and in plain torch in float32 on the CPU.

    Nothing is rounded there but what a KV cache of another type rounds.
    """
    for is_limited in (False, True):
        found, expected = (
            _attend_some(body, asked, num_keys, is_limited, dtype, where)
            for body, where in ((kernel, device), (None, CPU))
        )
        yield found, expected


def _attend_some(
    kernel: AttentionBody | None,
    asked: AttentionAsked,
    num_keys: int,
    is_limited: bool,
    dtype: torch.dtype,  # of queries
    device: torch.device,
) -> torch.Tensor:  # (tokens, heads, head_dim) float32, on the CPU
    """Attend from two prompts, a chunk of one beside a token of the other, and two that share."""
    how, block_size = asked.how, asked.block_size
    heads, (_, kv_heads, head_dim) = how.heads, how.cache_shape
    body: AttentionBody = kernel or PlainAttention(kv_heads, device)
    given = dtype if kernel else torch.float32
    count = -(-(num_keys + 3) // block_size)
    shape = (2 * count + 1, kv_heads, block_size, head_dim)
    nan = torch.full((2, *shape), torch.nan, dtype=asked.kv_dtype, device=device)
    keys, values = nan  # what others left there must not matter
    blocks = list(range(2 * count))
    first, second = blocks[1::2], blocks[-2::-2]
    part, shared = num_keys * 2 // 5, num_keys // block_size
    scoring = Scoring(head_dim**-0.5, softcap=how.softcap)
    if is_limited:
        slopes, sinks = torch.linspace(0.01, 0.1, heads), torch.linspace(-1, 2, heads)
        scoring = replace(scoring, window=num_keys // 2, slopes=slopes.to(device))
        if how.has_sinks:  # a GPU compiles for them
            scoring = replace(scoring, sinks=sinks.to(device))
    generator = torch.Generator().manual_seed(0)
    outs = []
    for rows in (
        [StepRow([0] * num_keys, 0, first), StepRow([0] * part, 0, second)],
        [StepRow([0] * (num_keys // 2), part, second), StepRow([0], num_keys, first)],
        [
            StepRow([0], num_keys + 1, first),
            StepRow([0], shared * block_size, [*first[:shared], 2 * count]),
        ],
    ):
        tokens = sum(len(row.token_ids) for row in rows)
        query, key, value = (
            torch.randn((1, num, tokens, head_dim), generator=generator).to(dtype).to(device, given)
            for num in (heads, kv_heads, kv_heads)
        )
        out = body(query, key, value, keys, values, body.plan(rows, block_size), scoring)
        outs.append(out[0].float().cpu())
    return torch.cat(outs)

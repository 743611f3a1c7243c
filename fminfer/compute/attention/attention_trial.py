"""The trial of compiled attention: beside plain torch, with every kind of row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fminfer.compute.attention.paged_attention import AttentionBody, PlainAttention
from fminfer.compute.attention.scoring import NO_LIMIT, AttentionCall, Scoring
from fminfer.compute.spec import Attention
from fminfer.compute.step import Rows
from fminfer.compute.trial import Limits, Pair, Trial

CPU = torch.device("cpu")
# Of the largest expected number. 16 bits round weights and results.
ATTENTION_ERRORS: Limits = {torch.float32: 2e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# Of the longer row of a trial: more than a split of the GPU's kernel has. And its rows times KV
# heads: more than two for each of a GPU's multiprocessors, where programs merge their splits.
TRIED_KEYS = {"cpu": 67, "cuda": 327}
TRIED_PROGRAMS = {"cpu": 1, "cuda": 400}


@dataclass(slots=True, frozen=True)
class AttentionAsked:
    """The attention that is asked for."""

    hows: tuple[Attention, ...]  # of all layers, whose keys have one shape
    block_size: int  # tokens a block of the KV cache
    kv_dtype: torch.dtype

    @property
    def how(self) -> Attention:
        return self.hows[0]

    @property
    def kinds(self) -> list[Attention]:
        """One layer of each kind that a GPU compiles for."""
        kind = {
            (e.window is None, e.has_sinks, e.alibi is None, e.is_causal, e.relative is None): e
            for e in self.hows
        }
        return list(kind.values())


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
    """Attend as each kind of layer does with a kernel, and in plain torch in float32 on the CPU.

    Nothing is rounded there but what a KV cache of another type rounds.
    """
    for how in asked.kinds:
        one = replace(asked, hows=(how,))
        sizes = num_keys, -(-TRIED_PROGRAMS[device.type] // how.kv_heads)
        found = _attend_some(kernel, one, sizes, dtype, device)
        yield found, _attend_some(None, one, sizes, dtype, CPU)


def _trial_scoring(how: Attention, num_keys: int, device: torch.device) -> Scoring:
    """Return scores that differ from head to head, with limits within the rows of a trial."""
    heads, reach = how.heads, num_keys // 3
    slopes, relative = None, None
    if how.alibi is not None and not how.keeps_bias:
        slopes = torch.linspace(0.01, 0.1, heads, device=device)
    if how.relative is not None:
        places = torch.arange(heads * (2 * reach + 1), device=device)
        relative = (0.37 * places).sin().view(heads, -1)
    return Scoring(
        how.cache_shape[2] ** -0.5,
        window=None if how.window is None else num_keys * 5 // 6,
        slopes=slopes,
        softcap=how.softcap,
        sinks=torch.linspace(-1, 2, heads, device=device) if how.has_sinks else None,
        ahead=0 if how.is_causal else NO_LIMIT - 1 if how.window is None else reach,
        relative=relative,
    )


def _attend_some(
    kernel: AttentionBody | None,
    asked: AttentionAsked,  # one kind of layer
    sizes: tuple[int, int],  # keys of the longer row; rows that share a prefix
    dtype: torch.dtype,  # of queries
    device: torch.device,
) -> torch.Tensor:  # (tokens, heads, head_dim) float32, on the CPU
    """Attend from two prompts, a chunk of one beside a token of the other, and some that share."""
    how, block_size, (num_keys, num_rows) = asked.how, asked.block_size, sizes
    _, kv_heads, head_dim = how.cache_shape
    body: AttentionBody = kernel or PlainAttention(kv_heads, device)
    given = dtype if kernel else torch.float32
    count = -(-(num_keys + 3) // block_size)
    shape = (2, 2 * count + num_rows, kv_heads, block_size, head_dim)
    # What others left in a cache must not matter.
    keys, values = torch.full(shape, torch.nan, dtype=asked.kv_dtype, device=device)
    first, second = [*range(1, 2 * count, 2)], [*range(2 * count - 2, -1, -2)]
    part, shared = num_keys * 2 // 5, num_keys // block_size
    others = (
        (shared * block_size, 1, [*first[:shared], 2 * count + number])
        for number in range(num_rows)
    )
    generator, outs = torch.Generator().manual_seed(0), []
    for rows in (
        Rows.of((0, num_keys, first), (0, part, second)),
        Rows.of((part, num_keys // 2, second), (num_keys, 1, first)),
        Rows.of((num_keys + 1, 1, first), *others),
    ):
        query, key, value = (
            torch.randn((1, num, rows.num_tokens, head_dim), generator=generator)
            .to(dtype)
            .to(device, given)
            for num in (how.heads, kv_heads, kv_heads)
        )
        plan, scoring = body.plan(rows, block_size), _trial_scoring(how, num_keys, device)
        outs.append(body(AttentionCall(query, key, value, keys, values, plan, scoring))[0])
    return torch.cat([out.float().cpu() for out in outs])

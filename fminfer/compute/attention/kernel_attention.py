"""Calls the CPU's attention kernel for all rows of a step, and tries that of any device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
import torch

from fminfer.compute.attention.paged_attention import (
    MIN_ROWS,
    AttentionKernel,
    PlainAttention,
    find_shared_runs,
)
from fminfer.compute.attention.scoring import (
    AttentionCall,
    Scoring,
    make_rows_contiguous,
    make_scoring,
)
from fminfer.compute.kernels.library_calls import Arguments
from fminfer.compute.trial import Limits, Pair, Trial
from fminfer.compute.values.spec import Attention
from fminfer.compute.values.step import Column, Rows
from fminfer.compute.values.weights import KERNEL_TYPES

CACHE_TYPES = KERNEL_TYPES | {torch.float16: 2}
NO_RUNS = (np.zeros((0, 5), np.int64), np.zeros(0, np.int64))
CPU = torch.device("cpu")
# Of the largest expected number. 16 bits round weights and results.
ATTENTION_ERRORS: Limits = {
    torch.float32: 2e-4,
    torch.float16: 0.01,
    torch.bfloat16: 0.05,
}
# Of the longer row of a trial: more than a piece has, or a split of the GPU's kernel. And
# its rows times KV heads: more than two for each of a GPU's multiprocessors, where
# programs merge their splits.
TRIED_KEYS = {"cpu": 131, "cuda": 327}
TRIED_PROGRAMS = {"cpu": 1, "cuda": 400}
# runs that a row is in, on average: threads wait between them, and less and less is left
MOST_RUNS = 4
PIECE_KEYS = 128  # of halves.h: a run's keys are whole steps of the softmax


@dataclass(slots=True, frozen=True)
class KernelRows:
    """The rows of a step, as the kernel reads them."""

    # (rows, 5) int64: first packed token, tokens, position, start of its table in all
    # of `tables`, the first key of no run
    rows: torch.Tensor
    tables: torch.Tensor  # (tables, blocks) int32, of `Rows`
    # (tokens,) int64: block * block_size + place, of each token's key
    slots: torch.Tensor
    # Of rows of one token, those that share blocks:
    # (runs, 5) int64: first in `members`, their number, keys [first, last), and runs
    # before them in their rows; ascending in the last
    runs: torch.Tensor
    members: torch.Tensor  # (members,) int64: rows of each run
    num_tokens: int  # of all rows


def lay_out_rows(rows: Rows, block_size: int) -> KernelRows:
    """Lay out a step's rows, in packed order."""
    table = np.zeros((len(rows), 5), np.int64)
    table[:, 0] = rows.first_tokens
    table[:, 1] = rows.lengths
    table[:, 2] = rows.positions
    table[:, 3] = rows.table_of * np.int64(rows.tables.shape[1])
    runs, members = NO_RUNS
    if len(rows) >= MIN_ROWS:
        runs, members, table[:, 4] = _lay_out_runs(rows, block_size)
    return KernelRows(
        rows=torch.from_numpy(table),
        tables=torch.from_numpy(rows.tables),
        slots=torch.from_numpy(rows.key_places(block_size)),
        runs=torch.from_numpy(runs),
        members=torch.from_numpy(members),
        num_tokens=rows.num_tokens,
    )


def skip_tokens(layout: KernelRows, kept: torch.Tensor) -> KernelRows:
    """Return rows whose keys are all stored, for the outputs of some tokens, in order.

    Each row attends from its first such token on, from its last token if it has none.
    """
    rows = layout.rows.clone()
    first = rows[:, 0].contiguous()
    lengths = rows[:, 1]
    last = first + lengths - 1
    places = torch.searchsorted(kept, first)
    first_kept = torch.cat([kept, kept.new_full((1,), 2**62)])[places]
    skipped = torch.minimum(first_kept, last) - first
    rows[:, 0] += skipped
    rows[:, 1] -= skipped
    rows[:, 2] += skipped
    return replace(layout, rows=rows)


def _lay_out_runs(rows: Rows, block_size: int) -> tuple[Column, Column, Column]:
    """Return `runs` and `members` of KernelRows, and each row's first key of no run."""
    runs: list[list[int]] = []
    members = [np.empty(0, np.int64)]
    num_members = 0
    num_before = np.zeros(len(rows), np.int64)
    first_alone = np.zeros(len(rows), np.int64)
    alone = np.flatnonzero(rows.lengths == 1)
    unit = math.lcm(PIECE_KEYS, block_size) // block_size
    for run in find_shared_runs(rows.select(alone), block_size, unit):
        if num_members + len(run.rows) > MOST_RUNS * len(rows):
            break  # a run comes behind those that it begins with
        sharing = alone[run.rows]
        first = run.start * block_size
        last = run.end * block_size
        before = int(num_before[sharing[0]])
        runs.append([num_members, len(sharing), first, last, before])
        members.append(sharing)
        num_members += len(sharing)
        num_before[sharing] += 1
        first_alone[sharing] = last
    runs.sort(key=itemgetter(4))
    return np.array(runs, np.int64).reshape(-1, 5), np.concatenate(members), first_alone


def make_step_arguments(
    rows: KernelRows, heads: int, keys: torch.Tensor, kind: torch.dtype
) -> Arguments:
    """Return what the kernel is told of a step, without any layer's tensors and settings.

    `keys` are a layer's; `kind` is that of queries, new keys and values: float32 or bfloat16.
    """
    _, kv_heads, block_size, head_dim = keys.shape
    return Arguments(
        slots=rows.slots.data_ptr(),
        rows=rows.rows.data_ptr(),
        tables=rows.tables.data_ptr(),
        runs=rows.runs.data_ptr(),
        members=rows.members.data_ptr(),
        num_rows=len(rows.rows),
        num_runs=len(rows.runs),
        num_tokens=len(rows.slots),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        type=KERNEL_TYPES[kind],
        kv_type=CACHE_TYPES[keys.dtype],
        num_threads=torch.get_num_threads(),
    )


class CpuAttention(AttentionKernel):
    """The kernel, as a function of tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.fminfer_attention

    lay_out = staticmethod(lay_out_rows)
    skip_tokens = staticmethod(skip_tokens)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Attend as `AttentionKernel` says."""
        keys = call.keys
        values = call.values
        scoring = call.scoring
        layout: KernelRows = call.layout
        kind = torch.bfloat16 if call.query.dtype == torch.bfloat16 else torch.float32
        tensors = (call.query, call.new_keys, call.new_values)
        query, key, value = (
            make_rows_contiguous(tensor.to(kind)) for tensor in tensors
        )
        _, heads, tokens, head_dim = query.shape
        # The kernel trusts what it is given.
        new = 1, keys.shape[1], len(layout.slots), head_dim
        assert key.shape == value.shape == new, "keys of a step"
        assert head_dim == keys.shape[3] and heads % keys.shape[1] == 0, "heads"
        assert layout.num_tokens == tokens, "tokens of a step"
        out = torch.empty((1, tokens, heads, head_dim), dtype=kind, device="cpu")
        head_tensors = [
            None if each is None else each.float().contiguous()
            for each in (scoring.slopes, scoring.sinks, scoring.relative)
        ]
        arguments = make_step_arguments(layout, heads, keys, kind)
        arguments.query, arguments.new_keys, arguments.new_values = (
            t.data_ptr() for t in (query, key, value)
        )
        arguments.out, arguments.keys, arguments.values = (
            t.data_ptr() for t in (out, keys, values)
        )
        arguments.slopes, arguments.sinks, arguments.relative = (
            None if t is None else t.data_ptr() for t in head_tensors
        )
        arguments.ahead = scoring.ahead
        arguments.reach = scoring.reach
        _, arguments.query_head, arguments.query_token, _ = query.stride()
        _, arguments.new_key_head, arguments.new_key_token, _ = key.stride()
        _, arguments.new_value_head, arguments.new_value_token, _ = value.stride()
        arguments.window = min(scoring.window or 0, 2**31 - 1)
        arguments.scaling = scoring.scaling
        arguments.softcap = scoring.softcap or 0.0
        if self._attend(ctypes.byref(arguments)):
            raise MemoryError("no memory for the attention kernel's working space")
        return out.to(call.query.dtype)


@dataclass(slots=True, frozen=True)
class StageAttention:
    """The attention that is asked for."""

    specs: tuple[Attention, ...]  # of all layers, whose keys have one shape
    block_size: int  # tokens a block of the KV cache
    kv_dtype: torch.dtype

    @property
    def spec(self) -> Attention:
        return self.specs[0]

    @property
    def distinct_specs(self) -> list[Attention]:
        """One layer of each kind that a GPU compiles for."""
        kind = {
            (
                e.window is None,
                e.has_sinks,
                e.alibi is None,
                e.is_causal,
                e.relative is None,
            ): e
            for e in self.specs
        }
        return list(kind.values())


def make_attention_trial(
    attention: StageAttention, dtype: torch.dtype, device: torch.device
) -> Trial[AttentionKernel]:
    """Return how it is tried, with queries, new keys and values of a dtype."""
    num_keys = TRIED_KEYS[device.type]
    pairs = partial(
        compute_attention_pairs,
        attention=attention,
        num_keys=num_keys,
        dtype=dtype,
        device=device,
    )
    return Trial("attention", pairs, ATTENTION_ERRORS[dtype], attention)


def compute_attention_pairs(
    kernel: AttentionKernel,
    attention: StageAttention,
    num_keys: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Pair]:
    """Attend as each kind of layer does with a kernel, and in plain torch in float32 on the CPU.

    Nothing is rounded there but what a KV cache of another type rounds.
    """
    for spec in attention.distinct_specs:
        one_kind = replace(attention, specs=(spec,))
        num_rows = -(-TRIED_PROGRAMS[device.type] // spec.kv_heads)
        sizes = num_keys, max(MIN_ROWS, num_rows)
        computed = _attend_trial_rows(kernel, one_kind, sizes, dtype, device)
        yield computed, _attend_trial_rows(None, one_kind, sizes, dtype, CPU)


def _make_trial_scoring(
    spec: Attention, num_keys: int, device: torch.device
) -> Scoring:
    """Return scores that differ from head to head, with limits within the rows of a trial."""
    sinks = torch.linspace(-1, 2, spec.heads, device=device) if spec.has_sinks else None
    window = None if spec.window is None else num_keys * 5 // 6
    like = replace(spec, scaling=spec.cache_shape[2] ** -0.5, window=window)
    scoring = make_scoring(like, device, sinks)
    if spec.relative is None:
        return scoring
    places = torch.arange(spec.heads * (num_keys // 3 * 2 + 1), device=device)
    return replace(scoring, relative=(0.37 * places).sin().view(spec.heads, -1))


def _attend_trial_rows(
    kernel: AttentionKernel | None,
    attention: StageAttention,  # one kind of layer
    sizes: tuple[int, int],  # keys of the longer row; rows that share a prefix
    dtype: torch.dtype,  # of queries
    device: torch.device,
) -> torch.Tensor:  # (tokens, heads, head_dim) float32, on the CPU
    """Attend from two prompts, a chunk of one beside a token of the other, and some
    that share."""
    spec = attention.spec
    block_size = attention.block_size
    (num_keys, num_rows) = sizes
    _, kv_heads, head_dim = spec.cache_shape
    attend: AttentionKernel = kernel or PlainAttention(device)
    kernel_dtype = dtype if kernel else torch.float32
    count = -(-(num_keys + 3) // block_size)
    shape = (2, 2 * count + num_rows, kv_heads, block_size, head_dim)
    # What others left in a cache must not matter.
    keys, values = torch.full(shape, torch.nan, dtype=attention.kv_dtype, device=device)
    first = [*range(1, 2 * count, 2)]
    second = [*range(2 * count - 2, -1, -2)]
    part = num_keys * 2 // 5
    shared = num_keys // block_size
    others = (
        (shared * block_size, 1, [*first[:shared], 2 * count + number])
        for number in range(num_rows)
    )
    generator = torch.Generator().manual_seed(0)
    outs = []
    for rows in (
        Rows.from_tables((0, num_keys, first), (0, part, second)),
        Rows.from_tables((part, num_keys // 2, second), (num_keys, 1, first)),
        Rows.from_tables((num_keys + 1, 1, first), *others),
    ):
        query, key, value = (
            torch.randn((1, num, rows.num_tokens, head_dim), generator=generator)
            .to(dtype)
            .to(device, kernel_dtype)
            for num in (spec.heads, kv_heads, kv_heads)
        )
        call = AttentionCall(
            query=query,
            new_keys=key,
            new_values=value,
            keys=keys,
            values=values,
            layout=attend.lay_out(rows, block_size),
            scoring=_make_trial_scoring(spec, num_keys, device),
        )
        outs.append(attend(call)[0])
    return torch.cat([out.float().cpu() for out in outs])

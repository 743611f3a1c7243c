"""Calls the compiled attention kernel of the CPU, for all rows of a step at once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fminfer.compute.attention.attention_trial import AttentionAsked, attention_trial
from fminfer.compute.attention.paged_attention import MIN_ROWS, AttentionBody, find_shared_runs
from fminfer.compute.attention.scoring import AttentionCall, with_rows
from fminfer.compute.kernels.calls import Arguments
from fminfer.compute.step import Column, Rows
from fminfer.compute.trial import Candidate
from fminfer.compute.weights import KERNEL_TYPES

CACHE_TYPES = KERNEL_TYPES | {torch.float16: 2}
NO_RUNS = (np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
MOST_ENTRIES = 4  # runs that a row is in, on average: each costs memory, and less and less is left


@dataclass(slots=True, frozen=True)
class KernelRows:
    """The rows of a step, as the kernel reads them."""

    # (rows, 7) int64: first packed token, tokens, position, start of its table in all of `tables`,
    # start in `entries`, their number, the first key of no run
    rows: torch.Tensor
    tables: torch.Tensor  # (tables, blocks) int32, of `Rows`
    slots: torch.Tensor  # (tokens,) int64: block * block_size + place, of each token's key
    # Of rows of one token, those that share blocks:
    runs: torch.Tensor  # (runs, 4) int64: first in `members`, their number, keys [first, last)
    members: torch.Tensor  # (members,) int64: rows of each run, one run after another
    entries: torch.Tensor  # (members,) int64: places in `members` of each row, row by row
    num_tokens: int  # of all rows
    kept: torch.Tensor | None = None  # int64: the tokens whose output is wanted; None: all

    def keep(self, tokens: torch.Tensor) -> KernelRows:
        """Return rows whose keys and values are all stored, and whose outputs are some tokens'.

        Each row attends from its first such token on, from its last token if it has none.

        Args:
            tokens: (wanted,) int64, packed tokens in order.
        """
        rows = self.rows.clone()
        first, num = rows[:, 0].contiguous(), rows[:, 1]
        last = first + num - 1
        place = torch.searchsorted(tokens, first)
        found = torch.cat([tokens, tokens.new_full((1,), 2**62)])[place]
        skipped = torch.minimum(found, last) - first
        rows[:, 0] += skipped
        rows[:, 1] -= skipped
        rows[:, 2] += skipped
        return replace(self, rows=rows, kept=tokens)


def plan_rows(rows: Rows, block_size: int) -> KernelRows:
    """Lay out a step's rows, in packed order."""
    table = np.zeros((len(rows), 7), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = rows.firsts, rows.lengths, rows.positions
    table[:, 3] = rows.table_of * np.int64(rows.tables.shape[1])
    runs, members, entries = NO_RUNS
    if len(rows) >= MIN_ROWS:
        runs, members, own = _plan_runs(rows, block_size)
        num_entries = np.bincount(members, minlength=len(rows))
        table[:, 4], table[:, 5] = num_entries.cumsum() - num_entries, num_entries
        table[:, 6], entries = own, np.argsort(members, kind="stable")
    columns = (table, rows.tables, rows.slots(block_size), runs, members, entries)
    of_rows, tables, slots, of_runs, all_members, of_entries = map(torch.from_numpy, columns)
    return KernelRows(of_rows, tables, slots, of_runs, all_members, of_entries, rows.num_tokens)


def _plan_runs(rows: Rows, block_size: int) -> tuple[Column, Column, Column]:
    """Find what rows of one token share.

    Returns:
        `runs` and `members` of KernelRows, and each row's first key of no run.
    """
    runs: list[list[int]] = []
    members = [np.empty(0, np.int64)]
    num_members, own = 0, np.zeros(len(rows), np.int64)
    alone = np.flatnonzero(rows.lengths == 1)
    for run in find_shared_runs(rows.part(alone), block_size):
        if num_members + len(run.rows) > MOST_ENTRIES * len(rows):
            break  # a run comes behind those that it begins with
        first, last = run.start * block_size, run.end * block_size
        runs.append([num_members, len(run.rows), first, last])
        members.append(alone[run.rows])
        num_members += len(run.rows)
        own[members[-1]] = np.maximum(own[members[-1]], last)
    return np.array(runs, np.int64).reshape(-1, 4), np.concatenate(members), own


def step_arguments(
    rows: KernelRows, heads: int, keys: torch.Tensor, kind: torch.dtype
) -> Arguments:
    """Return what the kernel is told of a step, without any layer's tensors and settings.

    Args:
        kind: of queries, new keys and values: float32 or bfloat16.
        keys: (pool, kv_heads, block_size, head_dim), of any layer.
    """
    tensors = (rows.slots, rows.rows, rows.tables, rows.runs, rows.members, rows.entries)
    arguments = Arguments(*[None] * 6, *(tensor.data_ptr() for tensor in tensors))
    arguments.num_rows, arguments.num_runs = len(rows.rows), len(rows.runs)
    arguments.num_members, arguments.num_tokens = len(rows.members), len(rows.slots)
    _, arguments.kv_heads, arguments.block_size, arguments.head_dim = keys.shape
    arguments.heads, arguments.num_threads = heads, torch.get_num_threads()
    arguments.type, arguments.kv_type = KERNEL_TYPES[kind], CACHE_TYPES[keys.dtype]
    return arguments


class KernelAttention:
    """The kernel, as a function of tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.fminfer_attention

    plan = staticmethod(plan_rows)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Attend as `AttentionBody` says."""
        keys, values, how = call.keys, call.values, call.how
        rows: KernelRows = call.rows
        kind = torch.bfloat16 if call.query.dtype == torch.bfloat16 else torch.float32
        tensors = (call.query, call.new_keys, call.new_values)
        asked, key, value = (with_rows(given.to(kind)) for given in tensors)
        _, heads, tokens, head_dim = asked.shape
        # The kernel trusts what it is given.
        new = 1, keys.shape[1], len(rows.slots), head_dim
        assert key.shape == value.shape == new, "keys of a step"
        assert head_dim == keys.shape[3] and heads % keys.shape[1] == 0, "heads"
        assert rows.num_tokens == tokens, "tokens of a step"
        out = torch.empty((1, tokens, heads, head_dim), dtype=kind, device="cpu")
        of_heads = [
            None if each is None else each.float().contiguous()
            for each in (how.slopes, how.sinks, how.relative)
        ]
        given = step_arguments(rows, heads, keys, kind)
        given.query, given.new_keys, given.new_values = (t.data_ptr() for t in (asked, key, value))
        given.out, given.keys, given.values = (t.data_ptr() for t in (out, keys, values))
        given.slopes, given.sinks, given.relative = (
            None if t is None else t.data_ptr() for t in of_heads
        )
        given.ahead = how.ahead
        given.reach = 0 if how.relative is None else how.relative.shape[1] // 2
        _, given.query_head, given.query_token, _ = asked.stride()
        _, given.new_key_head, given.new_key_token, _ = key.stride()
        _, given.new_value_head, given.new_value_token, _ = value.stride()
        given.window, given.scaling = min(how.window or 0, 2**31 - 1), how.scaling
        given.softcap = how.softcap or 0.0
        if self._attend(ctypes.byref(given)):
            raise MemoryError("no memory for the attention kernel's working space")
        if rows.kept is not None:
            out = out[:, rows.kept]
        return out.to(call.query.dtype)


def attention_candidate(
    library: ctypes.CDLL, dtype: torch.dtype
) -> Candidate[AttentionAsked, AttentionBody]:
    """Return the CPU's attention, of queries of a dtype."""
    trial = partial(attention_trial, dtype=dtype, device=torch.device("cpu"))
    return Candidate(lambda _: KernelAttention(library), trial)

"""Facts about the processes that compute for an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Facts:
    """One pipeline, as its first rank sees it."""

    device: str  # such as cpu or cuda:0
    dtype: str  # of weights and hidden states, such as float32
    kv_dtype: str  # of the KV cache
    num_threads: int  # that compute in each process
    is_alone: bool  # no other process has part in it
    max_rows: int  # most sequences that run at once
    weight_bytes: int  # of this rank
    kv_bytes_per_token: int  # of this rank
    has_kernel: bool  # attention is compiled
    why_plain: str  # why a kernel that was to be used is not
    why_slower: str  # why it is slower than it could be

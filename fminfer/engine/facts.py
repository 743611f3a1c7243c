"""Facts about the processes that compute for an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Facts:
    """One pipeline, as its first rank sees it."""

    device: str  # such as cpu or cuda:0
    dtype: str  # type of weights and hidden states, such as float32
    kv_dtype: str  # type of the KV cache
    num_threads: int  # computing threads in each process
    is_alone: bool  # the pipeline has no other process
    max_rows: int  # most sequences that run at once
    num_kv_blocks: int  # the size of its KV cache
    weight_bytes: int  # this rank's weights
    kv_bytes_per_token: int  # this rank's part of a token
    has_kernel: bool  # attention is compiled
    why_plain: str  # why a kernel that should be used is not
    why_slower: str  # why it is slower than it could be

"""The kernel before the sweep."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["tiles", "blocks", "slopes", "sinks"],
)
def old_kernel(
    query,  # (heads, tokens, head_dim), by its strides
    out,  # (tokens, heads, head_dim)
    keys,  # (pool, kv_heads, block_size, head_dim)
    values,
    tiles,  # (tiles, 4) int32: first packed token, tokens, position, the row's start in `blocks`
    blocks,  # int32: the rows' block tables, one after another
    slopes,  # (heads,) float32
    sinks,  # the same: scores of a key more, which has no value
    query_head,
    query_token,
    window,  # keys as far as this are hidden
    scaling,
    softcap,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,  # the power of two that holds head_dim
    QUERIES: tl.constexpr,  # tokens times GROUP, at most: the rows of a product
    KEYS: tl.constexpr,  # keys at a time: its columns
):
    """Attend from one tile, for one KV head. Grid: (tiles, kv_heads)."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    first = tl.load(tile).to(tl.int64)
    num_tokens = tl.load(tile + 1)
    start_position = tl.load(tile + 2)
    table = blocks + tl.load(tile + 3)

    rows = tl.arange(0, QUERIES)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    position = start_position + token
    dims = tl.arange(0, DIM)
    is_row = token < num_tokens
    is_query = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = head * query_head + (first + token) * query_token
    asked = tl.load(query + places[:, None] + dims[None, :], mask=is_query, other=0.0)
    slope = tl.load(slopes + head, mask=is_row, other=0.0)

    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, DIM), tl.float32)
    earliest = tl.maximum(start_position - window + 1, 0) // KEYS * KEYS
    end = start_position + num_tokens
    for start in range(earliest, end, KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        line = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_DIM
        is_used = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + line[:, None] + dims[None, :], mask=is_used, other=0.0)
        key = key.to(asked.dtype)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
        if HAS_CAP:  # softcap * tanh(scores / softcap)
            scores = softcap - 2.0 * softcap / (tl.exp(2.0 * scores / softcap) + 1.0)
        distance = position[:, None] - at[None, :]
        scores -= slope[:, None] * distance
        is_seen = (distance >= 0) & (distance < window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)  # a window may hide all of these
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(best - base)
        total = total * fade + tl.sum(weights, 1)
        value = tl.load(values + line[:, None] + dims[None, :], mask=is_used, other=0.0)
        value = value.to(asked.dtype)
        weights = weights.to(value.dtype)
        sums *= fade[:, None]
        # Where some are hidden: 0 times a nan or an infinity would be nan.
        if (tl.minimum(start + KEYS, end) > start_position + 1) | (start < end - window):
            is_odd = (value != value) | (tl.abs(value) == float("inf"))
            value = tl.where(is_odd, 0.0, value)
            odd = tl.where(is_odd, 1.0, 0.0).to(value.dtype)
            seen = tl.where(is_seen, 1.0, 0.0).to(value.dtype)
            reaches = tl.dot(seen, odd, input_precision="ieee") > 0
            sums = tl.where(reaches, float("nan"), sums)
        sums += tl.dot(weights, value, input_precision="ieee")
        best = new_best
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0)
        most = tl.maximum(best, sink)
        fade = tl.exp(best - most)
        total = total * fade + tl.exp(sink - most)
        sums *= fade[:, None]
    sums = sums / total[:, None]
    written = out + ((first + token) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM
    tl.store(written + dims[None, :], sums.to(out.dtype.element_ty), mask=is_query)

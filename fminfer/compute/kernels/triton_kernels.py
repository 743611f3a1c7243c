"""The GPU's kernels, in Triton. `triton_attention`, `triton_layers` and `triton_draws` call them.

In attention a tile is a few consecutive tokens of one row, with all query heads that share a KV
head: one program attends from it to all of the row's keys before it, block by block, with the
online softmax (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). Nothing is padded
but a tile. The parts of layers are computed in float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    keys,  # (pool, kv_heads, block_size, head_dim)
    values,
    new_keys,  # (kv_heads, tokens, head_dim), by its strides
    new_values,
    slots,  # (tokens,) int32: block * block_size + place; below 0: the token is none
    key_head,
    key_token,
    value_head,
    value_token,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,  # the power of two that holds head_dim
):
    """Put one token's keys and values of one head where they belong. Grid: (tokens, kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    row = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    dims = tl.arange(0, DIM)
    is_dim = (dims < HEAD_DIM) & (slot >= 0)
    key = tl.load(new_keys + head * key_head + token * key_token + dims, mask=is_dim)
    value = tl.load(new_values + head * value_head + token * value_token + dims, mask=is_dim)
    tl.store(keys + row * HEAD_DIM + dims, key, mask=is_dim)
    tl.store(values + row * HEAD_DIM + dims, value, mask=is_dim)


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["tiles", "blocks", "slopes", "sinks"],
)
def attend_kernel(
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


@triton.jit
def norm_kernel(
    x,  # (outer, inner, WIDTH), by its steps
    other,  # (outer * inner, WIDTH): added first, where ADDS
    both,  # the same: the sum
    out,  # the same
    weight,  # (WIDTH,)
    inner,
    outer_step,
    inner_step,
    eps,
    offset,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,  # the power of two that holds it
    ADDS: tl.constexpr,
):
    """Norm one row. Grid: (outer * inner,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    is_used = columns < WIDTH
    start = row // inner * outer_step + row % inner * inner_step
    value = tl.load(x + start + columns, mask=is_used, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(other + row * WIDTH + columns, mask=is_used, other=0.0).to(tl.float32)
        rounded = value.to(both.dtype.element_ty)
        tl.store(both + row * WIDTH + columns, rounded, mask=is_used)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    factor = tl.load(weight + columns, mask=is_used, other=0.0).to(tl.float32) + offset
    tl.store(
        out + row * WIDTH + columns, (value * scale * factor).to(out.dtype.element_ty), is_used
    )


@triton.jit
def rotate_kernel(
    x,  # (tokens, heads, WIDTH), by its steps
    out,  # (tokens, heads, WIDTH)
    cos,  # (tokens, TURNED)
    sin,
    token_step,
    head_step,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    SIZE: tl.constexpr,  # the power of two that holds a half of it
    REST: tl.constexpr,  # and one that holds what is not turned; 0: nothing
):
    """Turn one head of one token. Grid: (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = x + token * token_step + head * head_step
    target = out + (token * tl.num_programs(1) + head) * WIDTH
    half: tl.constexpr = TURNED // 2
    low = tl.arange(0, SIZE)
    high = low + half
    is_used = low < half
    first = tl.load(source + low, mask=is_used, other=0.0).to(tl.float32)
    second = tl.load(source + high, mask=is_used, other=0.0).to(tl.float32)
    angle = token * TURNED
    cos_low = tl.load(cos + angle + low, mask=is_used, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + high, mask=is_used, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle + low, mask=is_used, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + high, mask=is_used, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(target + low, (first * cos_low - second * sin_low).to(kind), is_used)
    tl.store(target + high, (second * cos_high + first * sin_high).to(kind), is_used)
    if REST:
        rest = TURNED + tl.arange(0, REST)
        tl.store(target + rest, tl.load(source + rest, rest < WIDTH), rest < WIDTH)


@triton.jit
def gate_kernel(
    x,  # (rows, width), by its step
    second,  # the same: what is gated, where GATES
    out,  # (rows, width)
    width,
    step,
    IS_SILU: tl.constexpr,  # else gelu, in its form with tanh
    GATES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Compute some columns of one row. Grid: (rows, width / SIZE)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_used = columns < width
    value = tl.load(x + row * step + columns, mask=is_used, other=0.0).to(tl.float32)
    if IS_SILU:
        value = value / (1.0 + tl.exp(-value))
    else:
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)  # 2 sqrt(2 / pi)
        value = value / (1.0 + tl.exp(-inner))  # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
    if GATES:
        value *= tl.load(second + row * step + columns, mask=is_used, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), is_used)


@triton.jit
def mixed(bits):
    """Mix as `gumbel.token_bits` does."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def race_kernel(
    scaled,  # (rows, vocab) float32
    noise,  # (rows,) int64
    scores,  # (rows, parts) float64
    winners,  # (rows, parts) int64
    vocab,
    SIZE: tl.constexpr,
):
    """Find the winner of some tokens of one row. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * SIZE + tl.arange(0, SIZE)
    logits = tl.load(scaled + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    words = tl.load(noise + row)
    lower, upper = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    bits = mixed(mixed(ids.to(tl.uint32) ^ lower) ^ upper)
    # Constants are float32, which has no 2^32 - 0.5.
    rest = (4294967296.0 - bits.to(tl.float64) - 0.5) * 2.3283064365386963e-10  # 2^-32
    score, place = tl.max(logits.to(tl.float64) - tl.log(-tl.log(rest)), 0, return_indices=True)
    here = row * tl.num_programs(1) + part
    tl.store(scores + here, score)
    tl.store(winners + here, (part * SIZE + place).to(tl.int64))

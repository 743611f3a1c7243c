"""The GPU's kernels, in Triton. `triton_attention` and `triton_layers` call them.

In attention a tile is a few consecutive tokens of one row, with all query heads that share a KV
head: one program attends from it to the row's keys before it, block by block, with the online
softmax (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention").
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
    key_head, key_token, value_head, value_token,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,  # the power of two that holds head_dim
):  # fmt: skip
    """Put one token's keys and values of one head where they belong. Grid: (tokens,
    kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    row = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    dims = tl.arange(0, DIM)
    is_dim = (dims < HEAD_DIM) & (slot >= 0)
    key = tl.load(new_keys + head * key_head + token * key_token + dims, mask=is_dim)
    value = tl.load(
        new_values + head * value_head + token * value_token + dims, mask=is_dim
    )
    tl.store(keys + row * HEAD_DIM + dims, key, mask=is_dim)
    tl.store(values + row * HEAD_DIM + dims, value, mask=is_dim)


@triton.jit
def row_splits(
    tile, window, ahead, HAS_WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the first key of a tile's first piece, the end of its last, and the keys
    of a split.

    Then the position of its first token, their number, and the end of its keys. The row alone
    decides: its result is the same beside any others, and in any number of programs.
    """
    num_tokens = tl.load(tile + 1)
    start_position = tl.load(tile + 2)
    end = tl.minimum(start_position + num_tokens + ahead, tl.load(tile + 4))
    low = end * 0
    if HAS_WINDOW:
        low = tl.maximum(start_position - window + 1, 0) // KEYS * KEYS
    high = tl.cdiv(end, KEYS) * KEYS
    split_size = tl.maximum(SPLIT, tl.cdiv(high - low, SPLITS * KEYS) * KEYS)
    return low, high, split_size, start_position, num_tokens, end


@triton.jit
def merge(best, total, sums, other_best, other_total, other_sums):
    """Join what was found in some keys and in others: the best score, as a power of 2,
    and sums."""
    most = tl.maximum(best, other_best)
    base = tl.where(most == float("-inf"), 0.0, most)  # a window may hide all of these
    fade = tl.math.exp2(best - base)
    other_fade = tl.math.exp2(other_best - base)
    total = total * fade + other_total * other_fade
    return most, total, sums * fade[:, None] + other_sums * other_fade[:, None]


@triton.jit
def key_lines(
    table, kv_head, start, end,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return where in the cache the keys of a piece begin: (KEYS,) int64."""
    inner = tl.arange(0, KEYS)
    number = start // BLOCK_SIZE
    # One id for each block is loaded, where pieces have few: ids for all keys cost 10 to 20 %.
    if BLOCK_SIZE % KEYS == 0 or (KEYS % BLOCK_SIZE == 0 and KEYS <= 4 * BLOCK_SIZE):
        block = tl.load(table + number).to(tl.int64)
        first = (block * KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_DIM)
        for place in tl.static_range(1, KEYS // BLOCK_SIZE):
            is_used = (number + place) * BLOCK_SIZE < end
            block = tl.load(table + number + place, mask=is_used, other=0).to(tl.int64)
            other = (block * KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_DIM)
            first = tl.where(inner // BLOCK_SIZE >= place, other, first)
        return first + (start % BLOCK_SIZE + inner) % BLOCK_SIZE * HEAD_DIM
    else:
        at = start + inner
        block = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)
        return ((block * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def attend_pieces(
    best, total, sums, tile_query, slope, position, keys, values, table, kv_head,
    low, high, left, skipped, size, end, window, ahead, scaling, softcap, biases, reach,
    IS_WHOLE: tl.constexpr,  # all queries see all keys: no masks
    IS_ONE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_RELATIVE: tl.constexpr, HAS_WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to keys [low, high), without `skipped` keys from `left` on, piece by piece."""
    dims = tl.arange(0, DIM)
    factor = 1.4426950408889634  # log2(e)
    if not (HAS_CAP or HAS_SLOPES or HAS_RELATIVE):
        factor *= scaling
    empty_best = best
    empty_total = total
    empty_sums = sums
    all_best = best
    all_total = total
    all_sums = sums  # of the splits before this one
    border = low + size
    for start in tl.range(low, high, KEYS, num_stages=STAGES):
        if IS_ONE:
            if start == border:
                all_best, all_total, all_sums = merge(
                    all_best, all_total, all_sums, best * factor, total, sums
                )
                best = empty_best
                total = empty_total
                sums = empty_sums
                border += size
        elif not IS_WHOLE:
            start += tl.where(start >= left, skipped, 0)
        at = start + tl.arange(0, KEYS)
        distance = position[:, None] - at[None, :]
        lines = key_lines(
            table, kv_head, start, end, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS
        )
        places = lines[:, None] + dims[None, :]
        is_key = at < end
        if IS_ONE and HAS_WINDOW:
            is_key &= at >= end - window
        if IS_WHOLE and HEAD_DIM == DIM:
            key = tl.load(keys + places)
            value = tl.load(values + places)
        else:
            is_used = is_key[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(keys + places, mask=is_used, other=0.0)
            value = tl.load(values + places, mask=is_used, other=0.0)
        value = value.to(tile_query.dtype)
        scores = tl.dot(
            tile_query, tl.trans(key.to(tile_query.dtype)), input_precision="ieee"
        )
        if HAS_CAP:  # softcap * tanh(scores / softcap)
            scores = softcap - 2.0 * softcap / (
                tl.exp(2.0 * (scores * scaling) / softcap) + 1.0
            )
        elif HAS_SLOPES or HAS_RELATIVE:
            scores *= scaling
        if HAS_SLOPES:
            scores -= slope[:, None] * distance
        if HAS_RELATIVE:
            near = tl.minimum(tl.maximum(distance, -reach), reach)
            scores += tl.load(biases[:, None] + near)
        if not IS_WHOLE:
            is_seen = is_key[None, :] & (distance >= -ahead)
            if HAS_WINDOW:
                is_seen &= distance < window
            scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best) * factor
        weights = tl.math.exp2(scores * factor - base[:, None])
        fade = tl.math.exp2(best * factor - base)
        best = new_best
        total = total * fade + tl.sum(weights, 1)
        sums *= fade[:, None]
        if not (IS_WHOLE or IS_ONE):
            # Where some are hidden: 0 times a nan or an infinity would be nan.
            is_odd = (value != value) | (tl.abs(value) == float("inf"))
            if tl.max(tl.max(is_odd.to(tl.int32), 1), 0) > 0:
                value = tl.where(is_odd, 0.0, value)
                odd = tl.where(is_odd, 1.0, 0.0).to(value.dtype)
                seen = tl.where(is_seen, 1.0, 0.0).to(value.dtype)
                reaches = tl.dot(seen, odd, input_precision="ieee") > 0
                sums = tl.where(reaches, float("nan"), sums)
        sums = tl.dot(weights.to(value.dtype), value, sums, input_precision="ieee")
    if IS_ONE:
        return merge(all_best, all_total, all_sums, best * factor, total, sums)
    return best if IS_WHOLE else best * factor, total, sums


@triton.jit(
    do_not_specialize=["window", "ahead", "reach"],
    do_not_specialize_on_alignment=["tiles", "blocks", "slopes", "sinks", "relative"],
)
def attend_kernel(
    query,  # (heads, tokens, head_dim), by its strides
    out,  # (tokens, heads, head_dim)
    keys,  # (pool, kv_heads, block_size, head_dim)
    values,
    # (tiles, 5) int32: first packed token, tokens, position, and of the row its start in
    tiles,
    # `blocks` and the number of its keys
    blocks,  # int32: the rows' block tables, one after another
    slopes,  # (heads,) float32
    sinks,  # the same: scores of a key more, which has no value
    relative,  # (heads, 2 * reach + 1) float32: biases by query position - key position
    parts,  # (tiles, SPLITS, heads, head_dim) float32: sums of splits
    marks,  # (tiles, SPLITS, heads, 2) float32: their best scores and totals
    query_head, query_token,
    window,  # keys as far as this are hidden
    ahead,  # keys behind its own that a query sees, at most
    reach, scaling, softcap,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_RELATIVE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,  # the power of two that holds head_dim
    IS_ONE: tl.constexpr,  # tiles have one token, and are split
    QUERIES: tl.constexpr,  # tokens times GROUP, at most: the rows of a product
    KEYS: tl.constexpr,  # keys at a time: its columns
    SPLIT: tl.constexpr,  # keys of a split, at least
    SPLITS: tl.constexpr,  # of a row, at most
):  # fmt: skip
    """Attend from one tile, for one KV head. Grid: (tiles * kv_heads, 1 or SPLITS).

    With SPLITS programs a tile, each has one split, and `join_kernel` merges what they found.
    A single program merges its splits in the same order.
    """
    number = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tiles + number * 5
    first = tl.load(tile).to(tl.int64)
    table = blocks + tl.load(tile + 3)
    low, high, size, start_position, num_tokens, end = row_splits(
        tile, window, ahead, HAS_WINDOW, KEYS, SPLIT, SPLITS
    )
    is_part = (tl.num_programs(1) > 1) & (high - low > size)
    if tl.num_programs(1) > 1:
        low += tl.program_id(1) * size
        high = tl.minimum(low + size, high)
    if (num_tokens == 0) | (low >= high):
        return
    token = tl.arange(0, QUERIES) // GROUP
    head = kv_head * GROUP + tl.arange(0, QUERIES) % GROUP
    position = start_position + token
    dims = tl.arange(0, DIM)
    is_row = token < num_tokens
    is_query = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = head * query_head + (first + token) * query_token
    tile_query = tl.load(
        query + places[:, None] + dims[None, :], mask=is_query, other=0.0
    )
    slope = tl.zeros((QUERIES,), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)
    biases = relative + head * 0
    if HAS_RELATIVE:
        biases = relative + tl.where(is_row, head, 0) * (2 * reach + 1) + reach
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, DIM), tl.float32)
    left = high
    skipped = 0
    if not IS_ONE:
        # Pieces that all queries see whole have no masks; others are before and behind them.
        left = low
        if HAS_WINDOW:
            last = start_position + num_tokens
            left = tl.maximum(tl.cdiv(tl.maximum(last - window, 0), KEYS) * KEYS, low)
        left = tl.minimum(left, high)
        seen = tl.minimum(start_position + ahead + 1, end)
        right = tl.maximum(tl.minimum(seen // KEYS * KEYS, high), left)
        best, total, sums = attend_pieces(
            best, total, sums, tile_query, slope, position, keys, values, table, kv_head, left,
            right, left, 0, size, end, window, ahead, scaling, softcap, biases, reach, True,
            IS_ONE, HAS_CAP, HAS_SLOPES, HAS_RELATIVE, HAS_WINDOW, KV_HEADS, HEAD_DIM,
            BLOCK_SIZE, DIM, KEYS, None,
        )  # fmt: skip
        skipped = right - left
    best, total, sums = attend_pieces(
        best, total, sums, tile_query, slope, position, keys, values, table, kv_head, low,
        high - skipped, left, skipped, size, end, window, ahead, scaling, softcap, biases, reach,
        False, IS_ONE, HAS_CAP, HAS_SLOPES, HAS_RELATIVE, HAS_WINDOW, KV_HEADS, HEAD_DIM,
        BLOCK_SIZE, DIM, KEYS, None if IS_ONE else 1,
    )  # fmt: skip
    if is_part:
        line = (number.to(tl.int64) * SPLITS + tl.program_id(1)) * (
            KV_HEADS * GROUP
        ) + head
        tl.store(parts + line[:, None] * HEAD_DIM + dims[None, :], sums, mask=is_query)
        tl.store(marks + line * 2, best, mask=is_row)
        tl.store(marks + line * 2 + 1, total, mask=is_row)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0) * 1.4426950408889634
            best, total, sums = merge(best, total, sums, sink, 1.0, 0.0)
        written = (
            out + ((first + token) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM
        )
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(written + dims[None, :], result, mask=is_query)


@triton.jit(
    do_not_specialize=["window", "ahead"],
    do_not_specialize_on_alignment=["tiles", "sinks"],
)
def join_kernel(
    out, tiles, sinks, parts, marks, window, ahead,  # as `attend_kernel` has them
    HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one token's head, in their order. Grid: (tiles, heads)."""
    number = tl.program_id(0)
    head = tl.program_id(1) + tl.arange(0, 1)
    tile = tiles + number * 5
    first = tl.load(tile).to(tl.int64)
    low, high, size, _, num_tokens, _ = row_splits(
        tile, window, ahead, HAS_WINDOW, KEYS, SPLIT, SPLITS
    )
    if (num_tokens == 0) | (high - low <= size):
        return  # `attend_kernel` has written it
    dims = tl.arange(0, DIM)
    is_dim = (dims < HEAD_DIM)[None, :]
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, DIM), tl.float32)
    for start in tl.range(low, high, 8 * size):
        for split in tl.static_range(8):  # so that their loads are on the way together
            at = start + split * size
            line = (number.to(tl.int64) * SPLITS + (at - low) // size) * HEADS + head
            places = parts + line[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(places, mask=is_dim & (at < high), other=0.0)
            mark = tl.load(marks + line * 2, mask=at < high, other=float("-inf"))
            part_total = tl.load(marks + line * 2 + 1, mask=at < high, other=0.0)
            best, total, sums = merge(best, total, sums, mark, part_total, part)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        best, total, sums = merge(best, total, sums, sink, 1.0, 0.0)
    written = out + (first * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(written, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_dim)


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
        value += tl.load(other + row * WIDTH + columns, mask=is_used, other=0.0).to(
            tl.float32
        )
        rounded = value.to(both.dtype.element_ty)
        tl.store(both + row * WIDTH + columns, rounded, mask=is_used)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    factor = tl.load(weight + columns, mask=is_used, other=0.0).to(tl.float32) + offset
    tl.store(
        out + row * WIDTH + columns,
        (value * scale * factor).to(out.dtype.element_ty),
        is_used,
    )


@triton.jit
def rotate_kernel(
    x,  # (tokens, heads, WIDTH), by its steps
    out,  # (tokens, heads, WIDTH)
    cos,  # (tokens, TURNED / 2)
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
    part = tl.load(cos + token * half + low, mask=is_used, other=0.0)
    other = tl.load(sin + token * half + low, mask=is_used, other=0.0)
    kind = out.dtype.element_ty
    tl.store(target + low, (first * part - second * other).to(kind), is_used)
    tl.store(target + high, (second * part + first * other).to(kind), is_used)
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
        # 2 sqrt(2 / pi)
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(-inner))  # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
    if GATES:
        value *= tl.load(second + row * step + columns, mask=is_used, other=0.0).to(
            tl.float32
        )
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), is_used)


@triton.jit
def mixed(bits):
    """Mix as `compute_gumbel_noise.compute_token_bits` does."""
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
    first_id,  # the token of the first logit
    SIZE: tl.constexpr,
):
    """Find the winner of some tokens of one row. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * SIZE + tl.arange(0, SIZE)
    logits = tl.load(scaled + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    words = tl.load(noise + row)
    lower = words.to(tl.uint32)
    upper = (words >> 32).to(tl.uint32)
    bits = mixed(mixed((ids + first_id).to(tl.uint32) ^ lower) ^ upper)
    # Constants are float32, which has no 2^32 - 0.5.
    rest = (4294967296.0 - bits.to(tl.float64) - 0.5) * 2.3283064365386963e-10  # 2^-32
    score, place = tl.max(
        logits.to(tl.float64) - tl.log(-tl.log(rest)), 0, return_indices=True
    )
    here = row * tl.num_programs(1) + part
    tl.store(scores + here, score)
    tl.store(winners + here, (part * SIZE + place).to(tl.int64))

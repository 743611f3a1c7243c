// What attention is cut into, where its operands lie, and what becomes of its sums.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "calls.h"
#include "halves.h"
#include "wide.h"

namespace {

constexpr float LOWEST = -3.0e38f;  // of scores: that of a hidden key
constexpr int MOST_QUERIES = 2 * LANES;
constexpr int ROW = 5, RUN = 5;  // numbers that tell of a row, and of a run
inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// What one thread works in.
struct Space {
    float *queries, *sums, *scores, *keys, *values;
    uint16_t *query_tiles, *weight_tiles, *value_tiles;
    float* states;  // of all threads: (rows, heads, state_size) behind runs, or null
    void* memory;

    Space(const Arguments& a, float* states) : states(states) {
        const size_t width = round_up(int(a.head_dim), LANES);
        const size_t block = round_up(int(a.block_size), GROUP_KEYS);
        const size_t keys_at_once = block > PIECE_KEYS ? block : PIECE_KEYS;
        const size_t of_queries = MOST_QUERIES * width * sizeof(float);
        const size_t of_block = block * width * sizeof(float);
        size_t total = 0;
        const auto take = [&](size_t bytes) {
            const size_t start = total;
            total += (bytes + 63) / 64 * 64;
            return start;
        };
        const size_t starts[] = {take(of_queries),
                                 take(of_queries),
                                 take(MOST_QUERIES * keys_at_once * sizeof(float)),
                                 take(of_block),
                                 take(of_block),
                                 take(MOST_QUERIES * width * sizeof(uint16_t)),
                                 take(MOST_QUERIES * PIECE_KEYS * sizeof(uint16_t)),
                                 take(PIECE_KEYS * 2 * LANES * sizeof(uint16_t))};
        memory = std::aligned_alloc(64, total);
        if (memory == nullptr) throw std::bad_alloc();
        std::memset(memory, 0, total);
        char* first = static_cast<char*>(memory);
        float** floats[] = {&queries, &sums, &scores, &keys, &values};
        uint16_t** halves[] = {&query_tiles, &weight_tiles, &value_tiles};
        for (int i = 0; i < 5; i++) *floats[i] = reinterpret_cast<float*>(first + starts[i]);
        for (int i = 0; i < 3; i++)
            *halves[i] = reinterpret_cast<uint16_t*>(first + starts[5 + i]);
    }
    Space(const Space&) = delete;
    ~Space() { std::free(memory); }
};

// Queries [first, last) of one KV head, of a row or of a run: query q is the row's token, or the
// run's member, q / group, and of its heads q % group. They attend to keys [start, end) at most.
struct Item {
    const int64_t* row;  // of a run its first
    int64_t kv_head, first, last, start, end;
    const int64_t* members;  // null: of one row
    int64_t heads = 1;       // KV heads, kv_head and after: more than one if queries are few
};

// What an item has of one of its KV heads.
inline Item head_of(Item item, int64_t head) {
    item.kv_head += head;
    item.heads = 1;
    return item;
}

// The largest score of a query so far, and the sum of its weights.
struct Marks {
    float largest, total;
};

// What is kept of a row's head: sums, then its marks.
inline int64_t state_size(const Arguments& a) { return round_up(int(a.head_dim), LANES) + LANES; }

// The keys of a step of the softmax end at the next whole piece, wherever they start.
inline int64_t piece_end(int64_t start, int64_t end) {
    const int64_t whole = (start / PIECE_KEYS + 1) * PIECE_KEYS;
    return whole < end ? whole : end;
}

inline int64_t token_of(const Arguments& a, const Item& item, int64_t place) {
    return item.members ? a.rows[item.members[place] * ROW] : item.row[0] + place;
}

inline int64_t position_of(const Arguments& a, const Item& item, int64_t place) {
    return item.members ? a.rows[item.members[place] * ROW + 2] : item.row[2] + place;
}

// The first key that an item looks at.
inline int64_t first_key(const Arguments& a, const Item& item, int64_t position) {
    const int64_t seen = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
    return seen > item.start ? seen : item.start;
}

// Behind the last key that a query at a position sees.
inline int64_t end_key(const Arguments& a, const Item& item, int64_t position) {
    const int64_t of_row = item.members ? item.end : item.row[1] + item.row[2];
    const int64_t end = of_row < item.end ? of_row : item.end;
    return position + a.ahead < end ? position + a.ahead + 1 : end;
}

// A head's biases, or null.
inline const float* table_of(const Arguments& a, int64_t head) {
    return a.relative ? a.relative + head * (2 * a.reach + 1) : nullptr;
}

// The bias of a distance, query position - key position, in a head's table.
inline float bias_at(const Arguments& a, const float* table, int64_t distance) {
    const int64_t near = distance < a.reach ? distance : a.reach;
    return table[a.reach + (near > -a.reach ? near : -a.reach)];
}

// Keys or values of a block and KV head, (block_size, head_dim), of the cache's type.
template <typename T>
inline const T* block_of(const Arguments& a, const void* cache, int64_t block, int64_t kv_head) {
    return static_cast<const T*>(cache) +
           (block * a.kv_heads + kv_head) * a.block_size * a.head_dim;
}

// `count` keys or values of a block as (count, width), in place where they are so. What is behind
// each becomes 0.
template <typename T>
inline const T* read_block(const Arguments& a, const T* block, int count, int width, T* space) {
    const int dim = int(a.head_dim);
    if (dim == width) return block;
    for (int j = 0; j < count; j++) {
        std::memcpy(space + j * width, block + j * dim, dim * sizeof(T));
        std::memset(space + j * width + dim, 0, (width - dim) * sizeof(T));
    }
    return space;
}

// The same as floats.
template <typename T>
inline const float* read_floats(const Arguments& a, const T* block, int count, int width,
                                float* space) {
    const int dim = int(a.head_dim);
    for (int j = 0; j < count; j++) {
        convert(block + j * dim, dim, space + j * width);
        for (int d = dim; d < width; d++) space[j * width + d] = 0;
    }
    return space;
}
template <>
inline const float* read_floats(const Arguments& a, const float* block, int count, int width,
                                float* space) {
    return read_block(a, block, count, width, space);
}

inline int64_t query_place(const Arguments& a, const Item& item, int64_t q, int64_t group) {
    const int64_t head = item.kv_head * group + q % group, token = token_of(a, item, q / group);
    return head * a.query_head + token * a.query_token;
}

inline float query_at(const Arguments& a, int64_t place) {
    return a.type == 1 ? from_bfloat16(static_cast<const uint16_t*>(a.query)[place])
                       : static_cast<const float*>(a.query)[place];
}

// Writes sums, which are (width,) behind head_dim, divided by their total.
inline void write_out(const Arguments& a, int64_t token, int64_t head, float* sums, float total) {
    const int64_t place = (token * a.heads + head) * a.head_dim, dim = a.head_dim;
    for (int64_t d = 0; d < dim; d += WIDTH) put_wide(sums + d, wide_at(sums + d) / total);
    if (a.type == 1)
        convert(sums, dim, static_cast<uint16_t*>(a.out) + place);
    else
        convert(sums, dim, static_cast<float*>(a.out) + place);
}

// Where a query's state behind runs is kept.
inline float* state_of(const Arguments& a, const Item& item, int64_t q, const Space& space) {
    const int64_t group = a.heads / a.kv_heads, head = item.kv_head * group + q % group;
    const int64_t row = item.members ? item.members[q / group] : (item.row - a.rows) / ROW;
    return space.states + (row * a.heads + head) * state_size(a);
}

// Begins a query's sums, (width,): with what the runs before the item have left, or with nothing.
inline Marks begin(const Arguments& a, const Item& item, int64_t q, float* sums, int width,
                   const Space& space) {
    if (item.start == 0) {
        std::memset(sums, 0, sizeof(float) * width);
        return {LOWEST, 0};
    }
    const float* const state = state_of(a, item, q, space);
    std::memcpy(sums, state, sizeof(float) * width);
    return {state[width], state[width + 1]};
}

// Keeps a query's sums for what comes behind a run, or writes them out.
inline void finish(const Arguments& a, const Item& item, int64_t q, float* sums, int width,
                   Marks marks, const Space& space) {
    if (item.members) {
        float* const state = state_of(a, item, q, space);
        std::memcpy(state, sums, sizeof(float) * width);
        state[width] = marks.largest;
        state[width + 1] = marks.total;
        return;
    }
    const int64_t group = a.heads / a.kv_heads, head = item.kv_head * group + q % group;
    const auto power = [](float x) { return exp_of(Wide{} + x)[0]; };
    if (a.sinks) {
        const float most = a.sinks[head] > marks.largest ? a.sinks[head] : marks.largest;
        const float by = power(marks.largest - most);
        for (int64_t d = 0; d < width; d += WIDTH) put_wide(sums + d, wide_at(sums + d) * by);
        marks.total = marks.total * by + power(a.sinks[head] - most);
    }
    write_out(a, token_of(a, item, q / group), head, sums, marks.total);
}

}  // namespace

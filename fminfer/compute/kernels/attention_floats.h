// Attention in float32, whatever the types of queries and cache: numbers of 16 bits are widened.
//
// With few queries each key is multiplied lane by lane and summed. More lie side by side in the lanes
// of vectors, and every key is broadcast. As many sums as registers have room for are in them at a
// time. Either way a score is the sum of PARTS sums, each of every PARTS-th dimension.
#pragma once

#include "softmax.h"

namespace {

// Sums at a time, which leave registers for what is multiplied. Two sums a cycle, ready after
// four cycles, keep all units busy if there are eight.
constexpr int SUMS = REGISTERS / 2;
constexpr int PARTS = WIDTH < 8 ? WIDTH : 8;  // of a score

// sums[r][d ...] += scores[j][r] * values[j][d ...], R queries and V vectors of them at a time.
template <int R, int V, typename T>
inline void add_values(float* sums, const float* scores, int score_step, const T* values,
                       int width, int count) {
    Wide sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = wide_at(sums + r * width + v * WIDTH);
    for (int j = 0; j < count; j++) {
        Wide value[V];
        for (int v = 0; v < V; v++) value[v] = wide_at(values + j * width + v * WIDTH);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] += value[v] * scores[j * score_step + r];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) put_wide(sums + r * width + v * WIDTH, sum[r][v]);
}

// The same of all dimensions: V vectors of them at a time, then half as many.
template <int R, int V = R == 1 ? SUMS / 2 : SUMS / R, typename T>
inline void add_all_values(float* sums, const float* scores, int score_step, const T* values,
                           int width, int count, int d = 0) {
    for (; d + V * WIDTH <= width; d += V * WIDTH)
        add_values<R, V>(sums + d, scores, score_step, values + d, width, count);
    if constexpr (V > 1)
        add_all_values<R, V / 2>(sums, scores, score_step, values, width, count, d);
}

// Scores, (J, step), of J keys against V vectors of queries, (dim, step): products of a broadcast
// key with the queries' lanes.
template <int J, int V>
inline void score_some(const float* queries, int step, const float* keys, int width, int dim,
                       float* scores) {
    Wide score[J][V] = {};
    for (int part = 0; part < PARTS; part++) {
        Wide sum[J][V] = {};
        for (int d = part; d < dim; d += PARTS) {
            Wide query[V];
            UNROLLED for (int v = 0; v < V; v++) query[v] = wide_at(queries + d * step + v * WIDTH);
            UNROLLED for (int j = 0; j < J; j++)
                UNROLLED for (int v = 0; v < V; v++) sum[j][v] += query[v] * keys[j * width + d];
        }
        UNROLLED for (int j = 0; j < J; j++)
            UNROLLED for (int v = 0; v < V; v++) score[j][v] += sum[j][v];
    }
    UNROLLED for (int j = 0; j < J; j++)
        UNROLLED for (int v = 0; v < V; v++)
            put_wide(scores + j * step + v * WIDTH, score[j][v]);
}

// The same of any number of keys: J at a time, then half as many.
template <int J, int V>
inline void score_keys(const float* queries, int step, const float* keys, int width, int dim,
                       float* scores, int count) {
    int j = 0;
    for (; j + J <= count; j += J)
        score_some<J, V>(queries, step, keys + j * width, width, dim, scores + j * step);
    if constexpr (J > 1)
        score_keys<J / 2, V>(queries, step, keys + j * width, width, dim, scores + j * step,
                             count - j);
}

// The sums of four queries, `lane` and after, += weights times values of the keys that each sees.
// Those that all of them see are added for all at a time, in the same order as if they were alone.
template <int V>
void add_seen(const Arguments& a, const Softmax<V>& softmax, int lane, float* sums,
              const float* scores, const float* values, int width, int64_t start, int count) {
    constexpr int step = V * WIDTH;
    int first[4], end[4], first_of_all = 0, end_of_all = count;
    for (int i = 0; i < 4; i++) {
        first[i] = softmax.first_seen(a, lane + i, start, count);
        end[i] = softmax.end_seen(a, lane + i, start, count);
        first_of_all = first[i] > first_of_all ? first[i] : first_of_all;
        end_of_all = end[i] < end_of_all ? end[i] : end_of_all;
    }
    if (end_of_all < first_of_all) end_of_all = first_of_all;
    const auto add_alone = [&](int i, int from, int to) {
        if (from < to)
            add_all_values<1>(sums + i * width, scores + i + from * step, step,
                              values + from * width, width, to - from);
    };
    const auto lower = [](int x, int y) { return x < y ? x : y; };
    const auto higher = [](int x, int y) { return x > y ? x : y; };
    for (int i = 0; i < 4; i++) add_alone(i, first[i], lower(end[i], first_of_all));
    if (first_of_all < end_of_all)
        add_all_values<4>(sums, scores + first_of_all * step, step, values + first_of_all * width,
                          width, end_of_all - first_of_all);
    for (int i = 0; i < 4; i++) add_alone(i, higher(first[i], end_of_all), end[i]);
}

// Up to V * WIDTH queries, one a lane. T is the cache's type.
template <int V, typename T>
void attend_by_lanes(const Arguments& a, const Item& item, Space& space) {
    constexpr int step = V * WIDTH, S = V < 2 ? V : 2;  // vectors of queries at a time
    const int64_t group = a.heads / a.kv_heads;
    const int num = int(item.last - item.first), dim = int(a.head_dim);
    const int width = round_up(dim, LANES);
    Softmax<V> softmax(a, item);
    std::memset(space.queries, 0, sizeof(float) * dim * step);
    for (int lane = 0; lane < num; lane++) {
        const int64_t place = query_place(a, item, item.first + lane, group);
        for (int d = 0; d < dim; d++) space.queries[d * step + lane] = query_at(a, place + d);
    }
    std::memset(space.sums + num * width, 0, sizeof(float) * width * (round_up(num, 4) - num));
    for (int r = 0; r < num; r++)
        softmax.set_marks(
            r, begin(a, item, item.first + r, space.sums + r * width, width, space));
    const int64_t end = end_key(a, item, softmax.latest);
    for (int64_t b = first_key(a, item, softmax.earliest) / a.block_size; b * a.block_size < end;
         b++) {
        const int64_t block = a.tables[item.row[3] + b], start = b * a.block_size;
        const int64_t left = end - start;
        const int count = int(left < a.block_size ? left : a.block_size);
        const float* keys = read_floats(a, block_of<T>(a, a.keys, block, item.kv_head), count, width,
                                       space.keys);
        for (int lane = 0; lane < step; lane += S * WIDTH)
            score_keys<(SUMS / S < 8 ? SUMS / S : 8), S>(space.queries + lane, step, keys, width, dim,
                                    space.scores + lane, count);
        softmax.weigh(a, space.scores, start, count, space.sums, num, width);
        const float* values = read_floats(a, block_of<T>(a, a.values, block, item.kv_head), count,
                                         width, space.values);
        const bool is_masked = softmax.hides(a, start, count);
        for (int r = 0; r < num; r += 4)
            if (is_masked)
                add_seen<V>(a, softmax, r, space.sums + r * width, space.scores + r, values, width,
                            start, count);
            else
                add_all_values<4>(space.sums + r * width, space.scores + r, step, values, width,
                                  count);
    }
    for (int r = 0; r < num; r++)
        finish(a, item, item.first + r, space.sums + r * width, width, softmax.marks_of(r), space);
}

// Scores of up to WIDTH keys against one query.
template <typename T>
inline Wide score_alone(const float* query, const T* keys, int width, int count) {
    const T* key[WIDTH];
    for (int lane = 0; lane < WIDTH; lane++)  // those behind the last are the last again
        key[lane] = keys + (lane < count ? lane : count - 1) * width;
    Wide sums[PARTS];
    for (int i = 0; i < PARTS; i++) sums[i] = Wide{};
    for (int d = 0; d < width; d += PARTS) {
        const Wide numbers = halves_at(query + d, query + d);
        for (int i = 0; i < PARTS; i++)
            sums[i] += numbers * halves_at(key[i] + d, key[i + WIDTH - PARTS] + d);
    }
    return sums_of<PARTS>(sums);
}

// Fetches numbers that are read soon.
template <typename T>
inline void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

// One query. T is the cache's type.
template <typename T>
void attend_alone(const Arguments& a, const Item& item, int64_t q, Space& space) {
    const int64_t group = a.heads / a.kv_heads, place = query_place(a, item, q, group);
    const int dim = int(a.head_dim), width = round_up(dim, LANES);
    for (int d = 0; d < dim; d++) space.queries[d] = query_at(a, place + d);
    for (int d = dim; d < width; d++) space.queries[d] = 0;
    SoftmaxAlone softmax(a, item, q);
    softmax.marks = begin(a, item, q, space.sums, width, space);
    const int64_t first = first_key(a, item, softmax.position);
    const int64_t end = end_key(a, item, softmax.position);
    for (int64_t b = first / a.block_size; b * a.block_size < end; b++) {
        const int64_t block = a.tables[item.row[3] + b], start = b * a.block_size;
        const int64_t left = end - start;
        const int count = int(left < a.block_size ? left : a.block_size);
        const T* coming = block_of<T>(a, a.values, block, item.kv_head);
        fetch(coming, count * dim);
        const T* keys = read_block(a, block_of<T>(a, a.keys, block, item.kv_head), count, width,
                                   reinterpret_cast<T*>(space.keys));
        for (int j = 0; j < count; j += WIDTH)
            put_wide(space.scores + j,
                     score_alone(space.queries, keys + j * width, width, count - j));
        softmax.weigh(a, space.scores, start, count, space.sums, width);
        // Then comes the next block, or the first one of the next head.
        const bool is_last = start + a.block_size >= end;
        const int64_t next = is_last ? first / a.block_size : b + 1, head = item.kv_head + is_last;
        if (head < a.kv_heads)
            fetch(block_of<T>(a, a.keys, a.tables[item.row[3] + next], head), a.block_size * dim);
        const T* values = read_block(a, coming, count, width, reinterpret_cast<T*>(space.values));
        const int seen = first > start ? int(first - start) : 0;
        add_all_values<1>(space.sums, space.scores + seen, 1, values + seen * width, width,
                          count - seen);
    }
    finish(a, item, q, space.sums, width, softmax.marks, space);
}

}  // namespace

// Attention in bfloat16, where the processor multiplies pairs or tiles of it (halves.h). Sums are in
// float32; exponentials are rounded to bfloat16 before they weigh values, as transformers does.
#pragma once

#include "softmax.h"

namespace {

// Keys and values of bfloat16 that can be taken as they lie, in groups of GROUP_KEYS.
inline bool fits_halves(const Arguments& a) {
    return a.type == 1 && a.kv_type == 1 && a.head_dim % (2 * LANES) == 0 && a.block_size % GROUP_KEYS == 0;
}

// Where a row's keys and values at `start` and after lie, group by group.
struct Piece {
    const uint16_t *keys[PIECE_KEYS / GROUP_KEYS] = {}, *values[PIECE_KEYS / GROUP_KEYS] = {};
    int count = 0;

    Piece(const Arguments& a, const Item& item, int64_t start, int64_t end) {
        count = int(piece_end(start, end) - start);
        for (int g = 0; g * GROUP_KEYS < count; g++, start += GROUP_KEYS) {
            const int64_t block = a.tables[item.row[3] + start / a.block_size];
            const int64_t place = start % a.block_size * a.head_dim;
            keys[g] = block_of<uint16_t>(a, a.keys, block, item.kv_head) + place;
            values[g] = block_of<uint16_t>(a, a.values, block, item.kv_head) + place;
        }
    }
};

#ifdef HAS_PAIRS

constexpr float TO_POWERS = 1.44269504f;  // log2(e)

// Whether a value of keys [start, end) is infinite or nan.
bool has_odd_value(const Arguments& a, const Item& item, int64_t start, int64_t end) {
    const int dim = int(a.head_dim);
    for (; start < end; start++) {
        const int64_t block = a.tables[item.row[3] + start / a.block_size];
        const uint16_t* value =
            block_of<uint16_t>(a, a.values, block, item.kv_head) + start % a.block_size * dim;
        int is_odd = 0;
        for (int d = 0; d < dim; d++) is_odd |= (value[d] & 0x7F80) == 0x7F80;
        if (is_odd) return true;
    }
    return false;
}

// Whether one of the values that are multiplied with a weight of 0 is infinite or nan.
bool hides_odd_value(const Arguments& a, const Item& item) {
    if (item.members) return false;  // they see all
    const int64_t group = a.heads / a.kv_heads;
    const int64_t earliest = position_of(a, item, item.first / group);
    const int64_t latest = position_of(a, item, (item.last - 1) / group);
    const int64_t first = first_key(a, item, earliest) / GROUP_KEYS * GROUP_KEYS;
    for (int64_t h = 0; h < item.heads; h++) {
        const Item of_head = head_of(item, h);
        const int64_t seen = end_key(a, of_head, earliest);
        if (has_odd_value(a, of_head, seen, end_key(a, of_head, latest))) return true;
        if (a.window > 0 && has_odd_value(a, of_head, first, latest - a.window + 1)) return true;
    }
    return false;
}

// The next 4 pairs of four keys.
inline __m512i four_keys_at(const uint16_t* keys, int step) {
    const auto part = [&](int key) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + key * step));
    };
    __m512i four = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(1), 1);
    four = _mm512_inserti32x4(four, part(2), 2);
    return _mm512_inserti32x4(four, part(3), 3);
}

// The scores of 16 keys with Q queries, PIECE_KEYS apart. Those behind the last key are not used.
template <int Q>
inline void score_pairs(const uint16_t* const* queries, const uint16_t* keys, int dim,
                        float* scores) {
    Wide sums[Q][PAIR_PARTS] = {};  // of keys i, i + 4, i + 8 and i + 12
    for (int d = 0; d < dim; d += 2 * PAIR_PARTS) {
        __m512i query[Q];
        UNROLLED for (int q = 0; q < Q; q++)
            query[q] = _mm512_broadcast_i32x4(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(queries[q] + d)));
        UNROLLED for (int i = 0; i < PAIR_PARTS; i++) {
            const __m512i four = four_keys_at(keys + i * dim + d, PAIR_PARTS * dim);
            UNROLLED for (int q = 0; q < Q; q++)
                sums[q][i] = add_products(sums[q][i], query[q], four);
        }
    }
    for (int q = 0; q < Q; q++)
        store(scores + q * PIECE_KEYS, sums_of<PAIR_PARTS>(sums[q]));
}

// The same of any number of queries. As much as the keys is fetched at `next`.
inline void score_few(const uint16_t* const* queries, int num, const uint16_t* keys, int dim,
                      float* scores, const uint16_t* next) {
    for (int i = 0; i < LANES * dim; i += 2 * LANES) fetch(next + i);
    for (; num >= 4; num -= 4, queries += 4, scores += 4 * PIECE_KEYS)
        score_pairs<4>(queries, keys, dim, scores);
    if (num == 3) score_pairs<3>(queries, keys, dim, scores);
    if (num == 2) score_pairs<2>(queries, keys, dim, scores);
    if (num == 1) score_pairs<1>(queries, keys, dim, scores);
}

// Turns one query's scores into rounded weights, as `weigh_tile` does, and adds them up.
inline void weigh_alone(const Arguments& a, SoftmaxAlone& softmax, const float* scores, int count,
                        uint16_t* weights) {
    const float scaling = scaling_left(a) * TO_POWERS;
    const Vec most = all(softmax.marks.largest) * TO_POWERS;
    for (int j = 0; j < count; j += LANES) {
        const Vec score = load(scores + j), weight = power_of_two(score * scaling - most);
        const Vec seen = score == all(LOWEST) ? Vec{} : weight;
        softmax.marks.total += sum_of(seen);
        put_halves(weights + j, seen);
    }
}

// Few queries of each of several heads, all in bfloat16. The heads' keys in a block lie one behind
// the other, as do their values, so that a block is read from one end to the other. What comes next
// is fetched meanwhile.
void attend_few_in_pairs(const Arguments& a, const Item& item, Space& space) {
    const int64_t group = a.heads / a.kv_heads;
    const int dim = int(a.head_dim);
    const int heads = int(item.heads), num = int(item.last - item.first);
    const int64_t head_size = a.block_size * dim;
    SoftmaxAlone softmax[MOST_QUERIES];
    const uint16_t* query[MOST_QUERIES];
    int64_t earliest = INT64_MAX, latest = 0;
    for (int r = 0; r < heads * num; r++) {
        const Item of_head = head_of(item, r / num);
        const int64_t q = item.first + r % num;
        softmax[r] = SoftmaxAlone(a, of_head, q);
        softmax[r].marks = begin(a, of_head, q, space.sums + r * dim, dim, space);
        query[r] = static_cast<const uint16_t*>(a.query) + query_place(a, of_head, q, group);
        earliest = softmax[r].position < earliest ? softmax[r].position : earliest;
        latest = softmax[r].position > latest ? softmax[r].position : latest;
    }
    const int64_t end = end_key(a, item, latest), first = first_key(a, item, earliest);
    int64_t next_start;
    for (int64_t start = first / GROUP_KEYS * GROUP_KEYS; start < end; start = next_start) {
        next_start = piece_end(start, end);
        const Piece piece(a, item, start, end);
        const int chunks = round_up(piece.count, GROUP_KEYS) / GROUP_KEYS * heads;
        const auto chunk = [&](int i) {
            const int g = i / heads, h = i % heads;
            return i < chunks ? piece.keys[g] + h * head_size
                              : piece.values[g - chunks / heads] + h * head_size;
        };
        for (int i = 0; i < chunks; i++) {
            const int j = i / heads * GROUP_KEYS, h = i % heads;
            const int left = piece.count - j, count = left < GROUP_KEYS ? left : GROUP_KEYS;
            const uint16_t *keys = chunk(i), *next = chunk(i + 1);  // behind the last key: a value
            for (int k = 0; k < count; k += LANES)
                score_few(query + h * num, num, keys + k * dim, dim,
                          space.scores + h * num * PIECE_KEYS + j + k, next + k * dim);
        }
        for (int r = 0; r < heads * num; r++) {
            float* scores = space.scores + r * PIECE_KEYS;
            softmax[r].measure(a, scores, start, piece.count, space.sums + r * dim, dim);
            weigh_alone(a, softmax[r], scores, piece.count, space.weight_tiles + r * PIECE_KEYS);
        }
        for (int i = 0; i < chunks; i++) {
            const int j = i / heads * GROUP_KEYS, h = i % heads;
            const int left = piece.count - j, count = left < GROUP_KEYS ? left : GROUP_KEYS;
            const int seen = first > start + j ? int(first - start - j) : 0;
            const uint16_t* values = chunk(chunks + i);
            const uint16_t* next = i + 1 < chunks ? chunk(chunks + i + 1) : values;
            for (int r = h * num; r < (h + 1) * num; r++) {
                const uint16_t* weights = space.weight_tiles + r * PIECE_KEYS + j;
                float* sums = space.sums + r * dim;
                int d = 0;
                for (; d + 4 * LANES <= dim; d += 4 * LANES)
                    add_pairs<2>(sums + d, weights, values + d, dim, seen, count, next + d);
                for (; d < dim; d += 2 * LANES)
                    add_pairs<1>(sums + d, weights, values + d, dim, seen, count, next + d);
            }
        }
    }
    for (int r = 0; r < heads * num; r++) {
        if (!item.members) order_sums(space.sums + r * dim, dim);
        finish(a, head_of(item, r / num), item.first + r % num, space.sums + r * dim, dim,
               softmax[r].marks, space);
    }
}

// Makes a tile of the weights of 16 queries and up to GROUP_KEYS keys, and adds them to `total`.
// The scores, `step` apart, and `most` are to be multiplied to become powers of 2.
template <bool IS_MASKED>
inline void weigh_tile(const float* scores, int step, int count, float scaling, Vec most,
                       uint16_t* tile, Vec& total) {
    UVec pairs[PAIRS];
    for (int first = 0; first < GROUP_KEYS; first += LANES) {
        Vec weights[LANES];
        total += tree_of([&](int j) {
            if (first + j >= count) return weights[j] = Vec{};
            const Vec score = load(scores + (first + j) * step);
            const Vec weight = power_of_two(score * scaling - most);
            if (!IS_MASKED) return weights[j] = weight;
            return weights[j] = score == all(LOWEST) ? Vec{} : weight;
        });
        for (int p = 0; p < LANES / 2; p++)
            pairs[first / 2 + p] = pairs_of(weights[2 * p], weights[2 * p + 1]);
    }
    transpose(pairs);
    std::memcpy(tile, pairs, sizeof pairs);
}

// Makes a tile of weights for each 16 queries and GROUP_KEYS keys of the scores of a piece, 0
// behind its end, and brings what was summed before to the same measure.
template <int N>
void weigh_tiles(const Arguments& a, Softmax<N>& softmax, float* scores, int64_t start, int count,
                 float* sums, int num, uint16_t* tiles) {
    const bool is_masked = softmax.hides(a, start, count);
    const float scaling = scaling_left(a) * TO_POWERS;
    softmax.measure(a, scores, start, count, sums, num, int(a.head_dim));
    for (int j = 0; j < count; j += GROUP_KEYS, scores += GROUP_KEYS * N * LANES)
        for (int n = 0; n < N; n++, tiles += TILE) {
            const Vec most = softmax.largest[n] * TO_POWERS;
            const float* from = scores + n * LANES;
            Vec& total = softmax.total[n];
            if (is_masked)
                weigh_tile<true>(from, N * LANES, count - j, scaling, most, tiles, total);
            else if (count - j >= GROUP_KEYS)  // a number that the compiler knows
                weigh_tile<false>(from, N * LANES, GROUP_KEYS, scaling, most, tiles, total);
            else
                weigh_tile<false>(from, N * LANES, count - j, scaling, most, tiles, total);
        }
}

// Up to N * LANES queries, one a lane.
template <typename Products, int N>
void attend_in_tiles(const Arguments& a, const Item& item, Space& space) {
    const int64_t group = a.heads / a.kv_heads;
    const int num = int(item.last - item.first), dim = int(a.head_dim);
    const uint16_t* query = static_cast<const uint16_t*>(a.query);
    Softmax<N> softmax(a, item);
    Products::begin();
    int64_t places[N * LANES];
    for (int lane = 0; lane < num; lane++)
        places[lane] = query_place(a, item, item.first + lane, group);
    uint16_t* tiles = space.query_tiles;
    for (int d = 0; d < dim; d += 2 * PAIRS)
        for (int n = 0; n < N; n++, tiles += TILE) {
            UVec pairs[LANES] = {};
            for (int lane = 0; lane < LANES && n * LANES + lane < num; lane++)
                std::memcpy(pairs + lane, query + places[n * LANES + lane] + d, sizeof *pairs);
            transpose(pairs);
            std::memcpy(tiles, pairs, sizeof pairs);
        }
    std::memset(space.sums + num * dim, 0, sizeof(float) * dim * (N * LANES - num));
    for (int r = 0; r < num; r++)
        softmax.set_marks(r, begin(a, item, item.first + r, space.sums + r * dim, dim, space));
    const int64_t end = end_key(a, item, softmax.latest);
    int64_t next;
    int64_t first = first_key(a, item, softmax.earliest) / GROUP_KEYS * GROUP_KEYS;
    for (int64_t start = first; start < end; start = next) {
        next = piece_end(start, end);
        const Piece piece(a, item, start, end);
        for (int g = 0; g * GROUP_KEYS < piece.count; g++)
            Products::template score<N>(space.query_tiles, piece.keys[g], dim,
                                       space.scores + g * GROUP_KEYS * N * LANES);
        weigh_tiles<N>(a, softmax, space.scores, start, piece.count, space.sums, num,
                       space.weight_tiles);
        Products::template add<N>(space.sums, num, space.weight_tiles, piece.values, piece.count,
                                 dim, space.value_tiles);
    }
    Products::end();
    for (int r = 0; r < num; r++) {
        if (!item.members) order_sums(space.sums + r * dim, dim);
        finish(a, item, item.first + r, space.sums + r * dim, dim, softmax.marks_of(r), space);
    }
}

#endif

}  // namespace

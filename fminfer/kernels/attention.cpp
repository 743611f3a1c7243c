// Attention of packed rows over the paged KV cache, on the CPU; fminfer/kernel_build.py builds it.
//
// The step's new keys and values are put into their blocks first. Then each row's queries attend to
// the row's keys up to their own position. Work is cut into items: one row, one KV head, and up to
// 32 of its queries (tokens times the heads that share the KV head). An item goes over the row's
// blocks once and keeps the largest score and the sum of exponentials of each query as it goes
// (Milakov and Gimelshein 2018, the "online softmax"; Dao et al. 2022). Items of one KV head follow
// one another, so that what rows share is read from the cache nearby. Items of few queries have
// several KV heads, whose keys in a block lie one behind the other: they are read in that order.
//
// Rows of one token that begin with the same blocks, a run, attend to those together: an item is
// then up to 32 queries of several rows. What it found is kept and put together with what each
// row's own item finds (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, cascade inference).
//
// Three bodies. With one to three queries each key is multiplied lane by lane and summed. More lie
// side by side in the lanes of vectors: then every key is broadcast, or, in bfloat16 on processors
// that can, tiles of keys and queries are multiplied (halves.h). Scores, exponentials and sums are
// in float32; tiles round exponentials to bfloat16 before they weigh values, as transformers does.
// What lies behind a row's end may be nan and never reaches a sum. Neither do values that a query
// must not see, of later tokens or from before its window: their weight is 0, but 0 times nan is nan.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "calls.h"
#include "halves.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int MOST_QUERIES = 2 * LANES;
constexpr int MOST_ALONE = 3;  // queries of a head that are multiplied one after another
constexpr int ROW = 7;         // numbers that tell of a row
constexpr float LOWEST = -3.0e38f;
inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

inline Vec tanh_of(Vec x) {
    const Vec is_negative = x < Vec{} ? all(-1.0f) : all(1.0f);
    const Vec e = exp_of(-2.0f * x * is_negative);
    return is_negative * (1.0f - e) / (1.0f + e);
}

// Lane j of the result is the sum of sums[j]'s lanes: 16 sums in four rounds, each halving them.
inline Vec sums_of(Vec* sums) {
    for (int i = 0; i < 8; i++) {
        const Vec a = sums[i], b = sums[i + 8];
        sums[i] = LANES_OF(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  LANES_OF(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) {
        const Vec a = sums[i], b = sums[i + 4];
        sums[i] = LANES_OF(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                  LANES_OF(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        const Vec a = sums[i], b = sums[i + 2];
        sums[i] = LANES_OF(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  LANES_OF(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    const Vec a = sums[0], b = sums[1];
    return LANES_OF(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           LANES_OF(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

inline float from_float16(uint16_t bits) {
    // The exponent is moved by a product, which gets subnormal numbers right as well.
    uint32_t wide = uint32_t(bits & 0x7FFF) << 13;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    value *= 0x1p112f;
    std::memcpy(&wide, &value, sizeof value);
    wide |= (bits & 0x7C00) == 0x7C00 ? 0x7F800000u : 0u;  // infinite and nan stay so
    wide |= uint32_t(bits & 0x8000) << 16;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline float largest_of(Vec value) {
    float most = value[0];
    for (int lane = 1; lane < LANES; lane++) most = value[lane] > most ? value[lane] : most;
    return most;
}

// What one thread works in.
struct Space {
    float *queries, *sums, *scores, *keys, *values;
    uint16_t *query_tiles, *weight_tiles, *value_tiles;
    float* found;  // of all threads: (members, heads, found_size) of runs, or null
    void* memory;

    Space(const Arguments& a, float* found) : found(found) {
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
        if (memory == nullptr) return;
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

// What is kept of a member's head: sums, then the largest score and the total.
inline int64_t found_size(const Arguments& a) { return round_up(int(a.head_dim), LANES) + LANES; }

inline int64_t token_of(const Arguments& a, const Item& item, int64_t place) {
    return item.members ? a.rows[item.members[place] * ROW] : item.row[0] + place;
}

inline int64_t position_of(const Arguments& a, const Item& item, int64_t place) {
    return item.members ? a.rows[item.members[place] * ROW + 2] : item.row[2] + place;
}

// Keys or values of a block and KV head, (block_size, head_dim), of `type`.
inline const void* block_of(const Arguments& a, const void* cache, int64_t block,
                            int64_t kv_head) {
    const int64_t size = a.block_size * a.head_dim * (a.type == 0 ? 4 : 2);
    return static_cast<const char*>(cache) + (block * a.kv_heads + kv_head) * size;
}

// `count` keys or values of a block as (count, width), in place where they are so.
const float* read_block(const Arguments& a, const void* block, int count, int width,
                        float* space) {
    const int dim = int(a.head_dim);
    if (a.type == 0) {
        const float* from = static_cast<const float*>(block);
        if (dim == width) return from;
        for (int j = 0; j < count; j++)
            std::memcpy(space + j * width, from + j * dim, dim * sizeof(float));
        return space;
    }
    const uint16_t* from = static_cast<const uint16_t*>(block);
    for (int j = 0; j < count; j++)
        for (int d = 0; d < dim; d++) {
            const uint16_t bits = from[j * dim + d];
            space[j * width + d] = a.type == 1 ? from_bfloat16(bits) : from_float16(bits);
        }
    return space;
}

// The same of bfloat16.
const uint16_t* read_block(const Arguments& a, const void* block, int count, int width,
                           uint16_t* space) {
    const int dim = int(a.head_dim);
    const uint16_t* from = static_cast<const uint16_t*>(block);
    if (dim == width) return from;
    for (int j = 0; j < count; j++) {
        std::memcpy(space + j * width, from + j * dim, dim * sizeof(uint16_t));
        std::memset(space + j * width + dim, 0, (width - dim) * sizeof(uint16_t));
    }
    return space;
}

// sums[r][d ...] += scores[j][r] * values[j][d ...], R queries and N vectors of them at a time.
template <int R, int N, typename T>
inline void add_values(float* sums, const float* scores, int score_step, const T* values,
                       int width, int count) {
    Vec sum[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = load(sums + r * width + n * LANES);
    for (int j = 0; j < count; j++) {
        Vec value[N];
        for (int n = 0; n < N; n++) value[n] = load(values + j * width + n * LANES);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] += value[n] * scores[j * score_step + r];
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(sums + r * width + n * LANES, sum[r][n]);
}

template <int R, typename T>
inline void add_all_values(float* sums, const float* scores, int score_step, const T* values,
                           int width, int count) {
    int d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
        add_values<R, 4>(sums + d, scores, score_step, values + d, width, count);
    for (; d < width; d += LANES)
        add_values<R, 1>(sums + d, scores, score_step, values + d, width, count);
}

// Scores of J keys against all queries: products of a broadcast key with the queries' lanes.
template <int J, int N>
inline void score_keys(const float* queries, const float* keys, int width, int dim, float* scores) {
    Vec score[J][N];
    for (int j = 0; j < J; j++)
        for (int n = 0; n < N; n++) score[j][n] = Vec{};
    for (int d = 0; d < dim; d++) {
        Vec query[N];
        for (int n = 0; n < N; n++) query[n] = load(queries + (d * N + n) * LANES);
        for (int j = 0; j < J; j++)
            for (int n = 0; n < N; n++) score[j][n] += query[n] * keys[j * width + d];
    }
    for (int j = 0; j < J; j++)
        for (int n = 0; n < N; n++) store(scores + (j * N + n) * LANES, score[j][n]);
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
inline void write_out(const Arguments& a, int64_t token, int64_t head, const float* sums,
                      float total) {
    const int64_t place = (token * a.heads + head) * a.head_dim, dim = a.head_dim;
    if (a.type == 1) {
        uint16_t* out = static_cast<uint16_t*>(a.out) + place;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(out + d, load(sums + d) / total);
        if (d < dim) {
            const Half bits = to_bfloat16(load(sums + d) / total);
            std::memcpy(out + d, &bits, (dim - d) * sizeof(uint16_t));
        }
    } else {
        float* out = static_cast<float*>(a.out) + place;
        for (int64_t d = 0; d < dim; d++) out[d] = sums[d] / total;
    }
}

// Of a run keeps what an item found of a query. Of a row writes it out, together with what was
// found of the runs that the row is in.
void finish(const Arguments& a, const Item& item, int64_t q, float* sums, float largest,
            float total, const Space& space) {
    const int64_t group = a.heads / a.kv_heads, head = item.kv_head * group + q % group;
    const int64_t size = found_size(a), width = size - LANES;
    const auto place_of = [&](int64_t member) {
        return space.found + (member * a.heads + head) * size;
    };
    if (item.members) {
        float* to = place_of(item.members - a.members + q / group);
        std::memcpy(to, sums, sizeof(float) * width);
        to[width] = largest;
        to[width + 1] = total;
        return;
    }
    if (space.found)
        for (int64_t i = 0; i < item.row[5]; i++) {
            const float* other = place_of(a.entries[item.row[4] + i]);
            const float most = other[width] > largest ? other[width] : largest;
            const float by = exp_of(all(largest - most))[0];
            const float of_other = exp_of(all(other[width] - most))[0];
            for (int64_t d = 0; d < width; d += LANES)
                store(sums + d, load(sums + d) * by + load(other + d) * of_other);
            total = total * by + other[width + 1] * of_other;
            largest = most;
        }
    write_out(a, token_of(a, item, q / group), head, sums, total);
}

// The first key that an item looks at.
inline int64_t first_key(const Arguments& a, const Item& item, int64_t position) {
    const int64_t seen = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
    return seen > item.start ? seen : item.start;
}

// Behind the last key that it looks at.
inline int64_t end_key(const Item& item, int64_t position) {
    return position < item.end ? position + 1 : item.end;
}

// The softmax of up to N * LANES queries, one a lane, over keys that come in pieces.
template <int N>
struct Softmax {
    Vec largest[N], total[N], slope[N];
    IVec position[N];
    int64_t earliest, latest;  // of the positions

    Softmax(const Arguments& a, const Item& item) {
        const int64_t group = a.heads / a.kv_heads, last = item.last - 1;
        earliest = latest = position_of(a, item, item.first / group);
        for (int lane = 0; lane < N * LANES; lane++) {
            const int64_t q = item.first + lane < last ? item.first + lane : last;
            const int64_t here = position_of(a, item, q / group);
            earliest = here < earliest ? here : earliest;
            latest = here > latest ? here : latest;
            position[lane / LANES][lane % LANES] = int32_t(here);
            slope[lane / LANES][lane % LANES] =
                a.slopes ? a.slopes[item.kv_head * group + q % group] : 0;
        }
        for (int n = 0; n < N; n++) {
            largest[n] = all(LOWEST);
            total[n] = Vec{};
        }
    }

    // Of keys at `start` and after: whether a query does not see all of them.
    bool hides(const Arguments& a, int64_t start, int count) const {
        return start + count - 1 > earliest || (a.window > 0 && latest - start >= a.window);
    }

    // Of `count` keys at `start` and after: the first one that a query sees, and the end of them.
    int first_seen(const Arguments& a, int lane, int64_t start, int count) const {
        const int64_t place = position[lane / LANES][lane % LANES] - a.window + 1 - start;
        return a.window <= 0 || place <= 0 ? 0 : place < count ? int(place) : count;
    }
    int end_seen(int lane, int64_t start, int count) const {
        const int64_t place = position[lane / LANES][lane % LANES] + 1 - start;
        return place >= count ? count : place > 0 ? int(place) : 0;
    }

    // Bends the scores, (count, N * LANES), of keys at `start` and after if need be, and brings
    // what was summed before, (num, width), to the measure of their largest. Returns what they
    // are still to be multiplied by. Hidden ones are LOWEST.
    float measure(const Arguments& a, float* scores, int64_t start, int count, float* sums, int num,
                  int width) {
        const bool is_masked = hides(a, start, count);
        const bool is_plain = !is_masked && !a.slopes && a.softcap <= 0 && a.scaling > 0;
        const float scaling = is_plain ? a.scaling : 1.0f;
        for (int n = 0; n < N; n++, scores += LANES) {
            if (!is_plain) bend(a, scores, start, count, n, is_masked);
            Vec most = all(LOWEST);
            for (int j = 0; j < count; j++) {
                const Vec score = load(scores + j * N * LANES);
                most = score > most ? score : most;
            }
            most = most * scaling > largest[n] ? most * scaling : largest[n];
            const Vec factor = exp_of(largest[n] - most);
            float factors[LANES];
            store(factors, factor);
            for (int lane = 0; lane < LANES && n * LANES + lane < num; lane++)
                if (factors[lane] != 1.0f) {
                    float* row = sums + (n * LANES + lane) * width;
                    for (int d = 0; d < width; d += LANES)
                        store(row + d, load(row + d) * factors[lane]);
                }
            largest[n] = most;
            total[n] *= factor;
        }
        return scaling;
    }

    // Turns the scores into weights, and all else as `measure` does.
    void weigh(const Arguments& a, float* scores, int64_t start, int count, float* sums, int num,
               int width) {
        const float scaling = measure(a, scores, start, count, sums, num, width);
        const bool is_masked = hides(a, start, count);
        for (int n = 0; n < N; n++)
            for (int j = 0; j < count; j++) {
                float* place = scores + (j * N + n) * LANES;
                const Vec score = load(place);
                Vec weight = exp_of(score * scaling - largest[n]);
                if (is_masked) weight = score == all(LOWEST) ? Vec{} : weight;
                store(place, weight);
                total[n] += weight;
            }
    }

    // All that can happen to a score before its exponential.
    void bend(const Arguments& a, float* scores, int64_t start, int count, int n, bool is_masked) {
        for (int j = 0; j < count; j++) {
            float* place = scores + j * N * LANES;
            Vec score = load(place) * a.scaling;
            const IVec distance = position[n] - int32_t(start + j);
            if (a.softcap > 0) score = a.softcap * tanh_of(score / a.softcap);
            if (a.slopes) score -= slope[n] * __builtin_convertvector(distance, Vec);
            if (is_masked) {
                score = distance < 0 ? all(LOWEST) : score;
                if (a.window > 0) score = distance >= int32_t(a.window) ? all(LOWEST) : score;
            }
            store(place, score);
        }
    }
};

// The sums of four queries, `lane` and after, += weights times values of the keys that each sees.
// Those that all of them see are added for all at a time, in the same order as if they were alone.
template <int N>
void add_seen(const Arguments& a, const Softmax<N>& softmax, int lane, float* sums,
              const float* scores, const float* values, int width, int64_t start, int count) {
    constexpr int step = N * LANES;
    int first[4], end[4], first_of_all = 0, end_of_all = count;
    for (int i = 0; i < 4; i++) {
        first[i] = softmax.first_seen(a, lane + i, start, count);
        end[i] = softmax.end_seen(lane + i, start, count);
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

// Up to N * LANES queries, one a lane.
template <int N>
void attend_by_lanes(const Arguments& a, const Item& item, Space& space) {
    const int64_t group = a.heads / a.kv_heads;
    const int num = int(item.last - item.first), dim = int(a.head_dim);
    const int width = round_up(dim, LANES), step = N * LANES;
    Softmax<N> softmax(a, item);
    std::memset(space.queries, 0, sizeof(float) * dim * step);
    for (int lane = 0; lane < num; lane++) {
        const int64_t place = query_place(a, item, item.first + lane, group);
        for (int d = 0; d < dim; d++) space.queries[d * step + lane] = query_at(a, place + d);
    }
    std::memset(space.sums, 0, sizeof(float) * width * round_up(num, 4));
    const int64_t end = end_key(item, softmax.latest);
    for (int64_t b = first_key(a, item, softmax.earliest) / a.block_size; b * a.block_size < end;
         b++) {
        const int64_t block = a.blocks[item.row[3] + b], start = b * a.block_size;
        const int64_t left = end - start;
        const int count = int(left < a.block_size ? left : a.block_size);
        const float* keys = read_block(a, block_of(a, a.keys, block, item.kv_head), count, width,
                                       space.keys);
        int j = 0;
        for (; j + 4 <= count; j += 4)
            score_keys<4, N>(space.queries, keys + j * width, width, dim, space.scores + j * step);
        for (; j < count; j++)
            score_keys<1, N>(space.queries, keys + j * width, width, dim, space.scores + j * step);
        softmax.weigh(a, space.scores, start, count, space.sums, num, width);
        const float* values = read_block(a, block_of(a, a.values, block, item.kv_head), count,
                                         width, space.values);
        const bool is_masked = softmax.hides(a, start, count);
        for (int r = 0; r < num; r += 4)
            if (is_masked)
                add_seen<N>(a, softmax, r, space.sums + r * width, space.scores + r, values, width,
                            start, count);
            else
                add_all_values<4>(space.sums + r * width, space.scores + r, step, values, width,
                                  count);
    }
    for (int r = 0; r < num; r++)
        finish(a, item, item.first + r, space.sums + r * width,
               softmax.largest[r / LANES][r % LANES], softmax.total[r / LANES][r % LANES], space);
}

// The softmax of one query, with keys in its lanes.
struct SoftmaxAlone {
    float largest = LOWEST, slope;
    Vec total = {};
    int64_t position;

    SoftmaxAlone() = default;
    SoftmaxAlone(const Arguments& a, const Item& item, int64_t q) {
        const int64_t group = a.heads / a.kv_heads;
        position = position_of(a, item, q / group);
        slope = a.slopes ? a.slopes[item.kv_head * group + q % group] : 0;
    }

    // Turns the scores of `count` keys at `start` and after into weights, 0 up to whole lanes, and
    // brings what was summed before, (width,), to the same measure.
    void weigh(const Arguments& a, float* scores, int64_t start, int count, float* sums,
               int width) {
        const int padded = round_up(count, LANES);
        const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Vec highest = all(largest);
        for (int j = 0; j < padded; j += LANES) {
            Vec score = load(scores + j) * a.scaling;
            const IVec distance = int32_t(position - start - j) - lanes;
            if (a.softcap > 0) score = a.softcap * tanh_of(score / a.softcap);
            if (a.slopes) score -= slope * __builtin_convertvector(distance, Vec);
            score = distance < 0 ? all(LOWEST) : score;
            if (j + LANES > count) score = lanes >= count - j ? all(LOWEST) : score;
            if (a.window > 0) score = distance >= int32_t(a.window) ? all(LOWEST) : score;
            store(scores + j, score);
            highest = score > highest ? score : highest;
        }
        const float most = largest_of(highest);
        const float factor = exp_of(all(largest - most))[0];
        total *= factor;
        if (factor != 1.0f)
            for (int d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * factor);
        for (int j = 0; j < padded; j += LANES) {
            const Vec score = load(scores + j);
            const Vec weight = score == all(LOWEST) ? Vec{} : exp_of(score - most);
            store(scores + j, weight);
            total += weight;
        }
        largest = most;
    }

    float sum() const {
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += total[lane];
        return sum;
    }
};

// One query. T is what keys and values are read as.
template <typename T>
void attend_alone(const Arguments& a, const Item& item, int64_t q, Space& space) {
    const int64_t group = a.heads / a.kv_heads, place = query_place(a, item, q, group);
    const int dim = int(a.head_dim), width = round_up(dim, LANES);
    for (int d = 0; d < dim; d++) space.queries[d] = query_at(a, place + d);
    for (int d = dim; d < width; d++) space.queries[d] = 0;
    std::memset(space.sums, 0, sizeof(float) * width);
    SoftmaxAlone softmax(a, item, q);
    const int64_t first = first_key(a, item, softmax.position);
    const int64_t end = end_key(item, softmax.position);
    for (int64_t b = first / a.block_size; b * a.block_size < end; b++) {
        const int64_t block = a.blocks[item.row[3] + b], start = b * a.block_size;
        const int64_t left = end - start;
        const int count = int(left < a.block_size ? left : a.block_size);
        const T* keys = read_block(a, block_of(a, a.keys, block, item.kv_head), count, width,
                                   reinterpret_cast<T*>(space.keys));
        for (int j = 0; j < count; j += LANES) {
            Vec sums[LANES] = {};
            for (int lane = 0; lane < LANES && j + lane < count; lane++)
                for (int d = 0; d < width; d += LANES)
                    sums[lane] += load(space.queries + d) * load(keys + (j + lane) * width + d);
            store(space.scores + j, sums_of(sums));
        }
        softmax.weigh(a, space.scores, start, count, space.sums, width);
        const T* values = read_block(a, block_of(a, a.values, block, item.kv_head), count, width,
                                     reinterpret_cast<T*>(space.values));
        const int seen = first > start ? int(first - start) : 0;
        add_all_values<1>(space.sums, space.scores + seen, 1, values + seen * width, width,
                          count - seen);
    }
    finish(a, item, q, space.sums, softmax.largest, softmax.sum(), space);
}

// Keys and values of bfloat16 that can be taken as they lie, in groups of GROUP_KEYS.
inline bool fits_halves(const Arguments& a) {
    return a.type == 1 && a.head_dim % (2 * LANES) == 0 && a.block_size % GROUP_KEYS == 0;
}

// Where a row's keys and values at `start` and after lie, group by group.
struct Piece {
    const uint16_t *keys[PIECE_KEYS / GROUP_KEYS] = {}, *values[PIECE_KEYS / GROUP_KEYS] = {};
    int count = 0;

    Piece(const Arguments& a, const Item& item, int64_t start, int64_t end) {
        count = int(end - start < PIECE_KEYS ? end - start : PIECE_KEYS);
        for (int g = 0; g * GROUP_KEYS < count; g++, start += GROUP_KEYS) {
            const int64_t block = a.blocks[item.row[3] + start / a.block_size];
            const int64_t place = start % a.block_size * a.head_dim;
            const void* of_keys = block_of(a, a.keys, block, item.kv_head);
            const void* of_values = block_of(a, a.values, block, item.kv_head);
            keys[g] = static_cast<const uint16_t*>(of_keys) + place;
            values[g] = static_cast<const uint16_t*>(of_values) + place;
        }
    }
};

#ifdef HAS_PAIRS

// Whether a value of keys [start, end) is infinite or nan.
bool has_odd_value(const Arguments& a, const Item& item, int64_t start, int64_t end) {
    const int dim = int(a.head_dim);
    for (; start < end; start++) {
        const int64_t block = a.blocks[item.row[3] + start / a.block_size];
        const uint16_t* value =
            static_cast<const uint16_t*>(block_of(a, a.values, block, item.kv_head)) +
            start % a.block_size * dim;
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
        if (has_odd_value(a, of_head, earliest + 1, latest + 1)) return true;
        if (a.window > 0 && has_odd_value(a, of_head, first, latest - a.window + 1)) return true;
    }
    return false;
}

// The scores of 16 keys, of which those behind the last are not used; as much is fetched at `next`.
template <int DIM>
inline void score_pairs(const uint16_t* query, const uint16_t* keys, int dim, float* scores,
                        const uint16_t* next) {
    Vec sums[LANES] = {};
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++)
        for (int d = 0; d < (DIM ? DIM : dim); d += 2 * LANES) {
            const int place = lane * dim + d;
            sums[lane] = add_products(sums[lane], bits_at(query + d), bits_at(keys + place));
            fetch(next + place);
        }
    store(scores, sums_of(sums));
}

// Few queries of each of several heads, all in bfloat16. The heads' keys in a block lie one behind
// the other, as do their values, so that a block is read from one end to the other. What comes next
// is fetched meanwhile. DIM: head_dim, or 0 for any.
template <int DIM>
void attend_few_in_pairs(const Arguments& a, const Item& item, Space& space) {
    const int64_t group = a.heads / a.kv_heads;
    const int dim = DIM ? DIM : int(a.head_dim);
    const int heads = int(item.heads), num = int(item.last - item.first);
    const int64_t head_size = a.block_size * dim;
    SoftmaxAlone softmax[MOST_QUERIES];
    const uint16_t* query[MOST_QUERIES];
    int64_t earliest = INT64_MAX, latest = 0;
    for (int r = 0; r < heads * num; r++) {
        const Item of_head = head_of(item, r / num);
        const int64_t q = item.first + r % num;
        softmax[r] = SoftmaxAlone(a, of_head, q);
        query[r] = static_cast<const uint16_t*>(a.query) + query_place(a, of_head, q, group);
        earliest = softmax[r].position < earliest ? softmax[r].position : earliest;
        latest = softmax[r].position > latest ? softmax[r].position : latest;
    }
    std::memset(space.sums, 0, sizeof(float) * dim * heads * num);
    const int64_t end = end_key(item, latest);
    const int64_t first = first_key(a, item, earliest) / GROUP_KEYS * GROUP_KEYS;
    for (int64_t start = first; start < end; start += PIECE_KEYS) {
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
            for (int r = h * num; r < (h + 1) * num; r++)
                for (int k = 0; k < count; k += LANES)
                    score_pairs<DIM>(query[r], keys + k * dim, dim,
                                     space.scores + r * PIECE_KEYS + j + k, next + k * dim);
        }
        for (int r = 0; r < heads * num; r++) {
            float* scores = space.scores + r * PIECE_KEYS;
            softmax[r].weigh(a, scores, start, piece.count, space.sums + r * dim, dim);
            for (int j = 0; j < piece.count; j += LANES)
                store(space.weight_tiles + r * PIECE_KEYS + j, load(scores + j));
        }
        for (int i = 0; i < chunks; i++) {
            const int j = i / heads * GROUP_KEYS, h = i % heads;
            const int left = piece.count - j, count = left < GROUP_KEYS ? left : GROUP_KEYS;
            const uint16_t* values = chunk(chunks + i);
            const uint16_t* next = i + 1 < chunks ? chunk(chunks + i + 1) : values;
            for (int r = h * num; r < (h + 1) * num; r++) {
                const uint16_t* weights = space.weight_tiles + r * PIECE_KEYS + j;
                float* sums = space.sums + r * dim;
                int d = 0;
                for (; d + 4 * LANES <= dim; d += 4 * LANES)
                    add_pairs<2>(sums + d, weights, values + d, dim, count, next + d);
                for (; d < dim; d += 2 * LANES)
                    add_pairs<1>(sums + d, weights, values + d, dim, count, next + d);
            }
        }
    }
    for (int r = 0; r < heads * num; r++) {
        order_sums(space.sums + r * dim, dim);
        finish(a, head_of(item, r / num), item.first + r % num, space.sums + r * dim,
               softmax[r].largest, softmax[r].sum(), space);
    }
}

// Makes a tile of the weights of 16 queries and up to GROUP_KEYS keys, and adds them to `total`.
// The scores, `step` apart, and `most` are to be multiplied to become powers of 2.
template <bool IS_MASKED>
inline void weigh_tile(const float* scores, int step, int count, float scaling, Vec most,
                       uint16_t* tile, Vec& total) {
    const auto weight_of = [&](int j) {
        if (j >= count) return Vec{};
        const Vec score = load(scores + j * step);
        const Vec weight = power_of_two(score * scaling - most);
        if (!IS_MASKED) return weight;
        return score == all(LOWEST) ? Vec{} : weight;
    };
    Vec of_even = {}, of_odd = {};
    UVec pairs[PAIRS];
    for (int p = 0; p < PAIRS; p++) {
        const Vec low = weight_of(2 * p), high = weight_of(2 * p + 1);
        of_even += low;
        of_odd += high;
        pairs[p] = pairs_of(low, high);
    }
    transpose(pairs);
    std::memcpy(tile, pairs, sizeof pairs);
    total += of_even + of_odd;
}

// Makes a tile of weights for each 16 queries and GROUP_KEYS keys of the scores of a piece, 0
// behind its end, and brings what was summed before to the same measure.
template <int N>
void weigh_tiles(const Arguments& a, Softmax<N>& softmax, float* scores, int64_t start, int count,
                 float* sums, int num, uint16_t* tiles) {
    constexpr float to_powers = 1.44269504f;
    const bool is_masked = softmax.hides(a, start, count);
    const float scaling =
        softmax.measure(a, scores, start, count, sums, num, int(a.head_dim)) * to_powers;
    for (int j = 0; j < count; j += GROUP_KEYS, scores += GROUP_KEYS * N * LANES)
        for (int n = 0; n < N; n++, tiles += TILE) {
            const Vec most = softmax.largest[n] * to_powers;
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
    std::memset(space.sums, 0, sizeof(float) * dim * N * LANES);
    const int64_t end = end_key(item, softmax.latest);
    const int64_t begin = first_key(a, item, softmax.earliest) / GROUP_KEYS * GROUP_KEYS;
    for (int64_t start = begin; start < end; start += PIECE_KEYS) {
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
        order_sums(space.sums + r * dim, dim);
        finish(a, item, item.first + r, space.sums + r * dim,
               softmax.largest[r / LANES][r % LANES], softmax.total[r / LANES][r % LANES], space);
    }
}

#endif

// Few queries of each of the item's heads.
void attend_few(const Arguments& a, const Item& item, Space& space) {
#ifdef HAS_PAIRS
    if (fits_halves(a) && !hides_odd_value(a, item))
        return a.head_dim == 64    ? attend_few_in_pairs<64>(a, item, space)
               : a.head_dim == 128 ? attend_few_in_pairs<128>(a, item, space)
                                   : attend_few_in_pairs<0>(a, item, space);
#endif
    for (int64_t h = 0; h < item.heads; h++)
        for (int64_t q = item.first; q < item.last; q++)
            a.type == 1 ? attend_alone<uint16_t>(a, head_of(item, h), q, space)
                        : attend_alone<float>(a, head_of(item, h), q, space);
}

// Up to N * LANES queries.
template <int N>
void attend_together(const Arguments& a, const Item& item, Space& space) {
#ifdef HAS_PAIRS
    if (fits_halves(a) && hides_odd_value(a, item)) return attend_by_lanes<N>(a, item, space);
#endif
#ifdef HAS_TILES
    if (fits_halves(a) && may_use_tiles()) return attend_in_tiles<Tiles, N>(a, item, space);
#endif
#ifdef HAS_PAIRS
    if (fits_halves(a)) return attend_in_tiles<Vectors, N>(a, item, space);
#endif
    attend_by_lanes<N>(a, item, space);
}

// Whether an item's queries are multiplied one after another, each alone.
inline bool is_small(const Item& item) { return item.last - item.first <= MOST_ALONE; }

void attend(const Arguments& a, const Item& item, Space& space) {
    if (is_small(item)) return attend_few(a, item, space);
    item.last - item.first <= LANES ? attend_together<1>(a, item, space)
                                    : attend_together<2>(a, item, space);
}

// Put one token's new keys or values into its block.
void keep_token(const Arguments& a, void* cache, const void* from, int64_t head_step,
                int64_t token_step, int64_t token) {
    const int64_t size = a.type == 0 ? 4 : 2, bytes = a.head_dim * size;
    const int64_t block = a.slots[token] / a.block_size, place = a.slots[token] % a.block_size;
    for (int64_t head = 0; head < a.kv_heads; head++)
        std::memcpy(static_cast<char*>(cache) +
                        ((block * a.kv_heads + head) * a.block_size + place) * bytes,
                    static_cast<const char*>(from) + (head * head_step + token * token_step) * size,
                    bytes);
}

}  // namespace

extern "C" int fminfer_attention(const Arguments* arguments) {
    const Arguments& a = *arguments;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t num_runs = a.window > 0 ? 0 : a.num_runs;  // a window hides what is shared
    enum { OF_RUNS, LARGE, SMALL, KINDS };
    int64_t ends[KINDS];  // of each kind of items, which are for all heads
    const auto list = [&](Item* items) {
        int64_t num = 0;
        const auto cut = [&](Item item, int64_t num_queries, int kind) {
            for (item.first = 0; item.first < num_queries; item.first = item.last) {
                const int64_t left = num_queries - item.first;
                item.last = item.first + (left < MOST_QUERIES ? left : MOST_QUERIES);
                if (kind != OF_RUNS && is_small(item) != (kind == SMALL)) continue;
                if (items != nullptr) items[num] = item;
                num++;
            }
        };
        for (const int64_t* run = a.runs; run != a.runs + 4 * num_runs; run += 4) {
            const int64_t* members = a.members + run[0];
            cut({a.rows + ROW * members[0], 0, 0, 0, run[2], run[3], members}, run[1] * group,
                OF_RUNS);
        }
        ends[OF_RUNS] = num;
        for (int kind = LARGE; kind <= SMALL; kind++) {
            for (const int64_t* row = a.rows; row != a.rows + ROW * a.num_rows; row += ROW)
                cut({row, 0, 0, 0, num_runs ? row[6] : 0, INT64_MAX, nullptr}, row[1] * group,
                    kind);
            ends[kind] = num;
        }
    };
    list(nullptr);
    Item* items = static_cast<Item*>(std::malloc(sizeof(Item) * (ends[SMALL] + 1)));
    const size_t of_runs = sizeof(float) * a.num_members * a.heads * found_size(a);
    float* found = num_runs ? static_cast<float*>(std::aligned_alloc(64, of_runs)) : nullptr;
    if (items == nullptr || (num_runs && found == nullptr)) {
        std::free(items);
        std::free(found);
        return 1;
    }
    list(items);
    const int64_t num_large = ends[LARGE] - ends[OF_RUNS];
    const int64_t num_small = ends[SMALL] - ends[LARGE];
    // Small items are of as many heads as there is room for and leave each thread something to do.
    int64_t most = 1;
    for (int64_t i = ends[LARGE]; i < ends[SMALL]; i++)
        most = items[i].last - items[i].first > most ? items[i].last - items[i].first : most;
    int64_t parts = (a.kv_heads + MOST_QUERIES / most - 1) / (MOST_QUERIES / most);
    while (parts < a.kv_heads && num_small * parts < 4 * a.num_threads) parts++;
    std::vector<std::unique_ptr<Space>> spaces(a.num_threads);
    std::atomic<int> failed{0};
    const auto attend_heads = [&](Item item, int64_t first, int64_t last, int thread) {
        if (!spaces[thread]) spaces[thread].reset(new Space(a, found));
        item.kv_head = first;
        item.heads = last - first;
        if (spaces[thread]->memory == nullptr)
            failed = 1;
        else
            attend(a, item, *spaces[thread]);
    };
    // Item after item of one head: they may share keys.
    const auto attend_by_head = [&](int64_t first, int64_t num, int64_t i, int thread) {
        attend_heads(items[first + i % num], i / num, i / num + 1, thread);
    };
    for_parts(a.num_threads, a.num_tokens, 8, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            keep_token(a, a.keys, a.new_keys, a.new_key_head, a.new_key_token, token);
            keep_token(a, a.values, a.new_values, a.new_value_head, a.new_value_token, token);
        }
    });
    for_pieces(a.num_threads, ends[OF_RUNS] * a.kv_heads, [&](int64_t i, int thread) {
        attend_by_head(0, ends[OF_RUNS], i, thread);
    });
    const int64_t of_large = num_large * a.kv_heads;
    for_pieces(a.num_threads, of_large + num_small * parts, [&](int64_t i, int thread) {
        if (i < of_large) return attend_by_head(ends[OF_RUNS], num_large, i, thread);
        const int64_t part = (i - of_large) % parts;
        attend_heads(items[ends[LARGE] + (i - of_large) / parts], a.kv_heads * part / parts,
                     a.kv_heads * (part + 1) / parts, thread);
    });
    std::free(items);
    std::free(found);
    return failed;
}

// Attention of packed rows over the paged KV cache, on the CPU; fminfer/kernel_build.py builds it.
//
// The step's new keys and values are put into their blocks first. Then each row's queries attend to
// the row's keys up to their own position. Work is cut into items: one row, one KV head, and up to
// 32 of its queries (tokens times the heads that share the KV head). An item goes over the row's
// blocks once and keeps the largest score and the sum of exponentials of each query as it goes
// (Milakov and Gimelshein 2018, the "online softmax"; Dao et al. 2022). Items of one KV head follow
// one another, so that what rows share is read from the cache nearby.
//
// Two bodies: many queries lie side by side in the lanes of vectors, and every key is broadcast;
// with one to three queries each key is multiplied lane by lane and summed. All arithmetic is in
// float32. Keys behind a row's end are never read: what lies there may be nan.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace {

constexpr int MOST_QUERIES = 2 * LANES;
constexpr float LOWEST = -3.0e38f;
inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

inline Vec tanh_of(Vec x) {
    const Vec is_negative = x < Vec{} ? all(-1.0f) : all(1.0f);
    const Vec e = exp_of(-2.0f * x * is_negative);
    return is_negative * (1.0f - e) / (1.0f + e);
}

#ifdef __clang__
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, IVec{__VA_ARGS__})
#endif

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

}  // namespace

extern "C" {

// Must agree with kernel_attention.Arguments.
struct Arguments {
    const float* query;  // element (head, token, i) at head * query_head + token * query_token + i
    float* out;          // (tokens, heads, head_dim)
    void* keys;          // (pool, kv_heads, block_size, head_dim), of `type`
    void* values;
    const void* new_keys;    // of `type`: element (head, token, i) at
    const void* new_values;  // head * new_…_head + token * new_…_token + i
    const int64_t* slots;    // (tokens,): block * block_size + place, of each token's key
    const int64_t* rows;    // (num_rows, 4): first token, tokens, position, start in `blocks`
    const int64_t* blocks;  // all rows' block tables, one after another
    const float* slopes;    // (heads,) of ALiBi, or null
    int64_t num_rows, num_tokens, query_head, query_token;
    int64_t new_key_head, new_key_token, new_value_head, new_value_token;
    int64_t heads, kv_heads, head_dim, block_size;
    int64_t window;  // keys that a query sees, itself included; 0: all
    int64_t type;    // 0 float32, 1 bfloat16, 2 float16
    int64_t num_threads;
    float scaling, softcap;  // softcap 0: none
};

}  // extern "C"

namespace {

// What one thread works in.
struct Space {
    float *queries, *sums, *scores, *keys, *values;
    void* memory;

    Space(const Arguments& a) {
        const size_t width = round_up(int(a.head_dim), LANES);
        const size_t block = round_up(int(a.block_size), LANES);
        const size_t sizes[] = {MOST_QUERIES * width, MOST_QUERIES * width, MOST_QUERIES * block,
                                block * width, block * width};
        size_t total = 0;
        for (size_t size : sizes) total += size;
        memory = std::aligned_alloc(64, (total * sizeof(float) + 63) / 64 * 64);
        if (memory == nullptr) return;
        std::memset(memory, 0, total * sizeof(float));
        float* next = static_cast<float*>(memory);
        float** places[] = {&queries, &sums, &scores, &keys, &values};
        for (int i = 0; i < 5; i++) {
            *places[i] = next;
            next += sizes[i];
        }
    }
    Space(const Space&) = delete;
    ~Space() { std::free(memory); }
};

// A row's queries [first, last) of one KV head; query q is token q / group, head q % group of it.
struct Item {
    const int64_t* row;
    int64_t kv_head, first, last;
};

// Return `count` keys or values of a block as float32, (count, width), in place where they are so.
const float* read_block(const Arguments& a, const void* cache, int64_t block, int64_t kv_head,
                        int count, int width, float* space) {
    const int64_t size = a.block_size * a.head_dim;
    const int64_t start = (block * a.kv_heads + kv_head) * size;
    const int dim = int(a.head_dim);
    if (a.type == 0) {
        const float* from = static_cast<const float*>(cache) + start;
        if (dim == width) return from;
        for (int j = 0; j < count; j++)
            std::memcpy(space + j * width, from + j * dim, dim * sizeof(float));
        return space;
    }
    const uint16_t* from = static_cast<const uint16_t*>(cache) + start;
    for (int j = 0; j < count; j++)
        if (a.type == 1)
            for (int d = 0; d < dim; d++) space[j * width + d] = from_bfloat16(from[j * dim + d]);
        else
            for (int d = 0; d < dim; d++) space[j * width + d] = from_float16(from[j * dim + d]);
    return space;
}

// sums[r][d ...] += scores[j][r] * values[j][d ...], R queries and N vectors of them at a time.
template <int R, int N>
inline void add_values(float* sums, const float* scores, int score_step, const float* values,
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

template <int R>
inline void add_all_values(float* sums, const float* scores, int score_step, const float* values,
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

inline float query_at(const Arguments& a, const Item& item, int64_t q, int64_t group, int d) {
    const int64_t head = item.kv_head * group + q % group, token = item.row[0] + q / group;
    return a.query[head * a.query_head + token * a.query_token + d] * a.scaling;
}

inline void write_out(const Arguments& a, const Item& item, int64_t q, int64_t group,
                      const float* sums, float total) {
    const int64_t head = item.kv_head * group + q % group, token = item.row[0] + q / group;
    float* out = a.out + (token * a.heads + head) * a.head_dim;
    for (int d = 0; d < a.head_dim; d++) out[d] = sums[d] / total;
}

inline int64_t first_block(const Arguments& a, int64_t position) {
    return a.window > 0 && position >= a.window ? (position - a.window + 1) / a.block_size : 0;
}

// Up to N * LANES queries, one a lane.
template <int N>
void attend_by_lanes(const Arguments& a, const Item& item, Space& space) {
    const int64_t group = a.heads / a.kv_heads;
    const int num = int(item.last - item.first), dim = int(a.head_dim);
    const int width = round_up(dim, LANES), step = N * LANES;
    Vec largest[N], total[N], slope[N];
    IVec position[N];
    std::memset(space.queries, 0, sizeof(float) * dim * step);
    for (int lane = 0; lane < step; lane++) {
        const int64_t q = item.first + (lane < num ? lane : num - 1);
        position[lane / LANES][lane % LANES] = int32_t(item.row[2] + q / group);
        slope[lane / LANES][lane % LANES] =
            a.slopes ? a.slopes[item.kv_head * group + q % group] : 0;
        if (lane < num)
            for (int d = 0; d < dim; d++)
                space.queries[d * step + lane] = query_at(a, item, q, group, d);
    }
    for (int n = 0; n < N; n++) {
        largest[n] = all(LOWEST);
        total[n] = Vec{};
    }
    std::memset(space.sums, 0, sizeof(float) * width * round_up(num, 4));
    const int64_t earliest = item.row[2] + item.first / group;
    const int64_t latest = item.row[2] + (item.last - 1) / group;
    for (int64_t b = first_block(a, earliest); b <= latest / a.block_size; b++) {
        const int64_t block = a.blocks[item.row[3] + b], start = b * a.block_size;
        const int64_t left = latest + 1 - start;
        const int count = int(left < a.block_size ? left : a.block_size);
        const float* keys = read_block(a, a.keys, block, item.kv_head, count, width, space.keys);
        int j = 0;
        for (; j + 4 <= count; j += 4)
            score_keys<4, N>(space.queries, keys + j * width, width, dim, space.scores + j * step);
        for (; j < count; j++)
            score_keys<1, N>(space.queries, keys + j * width, width, dim, space.scores + j * step);
        const bool is_masked =
            start + count - 1 > earliest || (a.window > 0 && latest - start >= a.window);
        for (int n = 0; n < N; n++) {
            Vec most = largest[n];
            float* scores = space.scores + n * LANES;
            for (j = 0; j < count; j++) {
                Vec score = load(scores + j * step);
                const IVec distance = position[n] - int32_t(start + j);
                if (a.softcap > 0) score = a.softcap * tanh_of(score / a.softcap);
                if (a.slopes) score -= slope[n] * __builtin_convertvector(distance, Vec);
                if (is_masked) {
                    score = distance < 0 ? all(LOWEST) : score;
                    if (a.window > 0) score = distance >= int32_t(a.window) ? all(LOWEST) : score;
                }
                store(scores + j * step, score);
                most = score > most ? score : most;
            }
            const Vec factor = exp_of(largest[n] - most);
            Vec sum = total[n] * factor;
            for (j = 0; j < count; j++) {
                const Vec score = load(scores + j * step);
                Vec weight = exp_of(score - most);
                if (is_masked) weight = score == all(LOWEST) ? Vec{} : weight;
                store(scores + j * step, weight);
                sum += weight;
            }
            for (int lane = 0; lane < LANES && n * LANES + lane < num; lane++)
                if (factor[lane] != 1.0f) {
                    float* row = space.sums + (n * LANES + lane) * width;
                    for (int d = 0; d < width; d += LANES)
                        store(row + d, load(row + d) * factor[lane]);
                }
            largest[n] = most;
            total[n] = sum;
        }
        const float* values =
            read_block(a, a.values, block, item.kv_head, count, width, space.values);
        for (int r = 0; r < num; r += 4)
            add_all_values<4>(space.sums + r * width, space.scores + r, step, values, width, count);
    }
    for (int r = 0; r < num; r++)
        write_out(a, item, item.first + r, group, space.sums + r * width,
                  total[r / LANES][r % LANES]);
}

// One query, keys in the lanes of the softmax.
void attend_alone(const Arguments& a, const Item& item, int64_t q, Space& space) {
    const int64_t group = a.heads / a.kv_heads;
    const int dim = int(a.head_dim), width = round_up(dim, LANES);
    for (int d = 0; d < dim; d++) space.queries[d] = query_at(a, item, q, group, d);
    for (int d = dim; d < width; d++) space.queries[d] = 0;
    std::memset(space.sums, 0, sizeof(float) * width);
    const int64_t position = item.row[2] + q / group;
    const float slope = a.slopes ? a.slopes[item.kv_head * group + q % group] : 0;
    float largest = LOWEST;
    Vec total = Vec{};
    for (int64_t b = first_block(a, position); b <= position / a.block_size; b++) {
        const int64_t block = a.blocks[item.row[3] + b], start = b * a.block_size;
        const int64_t left = position + 1 - start;
        const int count = int(left < a.block_size ? left : a.block_size);
        const float* keys = read_block(a, a.keys, block, item.kv_head, count, width, space.keys);
        const int padded = round_up(count, LANES);
        for (int j = 0; j < padded; j += LANES) {
            Vec sums[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                sums[lane] = Vec{};
                if (j + lane < count)
                    for (int d = 0; d < width; d += LANES)
                        sums[lane] +=
                            load(space.queries + d) * load(keys + (j + lane) * width + d);
            }
            store(space.scores + j, sums_of(sums));
        }
        Vec highest = all(largest);
        for (int j = 0; j < padded; j += LANES) {
            Vec score = load(space.scores + j);
            IVec distance;
            for (int lane = 0; lane < LANES; lane++)  // behind the block's keys: hidden
                distance[lane] = j + lane < count ? int32_t(position - start - j - lane) : -1;
            if (a.softcap > 0) score = a.softcap * tanh_of(score / a.softcap);
            if (a.slopes) score -= slope * __builtin_convertvector(distance, Vec);
            score = distance < 0 ? all(LOWEST) : score;
            if (a.window > 0) score = distance >= int32_t(a.window) ? all(LOWEST) : score;
            store(space.scores + j, score);
            highest = score > highest ? score : highest;
        }
        float most = highest[0];
        for (int lane = 1; lane < LANES; lane++) most = highest[lane] > most ? highest[lane] : most;
        const float factor = exp_of(all(largest - most))[0];
        total *= factor;
        for (int d = 0; d < width; d += LANES) store(space.sums + d, load(space.sums + d) * factor);
        for (int j = 0; j < padded; j += LANES) {
            const Vec score = load(space.scores + j);
            const Vec weight = score == all(LOWEST) ? Vec{} : exp_of(score - most);
            store(space.scores + j, weight);
            total += weight;
        }
        largest = most;
        const float* values =
            read_block(a, a.values, block, item.kv_head, count, width, space.values);
        add_all_values<1>(space.sums, space.scores, 1, values, width, count);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    write_out(a, item, q, group, space.sums, sum);
}

void attend(const Arguments& a, const Item& item, Space& space) {
    const int64_t num = item.last - item.first;
    if (num < 4)
        for (int64_t q = item.first; q < item.last; q++) attend_alone(a, item, q, space);
    else if (num <= LANES)
        attend_by_lanes<1>(a, item, space);
    else
        attend_by_lanes<2>(a, item, space);
}

}  // namespace

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

extern "C" int fminfer_attention(const Arguments* arguments) {
    const Arguments& a = *arguments;
    const int64_t group = a.heads / a.kv_heads;
    int64_t num_tiles = 0;  // of one KV head
    for (int64_t i = 0; i < a.num_rows; i++)
        num_tiles += (a.rows[4 * i + 1] * group + MOST_QUERIES - 1) / MOST_QUERIES;
    // (row, first query) of each, found once: rows differ in length.
    int64_t* tiles = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * 2 * (num_tiles + 1)));
    if (tiles == nullptr) return 1;
    int64_t place = 0;
    for (int64_t i = 0; i < a.num_rows; i++)
        for (int64_t q = 0; q < a.rows[4 * i + 1] * group; q += MOST_QUERIES) {
            tiles[2 * place] = i;
            tiles[2 * place++ + 1] = q;
        }
    int failed = 0;
#pragma omp parallel num_threads(int(a.num_threads)) reduction(| : failed)
    {
        Space space(a);
        failed |= space.memory == nullptr;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a.num_tokens; token++) {
            keep_token(a, a.keys, a.new_keys, a.new_key_head, a.new_key_token, token);
            keep_token(a, a.values, a.new_values, a.new_value_head, a.new_value_token, token);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tiles * a.kv_heads; i++) {
            if (space.memory == nullptr) continue;
            const int64_t* row = a.rows + 4 * tiles[2 * (i % num_tiles)];
            const int64_t first = tiles[2 * (i % num_tiles) + 1], end = row[1] * group;
            const int64_t last = first + MOST_QUERIES < end ? first + MOST_QUERIES : end;
            attend(a, Item{row, i / num_tiles, first, last}, space);
        }
    }
    std::free(tiles);
    return failed;
}

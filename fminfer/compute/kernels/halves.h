// Products of bfloat16, summed in float32: pair by pair, or of tiles (Intel's AMX).
//
// A tile has 16 rows of 64 bytes: of 32 numbers in bfloat16, or of 16 in float32. A product of
// tiles sums, in float32, over pairs of numbers: its second operand's row p holds rows 2 p and
// 2 p + 1 of the matrix, number by number in turns. `Vectors` computes the same from the same tiles
// with vectors, where the processor has products of pairs only.
#pragma once

#include "wide.h"

#ifdef __AVX512BF16__
#define HAS_PAIRS
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int GROUP_KEYS = 32;   // that are multiplied together
constexpr int PIECE_KEYS = 128;  // between two steps of the softmax

// Row i becomes column i of 16 rows.
inline void transpose(UVec* rows) {
    for (int i = 0; i < 8; i++) {
        const UVec a = rows[i], b = rows[i + 8];
        rows[i] = LANES_OF(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        rows[i + 8] = LANES_OF(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int g = 0; g < 16; g += 8)
        for (int i = g; i < g + 4; i++) {
            const UVec a = rows[i], b = rows[i + 4];
            rows[i] = LANES_OF(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            rows[i + 4] =
                LANES_OF(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int g = 0; g < 16; g += 4)
        for (int i = g; i < g + 2; i++) {
            const UVec a = rows[i], b = rows[i + 2];
            rows[i] = LANES_OF(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            rows[i + 2] =
                LANES_OF(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < 16; i += 2) {
        const UVec a = rows[i], b = rows[i + 1];
        rows[i] = LANES_OF(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        rows[i + 1] = LANES_OF(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
}

#ifdef HAS_PAIRS

constexpr int PAIRS = 16, TILE = PAIRS * 2 * LANES;
constexpr int PAIR_PARTS = 4;  // a score has so many sums, of every fourth pair each

inline __m512i bits_at(const uint16_t* from) { return _mm512_loadu_si512(from); }

// Two numbers in all lanes.
inline __m512i pair_at(const uint16_t* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof both);
    return _mm512_set1_epi32(both);
}

// sum[i] += a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]
inline Vec add_products(Vec sum, __m512i a, __m512i b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// Of each 32 sums the first vector holds the first halves of each 8; puts them in order.
inline void order_sums(float* sums, int dim) {
    for (int d = 0; d < dim; d += 2 * LANES) {
        const Vec low = load(sums + d), high = load(sums + d + LANES);
        store(sums + d,
              LANES_OF(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(sums + d + LANES,
              LANES_OF(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}

// Fetches into the second cache, from where products are fed in time: into the first one, lines
// compete with those that are being read (an AMD Zen 4: 15 instead of 24 GB/s).
inline void fetch(const uint16_t* from) { __builtin_prefetch(from, 0, 2); }

// sums += weights times values, of keys [first, count) of a group. The weights of two keys
// stand side by side. The sums are not in order, see `order_sums`. As much is fetched at `next`.
template <int N>
inline void add_pairs(float* sums, const uint16_t* weights, const uint16_t* values, int dim,
                      int first, int count, const uint16_t* next) {
    Vec sum[2 * N];
    for (int n = 0; n < 2 * N; n++) sum[n] = load(sums + n * LANES);
    for (int j = first / 2 * 2; j < count; j += 2) {
        const __m512i weight = pair_at(weights + j);
        for (int n = 0; n < N; n++) {
            const int place = j * dim + n * 2 * LANES;
            const uint16_t* from = values + place;
            fetch(next + place);
            fetch(next + place + dim);
            const __m512i low = j >= first ? bits_at(from) : _mm512_setzero_si512();
            const __m512i high = j + 1 < count ? bits_at(from + dim) : _mm512_setzero_si512();
            sum[2 * n] = add_products(sum[2 * n], weight, _mm512_unpacklo_epi16(low, high));
            sum[2 * n + 1] = add_products(sum[2 * n + 1], weight, _mm512_unpackhi_epi16(low, high));
        }
    }
    for (int n = 0; n < 2 * N; n++) store(sums + n * LANES, sum[n]);
}

// (low[i], high[i]) in turns, rounded; subnormal numbers become 0.
inline UVec pairs_of(Vec low, Vec high) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    const UVec turns = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005,
                        0x160006, 0x170007, 0x180008, 0x190009, 0x1A000A, 0x1B000B,
                        0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    return (UVec)_mm512_permutexvar_epi16((__m512i)turns, halves);
}

// 16 numbers, rounded; subnormal numbers become 0.
inline void put_halves(uint16_t* to, Vec value) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

// Puts 32 values of keys 2 p and 2 p + 1 for all p into two tiles, number by number in turns: the
// first takes the first halves of each 8. What lies behind the row's end may be nan: there are
// `count` keys.
inline void pair_values(const uint16_t* values, int dim, int count, uint16_t* tiles) {
    for (int p = 0; p < PAIRS; p++) {
        const uint16_t* from = values + 2 * p * dim;
        const __m512i low = 2 * p < count ? bits_at(from) : _mm512_setzero_si512();
        const __m512i high = 2 * p + 1 < count ? bits_at(from + dim) : _mm512_setzero_si512();
        _mm512_store_si512(tiles + p * 2 * LANES, _mm512_unpacklo_epi16(low, high));
        _mm512_store_si512(tiles + TILE + p * 2 * LANES, _mm512_unpackhi_epi16(low, high));
    }
}

// Puts 32 values of a piece's keys into pairs of tiles, one pair a group of keys.
inline void pair_piece(const uint16_t* const* values, int d, int dim, int count,
                       uint16_t* tiles) {
    for (int left = count; left > 0; left -= GROUP_KEYS, values++, tiles += 2 * TILE)
        if (left >= GROUP_KEYS)  // a number that the compiler knows
            pair_values(*values + d, dim, GROUP_KEYS, tiles);
        else
            pair_values(*values + d, dim, left, tiles);
}

// With vectors.
struct Vectors {
    static constexpr int R = 8;  // queries that are summed at a time

    static void begin() {}
    static void end() {}

    // scores, (GROUP_KEYS, N * LANES), of that many keys; queries are tiles (dim / 32, N).
    template <int N>
    static void score(const uint16_t* queries, const uint16_t* keys, int dim, float* scores) {
        constexpr int J = 8 / N;  // keys at a time
        for (int first = 0; first < GROUP_KEYS; first += J) {
            Vec score[J][N] = {};
            for (int part = 0; part < PAIR_PARTS; part++)
                add_part<N, J>(score, queries, keys + first * dim, dim, part);
            for (int j = 0; j < J; j++)
                for (int n = 0; n < N; n++)
                    store(scores + ((first + j) * N + n) * LANES, score[j][n]);
        }
    }

    // What every fourth pair of dimensions gives, from number `part` on.
    template <int N, int J>
    static void add_part(Vec (*score)[N], const uint16_t* queries, const uint16_t* keys, int dim,
                         int part) {
        Vec sum[J][N] = {};
        for (int d = 0; d < dim; d += 2 * PAIRS, queries += N * TILE)
            UNROLLED for (int p = part; p < PAIRS; p += PAIR_PARTS) {
                __m512i query[N];
                UNROLLED for (int n = 0; n < N; n++)
                    query[n] = bits_at(queries + n * TILE + p * 2 * LANES);
                UNROLLED for (int j = 0; j < J; j++) {
                    const __m512i both = pair_at(keys + j * dim + d + 2 * p);
                    UNROLLED for (int n = 0; n < N; n++)
                        sum[j][n] = add_products(sum[j][n], both, query[n]);
                }
            }
        UNROLLED for (int j = 0; j < J; j++)
            UNROLLED for (int n = 0; n < N; n++) score[j][n] += sum[j][n];
    }

    // sums, (N * LANES, dim), of `num` queries, += weights, tiles of each group of keys, times the
    // values of `count` keys, which are in groups. The sums are not in order, see `order_sums`.
    template <int N>
    static void add(float* sums, int num, const uint16_t* weights, const uint16_t* const* values,
                    int count, int dim, uint16_t* space) {
        for (int d = 0; d < dim; d += 2 * LANES) {
            pair_piece(values, d, dim, count, space);
            for (int r = 0; r < num; r += R)
                add_some<N>(sums + r * dim + d, weights + r * 2 * LANES, space, count, dim);
        }
    }

    // 32 sums of R queries each, `dim` apart.
    template <int N>
    static void add_some(float* sums, const uint16_t* weights, const uint16_t* values, int count,
                         int dim) {
        Vec low[R], high[R];
        for (int r = 0; r < R; r++) {
            low[r] = load(sums + r * dim);
            high[r] = load(sums + r * dim + LANES);
        }
        for (; count > 0; count -= GROUP_KEYS, weights += N * TILE, values += 2 * TILE)
            for (int p = 0; p < PAIRS; p++) {
                const __m512i first = bits_at(values + p * 2 * LANES);
                const __m512i second = bits_at(values + TILE + p * 2 * LANES);
                for (int r = 0; r < R; r++) {
                    const __m512i both = pair_at(weights + r * 2 * LANES + 2 * p);
                    low[r] = add_products(low[r], both, first);
                    high[r] = add_products(high[r], both, second);
                }
            }
        for (int r = 0; r < R; r++) {
            store(sums + r * dim, low[r]);
            store(sums + r * dim + LANES, high[r]);
        }
    }
};

#endif

#ifdef HAS_TILES

// The compiler is not told by g++'s own header that a tile is read from memory, and old ones forget
// parentheses.
#define LOAD_TILE(tile, from, step)            \
    do {                                       \
        asm volatile("" ::: "memory");         \
        _tile_loadd(tile, (from), (step));     \
    } while (0)
#define STORE_TILE(tile, to, step) _tile_stored(tile, (to), (step))

// Whether this process may use tiles: Linux wants to be asked.
inline bool may_use_tiles() {
    constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool is_allowed = syscall(SYS_arch_prctl, ask, tile_data) == 0;
    return is_allowed;
}

// With tiles; see Vectors.
struct Tiles {
    static void begin() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    static void end() { _tile_release(); }

    template <int N>
    static void score(const uint16_t* queries, const uint16_t* keys, int dim, float* scores) {
        constexpr int bytes = N * LANES * sizeof(float);
        _tile_zero(0);
        _tile_zero(1);
        if (N > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int d = 0; d < dim; d += 2 * PAIRS, queries += N * TILE) {
            LOAD_TILE(4, keys + d, dim * sizeof(uint16_t));
            LOAD_TILE(5, keys + PAIRS * dim + d, dim * sizeof(uint16_t));
            LOAD_TILE(6, queries, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (N > 1) {
                LOAD_TILE(7, queries + TILE, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        STORE_TILE(0, scores, bytes);
        STORE_TILE(1, scores + PAIRS * N * LANES, bytes);
        if (N > 1) {
            STORE_TILE(2, scores + LANES, bytes);
            STORE_TILE(3, scores + PAIRS * N * LANES + LANES, bytes);
        }
    }

    template <int N>
    static void add(float* sums, int, const uint16_t* weights, const uint16_t* const* values,
                    int count, int dim, uint16_t* space) {
        const int bytes = dim * sizeof(float);
        float* second = sums + LANES * dim;  // of 16 more queries
        for (int d = 0; d < dim; d += 2 * LANES) {
            LOAD_TILE(0, sums + d, bytes);
            LOAD_TILE(1, sums + d + LANES, bytes);
            if (N > 1) {
                LOAD_TILE(2, second + d, bytes);
                LOAD_TILE(3, second + d + LANES, bytes);
            }
            pair_piece(values, d, dim, count, space);
            for (int g = 0; g * GROUP_KEYS < count; g++) {
                LOAD_TILE(4, weights + g * N * TILE, 64);
                LOAD_TILE(6, space + g * 2 * TILE, 64);
                LOAD_TILE(7, space + (g * 2 + 1) * TILE, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (N > 1) {
                    LOAD_TILE(5, weights + (g * N + 1) * TILE, 64);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            STORE_TILE(0, sums + d, bytes);
            STORE_TILE(1, sums + d + LANES, bytes);
            if (N > 1) {
                STORE_TILE(2, second + d, bytes);
                STORE_TILE(3, second + d + LANES, bytes);
            }
        }
    }
};

#endif

}  // namespace

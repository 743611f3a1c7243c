// From logits to drawn tokens, on the CPU: temperature, top_k, min_p, top_p, and the draw by
// inverting the cumulated weights in id order. Each row is one thread's, in one order of sums.
//
// Nothing is sorted. What a filter keeps is all above a value and the first of its equals; that
// value is found by halving the floats between the lowest and the highest, which as bits are whole
// numbers in the same order, over numbers that lie in the cache; once few are in question only
// those are looked at.

#include <cmath>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 128 * LANES;  // weights, of one sum in float32
constexpr int32_t INFINITE = 0x7F800000;  // as bits of a float
constexpr float SMALLEST = -87.0f;  // of an exponent; what is less likely is never drawn
constexpr int32_t NARROW = 1 << 20;  // an eighth of an octave, in which few numbers lie

inline int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// 16 logits, of which the row may have fewer left.
inline Vec load_some(const float* from, int64_t count) {
    if (count >= LANES) return load(from);
    Vec values = all(-INFINITY);
    for (int lane = 0; lane < count; lane++) values[lane] = from[lane];
    return values;
}

inline float largest_of(Vec values) {
    float largest = values[0];
    for (int lane = 1; lane < LANES; lane++) largest = std::fmax(largest, values[lane]);
    return largest;
}

// The lanes that are chosen, one after another; returns how many. It may write 16.
inline int64_t put_chosen(float* to, Vec values, IVec is_chosen) {
#ifdef __AVX512F__
    const __mmask16 mask = _mm512_test_epi32_mask((__m512i)is_chosen, (__m512i)is_chosen);
    store(to, (Vec)_mm512_maskz_compress_ps(mask, (__m512)values));
    return __builtin_popcount(mask);
#else
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        to[count] = values[lane];
        count -= is_chosen[lane];
    }
    return count;
#endif
}

// Numbers of a row's tokens, none below 0, in id order; padded with zeros to whole vectors.
struct Numbers {
    float* values;
    int64_t count;  // padded

    // The sum, or the number, of those no lower than a limit above 0; it never falls as there are
    // more of them.
    template <bool COUNTS>
    double sum_from(float limit) const {
        const Vec lowest = all(limit), zero = {}, one = all(1);
        double total = 0;
        for (int64_t start = 0; start < count; start += BLOCK) {
            const int64_t end = start + BLOCK < count ? start + BLOCK : count;
            Vec sums[4] = {};
            int64_t i = start;
            for (; i + 4 * LANES <= end; i += 4 * LANES)
                for (int j = 0; j < 4; j++) {
                    const Vec some = load(values + i + j * LANES);
                    sums[j] += some >= lowest ? COUNTS ? one : some : zero;
                }
            for (; i < end; i += LANES) {
                const Vec some = load(values + i);
                sums[0] += some >= lowest ? COUNTS ? one : some : zero;
            }
            const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            for (int lane = 0; lane < LANES; lane++) total += sum[lane];
        }
        return total;
    }

    double sum() const { return sum_from<false>(float_of(1)); }

    // Copies those from `low` on and below `high`.
    Numbers between(float low, float high, float* to) const {
        int64_t found = 0;
        for (int64_t i = 0; i < count; i += LANES) {
            const Vec some = load(values + i);
            found += put_chosen(to + found, some, (some >= all(low)) & (some < all(high)));
        }
        store(to + found, Vec{});
        return {to, (found + LANES - 1) / LANES * LANES};
    }

    // Zeroes what is lower than a limit, and all of its equals but the first `keep`.
    void cut(float limit, double keep) {
        const Vec lowest = all(limit), zero = {};
        IVec negative = {};  // minus the number of equals
        for (int64_t i = 0; i < count; i += LANES) {
            const Vec some = load(values + i);
            negative += (IVec)(some == lowest);
            store(values + i, some >= lowest ? some : zero);
        }
        int64_t num_equal = 0;
        for (int lane = 0; lane < LANES; lane++) num_equal -= negative[lane];
        for (int64_t i = count - 1; i >= 0 && num_equal > 1 && num_equal > keep; i--)
            if (values[i] == limit) {
                values[i] = 0;
                num_equal--;
            }
    }

    // Zeroes all but the fewest, highest first and of equals the first, that sum up to `wanted`,
    // or are as many. `low` and `high` are limits: those from the one on suffice, not from the other.
    template <bool COUNTS>
    void keep_highest(double wanted, int32_t low, int32_t high, float* space) {
        Numbers open = *this;  // those that may be the last one kept, and maybe others
        double base = 0;       // of those that are higher than the open ones
        double above = 0;      // of those from `high` on
        bool is_narrow = false;
        while (high - low > 1) {
            const int32_t middle = low + (high - low) / 2;
            const double found = base + open.sum_from<COUNTS>(float_of(middle));
            if (found >= wanted) {
                low = middle;
            } else {
                high = middle;
                above = found;
            }
            if (!is_narrow && high - low <= NARROW) {
                is_narrow = true;
                open = open.between(float_of(low), float_of(high), space);
                base = above;
            }
        }
        const float limit = float_of(low);
        cut(limit, std::ceil((wanted - above) / (COUNTS ? 1 : limit)));
    }

    // The first at which the sum from the start on exceeds `noise`, in [0, 1), of the whole.
    int64_t draw(double noise) const {
        const double point = noise * sum();
        double reached = 0;
        int64_t last = 0;  // that is not zero
        for (int64_t start = 0; start < count; start += BLOCK) {
            const int64_t end = start + BLOCK < count ? start + BLOCK : count;
            const double of_block = Numbers{values + start, end - start}.sum();
            if (of_block == 0) continue;
            if (reached + of_block <= point && end < count) {
                reached += of_block;
                for (last = end - 1; values[last] == 0;) last--;
                continue;
            }
            double inside = reached;
            for (int64_t i = start; i < end; i++) {
                if (values[i] == 0) continue;
                last = i;
                inside += values[i];
                if (inside > point) return i;
            }
            reached += of_block;
            if (reached > point) return last;  // but for rounding it was reached inside
        }
        return last;
    }
};

// How far 16 logits lie below the largest one; infinitely far where the row has ended.
inline Vec distances(const float* row, int64_t i, int64_t vocab, float largest) {
    return largest - load_some(row + i, vocab - i);
}

int64_t draw(const float* row, int64_t vocab, float temperature, float top_p, int64_t top_k,
             float min_p, double noise, float* values, float* space) {
    Vec most = all(-INFINITY);
    for (int64_t i = 0; i < vocab; i += LANES) {
        const Vec some = load_some(row + i, vocab - i);
        most = some > most ? some : most;  // which a nan is not
    }
    const float largest = largest_of(most) + 0.0f;  // of -0 it makes 0, so that no distance is -0
    if (!std::isfinite(largest)) {  // its logprob is nan, whichever is drawn
        for (int64_t i = 0; i < vocab; i++)
            if (row[i] == largest) return i;
        return 0;
    }
    Numbers numbers{values, (vocab + LANES - 1) / LANES * LANES};
    const bool has_top_k = top_k > 0 && top_k < vocab;
    if (has_top_k) {  // of logits, not of weights: the lowest of those may be equal, or zero
        // As bits, the further the less; what is infinitely far becomes nan, and is not kept.
        for (int64_t i = 0; i < vocab; i += LANES)
            store(values + i, (Vec)(INFINITE - 1 - (IVec)distances(row, i, vocab, largest)));
        numbers.keep_highest<true>(top_k, 0, INFINITE, space);
    }
    const Vec lowest = all(min_p), zero = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const Vec power = -distances(row, i, vocab, largest) / temperature;
        Vec weight = power > all(SMALLEST) ? exp_of(power) : zero;  // nan: zero
        weight = weight >= lowest ? weight : zero;                  // the largest is 1
        if (has_top_k) weight = load(values + i) > zero ? weight : zero;
        store(values + i, weight);
    }
    if (top_p < 1) {
        const double sum = numbers.sum(), wanted = top_p * sum;
        // All that are lower than this are together less than what is not wanted.
        const float low = 0.5 * (sum - wanted) / vocab;
        numbers.keep_highest<false>(wanted, bits_of(low), bits_of(1.0f) + 1, space);
    }
    return numbers.draw(noise);
}

}  // namespace

// logits: (rows, vocab); rows: (count,), those to draw for; each row's temperature > 0, top_p > 0,
// top_k (0: off), min_p and noise in [0, 1); ids: (count,). Nonzero: there was no memory.
extern "C" int fminfer_draw(const float* logits, int64_t vocab, int64_t count,
                            const int64_t* rows, const float* temperature, const float* top_p,
                            const int64_t* top_k, const float* min_p, const double* noise,
                            int64_t* ids, int num_threads) {
    return lacks_memory([&] {
        std::vector<std::vector<float>> spaces(num_threads);
        for_pieces(num_threads, count, [&](int64_t i, int thread) {
            const int64_t r = rows[i];
            std::vector<float>& space = spaces[thread];
            space.resize(2 * vocab + 3 * LANES);  // by the thread that uses it
            ids[i] = draw(logits + r * vocab, vocab, temperature[r], top_p[r], top_k[r], min_p[r],
                          noise[r], space.data(), space.data() + vocab + LANES);
        });
    });
}

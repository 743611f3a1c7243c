// From logits to drawn tokens, on the CPU: temperature, top_k, min_p, top_p, and the draw by
// Gumbel-max (gumbel.h). Each row is one thread's, in one order of sums.
//
// Nothing is sorted. What a filter keeps is all above a value and the first of its equals; that
// value is found by halving the floats between the lowest and the highest, which as bits are whole
// numbers in the same order, over numbers that lie in the cache; once few are in question only
// those are looked at.

#include <cmath>
#include <vector>

#include "gumbel.h"
#include "pool.h"

namespace {

constexpr int64_t BLOCK = 128 * LANES;  // weights, of one sum in float32
constexpr int32_t INFINITE = 0x7F800000;  // as bits of a float
constexpr float SMALLEST = -87.0f;  // of an exponent; what is less likely is never drawn
constexpr int64_t GROUP = 4 * LANES;  // tokens whose chances are looked at together
constexpr float NO_CHANCE = 0x1p-9f;  // a limit of 24 bits that half of the lowest 32 is not below
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
};

// A vector of logits, of which the row may have fewer left.
inline Wide load_some(const float* from, int64_t count) {
    if (count >= WIDTH) return wide_at(from);
    Wide values = Wide{} - INFINITY;
    for (int lane = 0; lane < count; lane++) values[lane] = from[lane];
    return values;
}

// How far logits lie below the largest one; infinitely far where the row has ended.
inline Wide distances(const float* row, int64_t i, int64_t vocab, float largest) {
    return largest - load_some(row + i, vocab - i);
}

// The largest logit; nan where one is.
float largest_of(const float* row, int64_t vocab) {
    Wide most = Wide{} - INFINITY;
    IWide is_nan = {};
    for (int64_t i = 0; i < vocab; i += WIDTH) {
        const Wide some = load_some(row + i, vocab - i);
        most = some > most ? some : most;
        is_nan |= some != some;
    }
    return any(is_nan) ? NAN : largest_of(most) + 0.0f;  // no -0, so that no distance is -0
}

// One row, and how it draws.
struct Row {
    const float* logits;
    int64_t vocab;
    float temperature, top_p, min_p;
    int64_t top_k;
    uint64_t noise;
    int64_t first;  // the id of the first logit's token: the logits may be a shard's

    bool has_top_k() const { return top_k > 0 && top_k < vocab; }
    bool has_filter() const { return has_top_k() || top_p < 1 || min_p > 0; }

    // Writes numbers of all tokens, above 0 of those that top_k, min_p and top_p leave.
    void filter(float largest, float* values, float* space) const {
        Numbers numbers{values, (vocab + LANES - 1) / LANES * LANES};
        if (has_top_k()) {  // of logits, not of weights: the lowest of those may be equal, or zero
            // As bits, the further the less; what is infinitely far becomes nan, and is not kept.
            for (int64_t i = 0; i < numbers.count; i += WIDTH) {
                const IWide far = (IWide)distances(logits, i, vocab, largest);
                put_wide(values + i, (Wide)(INFINITE - 1 - far));
            }
            numbers.keep_highest<true>(top_k, 0, INFINITE, space);
        }
        const Wide lowest = Wide{} + std::log(min_p), smallest = Wide{} + SMALLEST, zero = {};
        for (int64_t i = 0; i < numbers.count; i += WIDTH) {
            const Wide power = -distances(logits, i, vocab, largest) / temperature;
            Wide weight = power > smallest ? exp_of(power) : zero;
            weight = power >= lowest ? weight : zero;
            if (has_top_k()) weight = wide_at(values + i) > zero ? weight : zero;
            put_wide(values + i, weight);
        }
        if (top_p < 1) {
            const double sum = numbers.sum(), wanted = top_p * sum;
            // All that are lower than this are together less than what is not wanted.
            const float low = 0.5 * (sum - wanted) / vocab;
            numbers.keep_highest<false>(wanted, bits_of(low), bits_of(1.0f) + 1, space);
        }
    }

    // The winner of those whose values are above 0.
    template <bool IS_FILTERED>
    int64_t race(float largest, const float* values) const {
        Race race(temperature, noise, first);
        UWide lanes;
        for (int lane = 0; lane < WIDTH; lane++) lanes[lane] = lane;
        for (int64_t start = 0; start < vocab; start += GROUP) {
            Wide limits[GROUP / WIDTH];
            IWide may_win = {}, is_near[GROUP / WIDTH], is_any_near = {};
            const int64_t left = vocab - start, count = left < GROUP ? left : GROUP;
            for (int64_t i = 0, v = 0; i < count; i += WIDTH, v++) {
                Wide far = distances(logits, start + i, vocab, largest);
                if (IS_FILTERED) far = wide_at(values + start + i) > Wide{} ? far : Wide{} + INFINITY;
                limits[v] = race.limits_of(far);
                may_win |= limits[v] > Wide{} + NO_CHANCE;
            }
            if (!any(may_win)) continue;
            for (int64_t i = 0, v = 0; i < count; i += WIDTH, v++) {
                const UWide bits = token_bits(lanes + uint32_t(first + start + i), noise);
                is_near[v] = __builtin_convertvector((IWide)(bits >> 8), Wide) < limits[v];
                is_any_near |= is_near[v];
            }
            if (!any(is_any_near)) continue;
            for (int64_t i = 0; i < count; i++)
                if (is_near[i / WIDTH][i % WIDTH])
                    race.enter(first + start + i, largest - logits[start + i]);
        }
        return race.winner - first;
    }

    int64_t draw(std::vector<float>& space) const {
        const float largest = largest_of(logits, vocab);
        if (!std::isfinite(largest)) {  // its logprob is nan, whichever is drawn
            for (int64_t i = 0; i < vocab; i++)
                if (logits[i] == largest || std::isnan(logits[i])) return i;
        }
        if (!has_filter()) return race<false>(largest, nullptr);
        space.resize(2 * vocab + 3 * LANES);  // by the thread that uses it
        filter(largest, space.data(), space.data() + vocab + LANES);
        return race<true>(largest, space.data());
    }
};

}  // namespace

// logits: (rows, vocab); rows: (count,), those to draw for; each row's temperature > 0, top_p > 0,
// top_k (0: off), min_p and 64 bits of noise; ids: (count,) places, counted from `first`, the
// id of the first logit's token. Nonzero: there was no memory.
extern "C" int fminfer_draw(const float* logits, int64_t vocab, int64_t first, int64_t count,
                            const int64_t* rows, const float* temperature, const float* top_p,
                            const int64_t* top_k, const float* min_p, const int64_t* noise,
                            int64_t* ids, int num_threads) {
    return lacks_memory([&] {
        std::vector<std::vector<float>> spaces(num_threads);
        for_pieces(num_threads, count, [&](int64_t i, int thread) {
            const int64_t r = rows[i];
            const Row row{logits + r * vocab, vocab,    temperature[r],    top_p[r],
                          min_p[r],           top_k[r], uint64_t(noise[r]), first};
            ids[i] = row.draw(spaces[thread]);
        });
    });
}

// From logits to normalizers and the best tokens, on the CPU: each row is read while it is near.
// Logits and arithmetic are float32.
//
// The first pass keeps the best `num_top` of a row, of equals the lowest ids; the second sums
// e^(x - largest), in blocks, so that no sum has more than some hundred terms.

#include <cmath>

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 64 * LANES, GROUP = 8 * LANES;

inline bool is_any_above(Vec values, float limit) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    const IVec is_above = values > all(limit);
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= is_above[lane];
    return any != 0;
#endif
}

// Puts a value into a row of the best, which is sorted, of equals the earlier first.
inline void put_in(float* best, int64_t* ids, int64_t num_top, float value, int64_t id) {
    int64_t place = num_top - 1;
    for (; place > 0 && best[place - 1] < value; place--) {
        best[place] = best[place - 1];
        ids[place] = ids[place - 1];
    }
    best[place] = value;
    ids[place] = id;
}

void find_best(const float* row, int64_t vocab, int64_t num_top, float* best, int64_t* ids) {
    int64_t i = 0;
    for (; i < num_top; i++) put_in(best, ids, i + 1, row[i], i);  // whatever they are
    const auto look_at = [&](int64_t end) {
        for (; i < end; i++)
            if (row[i] > best[num_top - 1])
                put_in(best, ids, num_top, row[i], i);
    };
    while (i + GROUP <= vocab) {
        Vec most = all(-INFINITY);
        for (int j = 0; j < GROUP; j += LANES) {
            const Vec values = load(row + i + j);
            most = values > most ? values : most;  // which a nan is not
        }
        if (is_any_above(most, best[num_top - 1]))
            look_at(i + GROUP);
        else
            i += GROUP;
    }
    look_at(vocab);
}

float normalizer_of(const float* row, int64_t vocab, float largest) {
    if (!std::isfinite(largest)) {
        for (int64_t i = 0; i < vocab; i++)
            if (std::isnan(row[i])) return row[i];
        return largest > 0 ? NAN : largest;  // no token has a logprob beside +inf
    }
    Vec total = {};
    int64_t i = 0;
    while (i + LANES <= vocab) {
        Vec sum = {};
        const int64_t end = i + BLOCK < vocab ? i + BLOCK : vocab;
        for (; i + LANES <= end; i += LANES) sum += exp_of(load(row + i) - largest);
        total += sum;
    }
    if (i < vocab) {
        Vec rest = all(-INFINITY);
        for (int lane = 0; lane < vocab - i; lane++) rest[lane] = row[i + lane];
        const Vec terms = exp_of(rest - largest);
        for (int lane = 0; lane < vocab - i; lane++) total[lane] += terms[lane];
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return largest + std::log(sum);
}

}  // namespace

// logits: (rows, vocab); normalizers: (rows,), the log of the sum of exponentials, nan where a logit
// is nan or +inf; best and best_ids: (rows, num_top), best first, 1 <= num_top <= vocab.
extern "C" void fminfer_score(const float* logits, int64_t rows, int64_t vocab, int64_t num_top,
                              float* normalizers, float* best, int64_t* best_ids,
                              int num_threads) {
    for_pieces(num_threads, rows, [&](int64_t r, int) {
        const float* row = logits + r * vocab;
        find_best(row, vocab, num_top, best + r * num_top, best_ids + r * num_top);
        normalizers[r] = normalizer_of(row, vocab, best[r * num_top]);
    });
}

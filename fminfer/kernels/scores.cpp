// From logits to normalizers and the best tokens, on the CPU: each row is read while it is near.
//
// The first pass keeps the best `num_top` of a row, of equals the lowest ids; the second sums
// e^(x - largest), in blocks, so that no sum has more than some hundred terms.

#include <cmath>

#include "vectors.h"

namespace {

constexpr int BLOCK = 64 * LANES;

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
    for (; i + LANES <= vocab; i += LANES) {
        const IVec is_better = load(row + i) > all(best[num_top - 1]);
        bool is_any = false;
        for (int lane = 0; lane < LANES; lane++) is_any |= is_better[lane] != 0;
        if (!is_any) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (row[i + lane] > best[num_top - 1])
                put_in(best, ids, num_top, row[i + lane], i + lane);
    }
    for (; i < vocab; i++)
        if (row[i] > best[num_top - 1]) put_in(best, ids, num_top, row[i], i);
}

float normalizer_of(const float* row, int64_t vocab, float largest) {
    if (!std::isfinite(largest)) {
        for (int64_t i = 0; i < vocab; i++)
            if (std::isnan(row[i])) return row[i];
        return largest;
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
        std::memcpy(&rest, row + i, (vocab - i) * sizeof(float));
        const Vec terms = exp_of(rest - largest);
        for (int lane = 0; lane < vocab - i; lane++) total[lane] += terms[lane];
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return largest + std::log(sum);
}

}  // namespace

// logits: (rows, vocab); normalizers: (rows,), the log of the sum of exponentials, nan where a
// logit is; best and best_ids: (rows, num_top), best first, 1 <= num_top <= vocab.
extern "C" void fminfer_score(const float* logits, int64_t rows, int64_t vocab, int64_t num_top,
                              float* normalizers, float* best, int64_t* best_ids, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits + r * vocab;
        find_best(row, vocab, num_top, best + r * num_top, best_ids + r * num_top);
        normalizers[r] = normalizer_of(row, vocab, best[r * num_top]);
    }
}

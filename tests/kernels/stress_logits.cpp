// What becomes of logits: draws, normalizers, and the best tokens.
#include <algorithm>

#include "stress.h"

extern "C" {
int fminfer_draw(const float* logits, int64_t vocab, int64_t first, int64_t count,
                 const int64_t* rows, const float* temperature, const float* top_p, const int64_t* top_k,
                 const float* min_p, const int64_t* noise, int64_t* ids, int num_threads);
void fminfer_score(const float* logits, int64_t rows, int64_t vocab, int64_t num_top,
                   float* normalizers, float* best, int64_t* best_ids, int num_threads);
}

namespace stress {

namespace {

// Logits of which many are equal, some hidden, and in some rows one is nan or infinite.
struct Logits {
    explicit Logits(Random& random)
        : rows(random.from(1, 8)), vocab(random.from(1, random.is_so() ? 40 : 5000)) {
        for (int64_t i = 0; i < rows * vocab; i++)
            values.push_back(random.from(0, 9) == 0 ? -INFINITY : 8 * random.number());
        for (int64_t r = 0; r < rows; r++) {
            const float odd[] = {NAN, INFINITY, -INFINITY};
            const int64_t kind = random.from(0, 9);
            if (kind < 3) row(r)[random.from(0, vocab - 1)] = odd[kind];
            if (kind == 3) std::fill_n(row(r), vocab, -INFINITY);
        }
    }
    float* row(int64_t r) { return values.data() + r * vocab; }

    int64_t rows, vocab;
    std::vector<float> values;
};

// What a row draws is none that one of its filters leaves out.
void check_drawn(const float* row, int64_t vocab, int64_t id, float temperature, int64_t top_k,
                 float min_p) {
    check(id >= 0 && id < vocab, "a token that is not there");
    float largest = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) {
        if (std::isnan(row[i])) return check(id == i, "a row of nan does not draw the first");
        largest = row[i] > largest ? row[i] : largest;
    }
    if (std::isinf(largest)) return check(row[id] == largest, "a row draws no infinite token");
    int64_t higher = 0;
    for (int64_t i = 0; i < vocab; i++) higher += row[i] > row[id];
    check(std::isfinite(row[id]), "a hidden token is drawn");
    check(top_k <= 0 || higher < top_k, "a token that is not in top_k is drawn");
    const double weight = std::exp((double(row[id]) - largest) / temperature);
    check(weight > 0.999 * min_p, "a token below min_p is drawn");
}

uint32_t mix(uint32_t bits) {
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

// Without filters: noise for every token, and the best one.
void check_winner(const float* row, int64_t vocab, int64_t first, int64_t id, float temperature,
                  int64_t noise) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) largest = row[i] > largest ? row[i] : largest;
    if (std::isnan(row[id]) || std::isinf(largest)) return;
    int64_t best = 0;
    double most = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) {
        const uint32_t bits = mix(mix(uint32_t(first + i) ^ uint32_t(noise)) ^ uint32_t(noise >> 32));
        const double uniform = (bits + 0.5) / 0x1p32;
        const double score = (row[i] - largest) / temperature - std::log(-std::log(1 - uniform));
        if (score > most) {
            most = score;
            best = i;
        }
    }
    check(id == best, "a token that is not the winner is drawn");
}

void draw(Random& random, bool is_without_memory) {
    Logits logits(random);
    std::vector<int64_t> chosen, top_k, noise;
    std::vector<float> temperature, top_p, min_p;
    for (int64_t r = 0; r < logits.rows; r++) {
        if (r == 0 || random.is_so()) chosen.push_back(r);
        temperature.push_back(random.from(1, 200) / 100.0f);
        top_p.push_back(random.is_so() ? 1 : random.from(1, 100) / 100.0f);
        top_k.push_back(random.is_so() ? 0 : random.from(1, logits.vocab + 1));
        min_p.push_back(random.is_so() ? 0 : random.from(0, 100) / 100.0f);
        noise.push_back(int64_t(uint64_t(random()) << 32 | random()));
    }
    const int64_t first = random.is_so() ? 0 : random.from(1, 200000);
    std::vector<int64_t> ids(chosen.size(), -1), alone = ids;
    const auto run = [&](int num_threads, std::vector<int64_t>& to) {
        return fminfer_draw(logits.values.data(), logits.vocab, first, int64_t(chosen.size()),
                            chosen.data(), temperature.data(), top_p.data(), top_k.data(),
                            min_p.data(), noise.data(), to.data(), num_threads);
    };
    if (is_without_memory) {
        has_memory = false;
        const bool is_told = run(MANY, ids) && run(FEW, ids);
        has_memory = true;
        check(is_told, "a draw needs no memory");
    }
    check(run(MANY, ids) == 0 && run(FEW, alone) == 0, "there is no memory for a draw");
    check(ids == alone, "threads change a draw");
    for (size_t i = 0; i < chosen.size(); i++) {
        const int64_t r = chosen[i];
        const float* row = logits.row(r);
        check_drawn(row, logits.vocab, ids[i], temperature[r], top_k[r], min_p[r]);
        if (top_p[r] == 1 && (top_k[r] == 0 || top_k[r] >= logits.vocab) && min_p[r] == 0)
            check_winner(row, logits.vocab, first, ids[i], temperature[r], noise[r]);
    }
}

void check_scored(const float* row, int64_t vocab, float normalizer, const float* best,
                  const int64_t* ids, int64_t num_top) {
    double total = 0;
    bool is_sound = true;
    for (int64_t i = 0; i < vocab; i++) {
        total += std::exp(double(row[i]));
        is_sound &= !std::isnan(row[i]) && row[i] < INFINITY;
    }
    if (!is_sound) return check(std::isnan(normalizer), "a normalizer hides what is odd");
    if (total == 0) check(normalizer == -INFINITY, "a normalizer of nothing");
    else check(is_near(normalizer, std::log(total), FLOAT32), "a normalizer is wrong");
    std::vector<int64_t> order(vocab);
    for (int64_t i = 0; i < vocab; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    for (int64_t i = 0; i < num_top; i++)
        check(ids[i] == order[i] && best[i] == row[order[i]], "the best tokens are others");
}

void score(Random& random) {
    Logits logits(random);
    const int64_t num_top = std::min<int64_t>(logits.vocab, random.from(1, 64));
    std::vector<float> normalizers(logits.rows), best(logits.rows * num_top);
    std::vector<int64_t> ids(logits.rows * num_top);
    std::vector<float> alone_normalizers = normalizers, alone_best = best;
    std::vector<int64_t> alone_ids = ids;
    fminfer_score(logits.values.data(), logits.rows, logits.vocab, num_top, normalizers.data(),
                  best.data(), ids.data(), MANY);
    fminfer_score(logits.values.data(), logits.rows, logits.vocab, num_top,
                  alone_normalizers.data(), alone_best.data(), alone_ids.data(), FEW);
    const auto are_same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    check(are_same(normalizers, alone_normalizers) && are_same(best, alone_best) &&
              ids == alone_ids,
          "threads change scores");
    for (int64_t r = 0; r < logits.rows; r++)
        check_scored(logits.row(r), logits.vocab, normalizers[r], best.data() + r * num_top,
                     ids.data() + r * num_top, num_top);
}

}  // namespace

void run_logits() {
    Random random(8);
    for (int i = 0; i < rounds(60); i++) {
        draw(random, i % 10 == 0);
        score(random);
    }
}

}  // namespace stress

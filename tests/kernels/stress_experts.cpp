// Mixtures of experts, with one thread and with three.
#include "stress_weights.h"

extern "C" int fminfer_mix(const Mixture* a);

namespace stress {

namespace {

double number_of(double x, int64_t kind) {  // of activations.h
    if (kind == 3) return x * (1 + std::erf(x / std::sqrt(2))) / 2;
    if (kind == 4) return x / (1 + std::exp(-1.702 * x));
    const double inner = 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    return kind == 2 ? std::fmax(x, 0) : x / (1 + std::exp(kind == 0 ? -x : -inner));
}

// The MLPs of all experts, and what they are packed as.
struct Experts {
    Experts(Random& random, int64_t hidden, int64_t size, int64_t of_up, int64_t of_down)
        : num(random.from(1, 6)),
          hidden(hidden),
          size(size),
          parts(random.from(1, 2)),
          up(random, of_up, num, parts, size, hidden),
          down(random, of_down, num, 1, hidden, size),
          limit(parts == 2 && random.is_so() ? 0.25f : 0) {
        if (random.is_so()) return;
        for (int64_t i = 0; i < num * parts * size; i++) up_bias.push_back(random.number());
        for (int64_t i = 0; i < num * hidden; i++) down_bias.push_back(random.number());
    }

    // One number of what an expert gives for hidden states that begin at x[from].
    double give(const Numbers& x, int64_t from, int64_t expert, int64_t output, int64_t kind) const {
        double sum = 0;
        for (int64_t s = 0; s < size; s++) {
            double inner[2] = {0, 0};
            for (int64_t part = 0; part < parts; part++) {
                const int64_t row = (expert * parts + part) * size + s;
                if (!up_bias.empty()) inner[part] = up_bias[row];
                for (int64_t h = 0; h < hidden; h++)
                    inner[part] += double(x.at(from + h)) * up.at(row, h);
            }
            if (limit > 0) {
                inner[0] = std::fmin(inner[0], limit);
                inner[1] = std::fmax(std::fmin(inner[1], limit), -limit) + 1;
            }
            const double bent = number_of(inner[0], kind) * (parts == 2 ? inner[1] : 1);
            sum += bent * down.at(expert * hidden + output, s);
        }
        return down_bias.empty() ? sum : sum + down_bias[expert * hidden + output];
    }

    int64_t num, hidden, size, parts;
    Weight up, down;
    float limit;
    std::vector<float> up_bias, down_bias;  // or none
};

const float* data_of(const std::vector<float>& bias) {
    return bias.empty() ? nullptr : bias.data();
}

void mix(Random& random, const Experts& experts, int64_t type) {
    const int64_t tokens = random.from(0, 60), top_k = random.from(1, experts.num);
    const int64_t kind = random.from(0, 4), hidden = experts.hidden;
    const Numbers x(random, tokens * hidden, type);
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < tokens * top_k; i++) chosen.push_back((i + random.from(0, 1)) % experts.num);
    const std::vector<float> shares(tokens * top_k, 0.25f);
    Numbers out(tokens * hidden, type), alone = out;
    for (int64_t num_threads : {MANY, FEW}) {
        Numbers space(tokens * top_k * (hidden + experts.size), FLOAT32);
        Numbers& to = num_threads == FEW ? alone : out;
        const Mixture a = {x.data(), experts.up.packed(), experts.down.packed(), chosen.data(),
                           shares.data(), to.data(), static_cast<float*>(space.data()),
                           data_of(experts.up_bias), data_of(experts.down_bias), tokens, top_k,
                           experts.num, hidden, experts.size, experts.parts == 2, kind, type,
                           num_threads, experts.limit};
        check(fminfer_mix(&a) == 0, "there is no memory for a mixture");
    }
    check(out == alone, "threads change a mixture");
    for (int64_t i = 0; i < out.count; i += 1 + out.count / 5) {
        double wanted = 0, largest = 1;
        for (int64_t k = 0; k < top_k; k++) {
            const int64_t expert = chosen[i / hidden * top_k + k];
            const double one = experts.give(x, i / hidden * hidden, expert, i % hidden, kind);
            wanted += shares[0] * one;
            largest = std::fmax(largest, std::fabs(one));
        }
        // 16 bits round what stands between the products.
        const double error = std::fabs(out.at(i) - wanted);
        check(error <= (type == FLOAT32 ? 1e-4 : 0.05) * largest, "a mixture is wrong");
    }
}

}  // namespace

void run_experts() {
    Random random(8);
    for (int i = 0; i < rounds(12); i++) {
        const int64_t hidden = 2 * random.from(1, 70), size = 2 * random.from(1, 70);
        mix(random, {random, hidden, size, FLOAT32, FLOAT32}, FLOAT32);
        mix(random, {random, hidden, size, BFLOAT16, BFLOAT16}, FLOAT32);
        mix(random, {random, hidden, size, BFLOAT16, BFLOAT16}, BFLOAT16);
    }
    for (const Kind& kind : KINDS) {
        const int64_t least = kind.inputs ? kind.inputs : 32;
        const int64_t hidden = least * random.from(1, least == 32 ? 6 : 1);
        const int64_t size = 32 * random.from(1, 8);
        const int64_t of_down = random_type(random, size, BFLOAT16);
        for (int64_t type : {FLOAT32, BFLOAT16})
            mix(random, {random, hidden, size, kind.number, of_down}, type);
    }
}

}  // namespace stress

// Attention, beside one that is written down as plainly as can be.
#include "stress_step.h"

namespace stress {

namespace {

// Numbers of each head and token, in one of the layouts in which they come. Between them is nan.
struct Asked {
    Asked(Random& random, int64_t heads, int64_t tokens, int64_t dim, int64_t type)
        : is_by_head(random.is_so()),
          head(is_by_head ? tokens * dim : dim),
          token(is_by_head ? dim : heads * dim + random.from(0, 3)),
          numbers((heads - 1) * head + (tokens - 1) * token + dim, type) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t d = 0; d < dim; d++)
                    numbers.put(h * head + t * token + d, random.number());
    }

    bool is_by_head;
    int64_t head, token;
    Numbers numbers;
};

// What a query should find: one number for each of head_dim.
std::vector<double> attend(const Step& step, const Asked& query, int64_t row, int64_t token,
                           int64_t position, int64_t head) {
    const Arguments& a = step.arguments;
    const int64_t kv_head = head / (a.heads / a.kv_heads), first = step.first_key(position);
    std::vector<double> weights, sums(a.head_dim);
    double largest = -INFINITY, total = 0;
    for (int64_t p = first; p <= position; p++) {
        const int64_t key = step.place(row, p, kv_head), from = head * query.head + token * query.token;
        double score = 0;
        for (int64_t d = 0; d < a.head_dim; d++)
            score += double(query.numbers.at(from + d)) * step.keys.at(key + d);
        score *= a.scaling;
        if (a.softcap > 0) score = a.softcap * std::tanh(score / a.softcap);
        if (a.slopes != nullptr) score -= a.slopes[head] * double(position - p);
        weights.push_back(score);
        largest = std::max(largest, score);
    }
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    if (a.sinks != nullptr) total += std::exp(a.sinks[head] - largest);
    for (int64_t p = first; p <= position; p++)
        for (int64_t d = 0; d < a.head_dim; d++)
            sums[d] += weights[p - first] / total * step.values.at(step.place(row, p, kv_head) + d);
    return sums;
}

// Every fourth query's result: plainly written, attention takes long.
void compare(const Step& step, const Asked& query, const Numbers& out) {
    const Arguments& a = step.arguments;
    for (int64_t r = 0; r < step.num_rows(); r++)
        for (int64_t t = 0; t < step.rows[5 * r + 1]; t++)
            for (int64_t h = (r + t) % 4; h < a.heads; h += 4) {
                const int64_t token = step.rows[5 * r] + t, position = step.rows[5 * r + 2] + t;
                const std::vector<double> wanted = attend(step, query, r, token, position, h);
                for (int64_t d = 0; d < a.head_dim; d++)
                    check(is_near(out.at((token * a.heads + h) * a.head_dim + d), wanted[d], a.type),
                          "attention is wrong");
            }
}

void attend(Random& random, int64_t type, int64_t kv_type) {
    Step step(random, type, kv_type, 1);
    Arguments& a = step.arguments;
    const Asked query(random, a.heads, a.num_tokens, a.head_dim, type);
    Asked keys(random, a.kv_heads, a.num_tokens, a.head_dim, type);
    Asked values(random, a.kv_heads, a.num_tokens, a.head_dim, type);
    if (random.is_so()) {  // the last token's are nan, which those before it must not see
        const int64_t head = random.from(0, a.kv_heads - 1), last = a.num_tokens - 1;
        keys.numbers.put(head * keys.head + last * keys.token, NAN);
        values.numbers.put(head * values.head + last * values.token, NAN);
    }
    a.query = query.numbers.data();
    a.query_head = query.head;
    a.query_token = query.token;
    a.new_keys = keys.numbers.data();
    a.new_key_head = keys.head;
    a.new_key_token = keys.token;
    a.new_values = values.numbers.data();
    a.new_value_head = values.head;
    a.new_value_token = values.token;
    Numbers out(a.num_tokens * a.heads * a.head_dim, type), alone = out;
    a.out = out.data();
    a.num_threads = MANY;
    has_memory = false;
    const int is_told = fminfer_attention(&a);
    has_memory = true;
    check(is_told, "attention needs no memory");
    check(fminfer_attention(&a) == 0, "there is no memory for attention");
    a.out = alone.data();
    a.num_threads = FEW;
    check(fminfer_attention(&a) == 0, "there is no memory for attention");
    check(out == alone, "threads change attention");
    compare(step, query, out);
}

}  // namespace

void run_attention() {
    Random random(6);
    for (int i = 0; i < rounds(5); i++) {
        for (int64_t type : {FLOAT32, BFLOAT16})
            for (int64_t kv_type : {FLOAT32, BFLOAT16, FLOAT16}) attend(random, type, kv_type);
        for (int j = 0; j < 4; j++) attend(random, BFLOAT16, BFLOAT16);  // has the most bodies
    }
}

}  // namespace stress

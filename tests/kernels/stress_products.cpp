// Products with packed weights of one type or of several, some with sums that stay as they are.
#include "stress_weights.h"

namespace stress {

namespace {

// A weight of parts, one below the other.
struct Parts {
    Parts(Random& random, int64_t outputs, int64_t inputs, const std::vector<int64_t>& types) {
        const int64_t num = types.size();
        for (int64_t i = 0; i < num; i++) {
            const int64_t first = outputs * i / num, last = outputs * (i + 1) / num;
            weights.emplace_back(random, types[i], 1, 1, last - first, inputs);
        }
        for (const Weight& weight : weights) {
            packed.push_back(weight.packed());
            for (int64_t o = 0; o < weight.outputs; o++) rows.push_back({&weight, o});
        }
    }

    std::vector<Weight> weights;
    std::vector<Packed> packed;
    std::vector<std::pair<const Weight*, int64_t>> rows;
};

// Some of the products, with those summed in float64.
void compare(const Numbers& x, const Parts& weight, const float* bias, const Numbers& out,
             int64_t inputs, int64_t outputs) {
    for (int64_t i = 0; i < out.count; i += 7) {
        const int64_t row = i / outputs, o = i % outputs;
        double sum = bias[o];
        for (int64_t n = 0; n < inputs; n++)
            sum += double(x.at(row * inputs + n)) * weight.rows[o].first->at(weight.rows[o].second, n);
        check(is_near(out.at(i), sum, out.type), "a product is wrong");
    }
}

void multiply(Random& random, int64_t inputs, const std::vector<int64_t>& types, int64_t type,
              int64_t out_type, bool is_without_memory) {
    const int64_t rows = is_without_memory ? 200 : random.from(1, random.is_so() ? 6 : 70);
    const int64_t outputs = random.from(int64_t(types.size()), 150);
    const Parts weight(random, outputs, inputs, types);
    const Numbers x(random, rows * inputs, type);
    const std::vector<float> bias(outputs + fminfer_panel(), 0.5f);
    Numbers out(rows * outputs, out_type), alone = out;
    const auto run = [&](int64_t num_threads, Numbers& to) {
        const Product product = {x.data(),
                                 weight.packed.data(),
                                 bias.data(),
                                 to.data(),
                                 int64_t(types.size()),
                                 rows,
                                 inputs,
                                 outputs,
                                 type,
                                 out_type,
                                 num_threads};
        return fminfer_multiply(&product);
    };
    if (is_without_memory) {
        has_memory = false;
        bool is_told = true;
        for (int64_t num_threads : {MANY, FEW}) {  // which may have enough from an earlier product
            const int64_t before = num_refused;
            const bool is_refused = run(num_threads, out) != 0;
            is_told &= is_refused == (num_refused > before);
        }
        has_memory = true;
        check(is_told, "a product does not tell that there is no memory");
    }
    check(run(MANY, out) == 0 && run(FEW, alone) == 0, "there is no memory for a product");
    check(out == alone, "threads change a product");
    compare(x, weight, bias.data(), out, inputs, outputs);
}

}  // namespace

void run_products() {
    Random random(5);
    for (int i = 0; i < rounds(40); i++) {
        const int64_t inputs = 2 * random.from(1, 60);
        multiply(random, inputs, {FLOAT32}, FLOAT32, FLOAT32, i == 0);
        check(num_refused > 0, "a product needs no memory");
        multiply(random, inputs, {BFLOAT16}, FLOAT32, FLOAT32, false);
        for (int64_t out_type : {BFLOAT16, FLOAT32})
            multiply(random, inputs, {BFLOAT16}, BFLOAT16, out_type, false);
    }
    for (int i = 0; i < rounds(4); i++)
        for (const Kind& kind : KINDS) {
            const int64_t least = kind.inputs ? kind.inputs : 32;
            const int64_t inputs = least * random.from(1, least == 32 ? 24 : 5);
            const bool is_first = i == 0 && &kind == &KINDS[0];
            multiply(random, inputs, {kind.number}, FLOAT32, FLOAT32, is_first);
            for (int64_t out_type : {BFLOAT16, FLOAT32})
                multiply(random, inputs, {kind.number}, BFLOAT16, out_type, is_first);
            std::vector<int64_t> types = {kind.number};
            for (int64_t more = random.from(1, 3); more > 0; more--)
                types.push_back(random_type(random, inputs, BFLOAT16));
            const int64_t type = random.is_so() ? FLOAT32 : BFLOAT16;
            multiply(random, inputs, types, type, type, false);
        }
}

}  // namespace stress

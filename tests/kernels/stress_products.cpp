// Products with packed weights, and logits.
#include "stress.h"

extern "C" {
int64_t fminfer_panel();
void fminfer_pack(const uint32_t* weight, int64_t outputs, int64_t units, uint32_t* packed,
                  int64_t num_threads);
int64_t fminfer_head_space(int64_t rows, int64_t inputs, int64_t num_threads);
void fminfer_head(const Head* a);
}

namespace stress {

namespace {

// Some of the products, with those summed in float64.
void compare(const Numbers& x, const Numbers& weight, const float* bias, const Numbers& out,
             int64_t inputs, int64_t outputs) {
    for (int64_t i = 0; i < out.count; i += 7) {
        const int64_t row = i / outputs, o = i % outputs;
        double sum = bias[o];
        for (int64_t n = 0; n < inputs; n++)
            sum += double(x.at(row * inputs + n)) * weight.at(o * inputs + n);
        check(is_near(out.at(i), sum, out.type), "a product is wrong");
    }
}

void multiply(Random& random, int64_t weight_type, int64_t type, bool is_without_memory) {
    const int64_t rows = is_without_memory ? 200 : random.from(1, 70);
    const int64_t outputs = random.from(1, 150), inputs = 2 * random.from(1, 60);
    const int64_t panel = fminfer_panel(), of_panels = (outputs + panel - 1) / panel * panel;
    const Numbers weight(random, outputs * inputs, weight_type), x(random, rows * inputs, type);
    Numbers packed(of_panels * inputs, weight_type);
    fminfer_pack(static_cast<const uint32_t*>(weight.data()), outputs,
                 weight_type == FLOAT32 ? inputs : inputs / 2,
                 static_cast<uint32_t*>(packed.data()), MANY);
    const std::vector<float> bias(of_panels, 0.5f);
    Numbers out(rows * outputs, type), alone = out;
    const auto run = [&](int64_t num_threads, Numbers& to) {
        const Product product = {x.data(), packed.data(), bias.data(), to.data(),   rows,
                                 inputs,   outputs,       type,        weight_type, num_threads};
        return fminfer_multiply(&product);
    };
    if (is_without_memory) {
        has_memory = false;
        const int is_told = run(MANY, out) && run(FEW, out);
        has_memory = true;
        check(is_told, "a product needs no memory");
    }
    check(run(MANY, out) == 0 && run(FEW, alone) == 0, "there is no memory for a product");
    check(out == alone, "threads change a product");
    compare(x, weight, bias.data(), out, inputs, outputs);
}

void find_logits(Random& random, int64_t weight_type, int64_t type) {
    const int64_t rows = random.from(1, 40), outputs = random.from(1, 300);
    const int64_t inputs = random.from(1, 300);
    const Numbers weight(random, outputs * inputs, weight_type), x(random, rows * inputs, type);
    const std::vector<float> bias(outputs, 0.5f);
    Numbers out(rows * outputs, FLOAT32), alone = out;
    for (int64_t num_threads : {MANY, FEW}) {
        std::vector<uint8_t> space(fminfer_head_space(rows, inputs, num_threads), 0xFF);
        Numbers& to = num_threads == FEW ? alone : out;
        const Head head = {x.data(), weight.data(), bias.data(),
                           static_cast<float*>(to.data()), space.data(), rows, inputs,
                           outputs, type, weight_type, num_threads};
        fminfer_head(&head);
    }
    check(out == alone, "threads change logits");
    compare(x, weight, bias.data(), out, inputs, outputs);
}

}  // namespace

void run_products() {
    Random random(5);
    for (int i = 0; i < 40; i++) {
        multiply(random, FLOAT32, FLOAT32, i == 0);
        multiply(random, BFLOAT16, FLOAT32, false);
        multiply(random, BFLOAT16, BFLOAT16, false);
        for (int types = 0; types < 4; types++) find_logits(random, types / 2, types % 2);
    }
}

}  // namespace stress

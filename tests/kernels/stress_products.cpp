// Products with packed weights, some with sums that stay as they are.
#include "stress.h"

extern "C" {
int64_t fminfer_panel();
void fminfer_pack(const uint32_t* weight, int64_t outputs, int64_t units, uint32_t* packed,
                  int64_t num_threads);
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

void multiply(Random& random, int64_t weight_type, int64_t type, int64_t out_type,
              bool is_without_memory) {
    const int64_t rows = is_without_memory ? 200 : random.from(1, 70);
    const int64_t outputs = random.from(1, 150), inputs = 2 * random.from(1, 60);
    const int64_t panel = fminfer_panel(), of_panels = (outputs + panel - 1) / panel * panel;
    const Numbers weight(random, outputs * inputs, weight_type), x(random, rows * inputs, type);
    Numbers packed(of_panels * inputs, weight_type);
    fminfer_pack(static_cast<const uint32_t*>(weight.data()), outputs,
                 weight_type == FLOAT32 ? inputs : inputs / 2,
                 static_cast<uint32_t*>(packed.data()), MANY);
    const std::vector<float> bias(of_panels, 0.5f);
    Numbers out(rows * outputs, out_type), alone = out;
    const auto run = [&](int64_t num_threads, Numbers& to) {
        const Product product = {x.data(), packed.data(), bias.data(), to.data(), rows,       inputs,
                                 outputs,  type,          weight_type, out_type,  num_threads};
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

}  // namespace

void run_products() {
    Random random(5);
    for (int i = 0; i < 40; i++) {
        multiply(random, FLOAT32, FLOAT32, FLOAT32, i == 0);
        multiply(random, BFLOAT16, FLOAT32, FLOAT32, false);
        for (int64_t out_type : {BFLOAT16, FLOAT32})
            multiply(random, BFLOAT16, BFLOAT16, out_type, false);
    }
}

}  // namespace stress

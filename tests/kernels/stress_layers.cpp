// Norms, rotary positions, gated activations, and whole layers.
#include <list>

#include "stress_step.h"
#include "stress_sums.h"
#include "stress_weights.h"
#include "whole_layers.cpp"  // the structs of a layer are its own

namespace stress {

namespace {

// Rows (outer, inner) with nan between them.
struct Apart {
    Apart(Random& random, int64_t type)
        : outer(random.from(1, 30)),
          inner(random.from(1, 4)),
          width(random.from(2, 600)),
          inner_step(width + random.from(0, 3)),
          outer_step(inner * inner_step + random.from(0, 3)),
          x((outer - 1) * outer_step + (inner - 1) * inner_step + width, type),
          out(outer * inner * width, type) {
        each([&](int64_t, int64_t from, int64_t, int64_t) { x.put(from, random.number()); });
    }

    // Calls use(place in out, place in x, row of outer, element).
    template <typename Use>
    void each(Use use) {
        for (int64_t i = 0; i < out.count; i++) {
            const int64_t row = i / width, o = row / inner, j = row % inner, e = i % width;
            use(i, o * outer_step + j * inner_step + e, o, e);
        }
    }

    // Calls run(Rows) with many threads and with one.
    template <typename Run>
    void run_both(Run run) {
        Numbers alone = out;
        for (int64_t num_threads : {MANY, FEW}) {
            void* const to = num_threads == FEW ? alone.data() : out.data();
            const Rows r = {x.data(),   to,       outer, inner, width, outer_step,
                            inner_step, out.type, num_threads};
            run(&r);
        }
        check(out == alone, "threads change a part of a layer");
    }

    int64_t outer, inner, width, inner_step, outer_step;
    Numbers x, out;
};

void norm(Random& random, int64_t type, bool is_rms) {
    Apart rows(random, type);
    const Numbers weight(random, rows.width, type), bias(random, rows.width, type);
    const Numbers other(random, rows.out.count, type);
    const bool adds = random.is_so();
    Numbers sum(rows.out.count, type);
    rows.run_both([&](const Rows* r) {
        const void* const more = adds ? other.data() : nullptr;
        is_rms ? fminfer_rms_norm(r, weight.data(), 1e-5f, 1, more, sum.data())
               : fminfer_layer_norm(r, weight.data(), bias.data(), 1e-5f, more, sum.data());
    });
    std::vector<double> x(rows.out.count);
    rows.each([&](int64_t i, int64_t from, int64_t, int64_t) {
        x[i] = adds ? sum.at(i) : rows.x.at(from);
        if (adds) check(is_near(sum.at(i), rows.x.at(from) + other.at(i), type), "a sum is wrong");
    });
    for (int64_t first = 0; first < rows.out.count; first += rows.width) {
        double mean = 0, squares = 0;
        for (int64_t e = 0; e < rows.width; e++) mean += is_rms ? 0 : x[first + e] / rows.width;
        for (int64_t e = 0; e < rows.width; e++) squares += std::pow(x[first + e] - mean, 2);
        const double factor = 1 / std::sqrt(squares / rows.width + 1e-5);
        for (int64_t e = 0; e < rows.width; e++) {
            const double scaled = (x[first + e] - mean) * factor;
            const double wanted = is_rms ? scaled * (weight.at(e) + 1)
                                         : scaled * weight.at(e) + bias.at(e);
            check(is_near(rows.out.at(first + e), wanted, type), "a norm is wrong");
        }
    }
}

void rotate(Random& random, int64_t type) {
    Apart rows(random, type);
    const int64_t half = random.from(1, rows.width / 2), turned = 2 * half;
    const Numbers cos(random, rows.outer * half, FLOAT32);
    const Numbers sin(random, rows.outer * half, FLOAT32);
    rows.run_both(
        [&](const Rows* r) { fminfer_rotate(r, cos.floats(), sin.floats(), turned); });
    rows.each([&](int64_t i, int64_t from, int64_t o, int64_t e) {
        double wanted = rows.x.at(from);
        if (e < turned) {
            const double other = e < half ? -rows.x.at(from + half) : rows.x.at(from - half);
            const int64_t at = o * half + e % half;
            wanted = wanted * cos.at(at) + other * sin.at(at);
        }
        check(is_near(rows.out.at(i), wanted, type), "a rotary position is wrong");
    });
}

void gate(Random& random, int64_t type, int64_t kind) {
    Apart rows(random, type);
    const bool has_up = rows.inner == 1;
    const Numbers up(random, rows.x.count, type);
    rows.run_both([&](const Rows* r) { fminfer_gate(r, has_up ? up.data() : nullptr, kind); });
    rows.each([&](int64_t i, int64_t from, int64_t, int64_t) {
        const double x = rows.x.at(from), by = kind == 0 ? x : 1.5957691216 * (x + 0.044715 * x * x * x);
        const double bent = kind == 2 ? std::max(x, 0.0) : x / (1 + std::exp(-by));
        check(is_near(rows.out.at(i), has_up ? bent * up.at(from) : bent, type), "a gate is wrong");
    });
}

// The tensors of a layer, of random sizes, over the cache of a step. has_blocks: products are of
// blocks where their inputs allow it.
class RandomLayer {
   public:
    RandomLayer(Random& random, Step& step, int64_t type, int64_t weight_type, bool has_blocks)
        : random(random), type(type), weight_type(weight_type), has_blocks(has_blocks) {
        const Arguments& a = step.arguments;
        hidden = has_blocks ? 32 * random.from(1, 8) : 2 * random.from(1, 50);
        const int64_t dim = a.head_dim, gated = random.is_so() ? 2 : 1;
        const int64_t wide = has_blocks ? 32 * random.from(1, 8) : 2 * random.from(1, 250);
        layer.first = make_norm(hidden);
        layer.second = make_norm(hidden);
        turned = random.is_so() ? dim / 2 * 2 : 0;
        if (turned > 0 && random.is_so()) {
            layer.of_query = make_norm(dim, true);
            layer.of_key = make_norm(dim, true);
        }
        layer.qkv = make_linear(hidden, (a.heads + 2 * a.kv_heads) * dim);
        layer.out = make_linear(a.heads * dim, hidden);
        layer.up = make_linear(hidden, gated * wide);
        layer.down = make_linear(wide, hidden);
        layer.keys = step.keys.data();
        layer.values = step.values.data();
        layer.slopes = a.slopes;
        layer.head_step = dim;
        layer.key_at = a.heads * dim;
        layer.value_at = layer.key_at + a.kv_heads * dim;
        layer.activation = gated == 2 ? random.from(0, 1) : random.from(1, 2);
        layer.window = a.window;
        layer.scaling = a.scaling;
        layer.softcap = a.softcap;
    }

    Layer layer = {};
    int64_t hidden, turned;

   private:
    const void* keep(Numbers numbers) {
        tensors.push_back(std::move(numbers));
        return tensors.back().data();
    }

    Norm make_norm(int64_t width, bool is_rms = false) {
        const void* const weight = keep(Numbers(random, width, type));
        const bool has_bias = !is_rms && random.is_so();
        return {weight, has_bias ? keep(Numbers(random, width, type)) : nullptr, 1e-5f, 0};
    }

    Linear make_linear(int64_t inputs, int64_t outputs) {
        const int64_t num = has_blocks ? random.from(1, std::min<int64_t>(3, outputs)) : 1;
        std::vector<Packed> of_parts;
        for (int64_t i = 0; i < num; i++) {
            const int64_t first = outputs * i / num, last = outputs * (i + 1) / num;
            const int64_t own = has_blocks ? random_type(random, inputs, weight_type) : weight_type;
            weights.emplace_back(random, own, 1, 1, last - first, inputs);
            of_parts.push_back(weights.back().packed());
        }
        parts.push_back(std::move(of_parts));
        const Numbers bias(random, outputs + fminfer_panel(), FLOAT32);
        const void* const kept = random.is_so() ? keep(bias) : nullptr;
        return {parts.back().data(), static_cast<const float*>(kept), num, inputs, outputs};
    }

    Random& random;
    int64_t type, weight_type;
    bool has_blocks;
    std::vector<Numbers> tensors;
    std::list<Weight> weights;
    std::list<std::vector<Packed>> parts;
};

// A layer's numbers are tried beside its parts' elsewhere; here it is what it reads and writes.
void run_layer(Random& random, int64_t type, int64_t weight_type, int64_t kv_type,
               bool has_blocks = false) {
    Step step(random, type, kv_type, 2);  // products of 16 bits have inputs in pairs
    Arguments& a = step.arguments;
    const RandomLayer made(random, step, type, weight_type, has_blocks);
    const Layer& layer = made.layer;
    const Numbers x(random, a.num_tokens * made.hidden, type);
    const Numbers cos(random, a.num_tokens * made.turned / 2, FLOAT32), sin = cos;
    std::vector<int64_t> kept;
    for (int64_t token : step.wanted)
        if (random.is_so() || token == step.wanted.back()) kept.push_back(token);
    const bool keeps = int64_t(step.wanted.size()) < a.num_tokens || random.is_so();
    const int64_t num_kept = keeps ? int64_t(kept.size()) : a.num_tokens;
    Numbers out(num_kept * made.hidden, type), alone = out;
    // The only rank of a stage adds nothing to what it has.
    SharedMemory memory(1, 64 * random.from(1, 50));
    Sums sums = memory.rank(0);
    for (int64_t num_threads : {MANY, FEW}) {
        a.num_threads = num_threads;
        Numbers space(fminfer_layer_space(&layer) * a.num_tokens, type);
        Spent spent = {};
        const int failed = fminfer_layer(
            &layer, &a, made.turned ? cos.floats() : nullptr, made.turned ? sin.floats() : nullptr,
            made.turned, keeps ? kept.data() : nullptr, num_kept, x.data(),
            num_threads == FEW ? alone.data() : out.data(), nullptr, space.data(),
            num_threads == FEW ? &sums : nullptr, &spent);
        check(failed == 0 && spent.products > 0 && spent.attention > 0, "a layer failed");
    }
    check(out == alone, "threads change a layer");
    check(!out.has_nan(), "what nobody wrote reaches a layer's output");
}

}  // namespace

void run_layers() {
    Random random(7);
    for (int i = 0; i < rounds(8); i++) {
        for (int64_t type : {FLOAT32, BFLOAT16}) {
            norm(random, type, true);
            norm(random, type, false);
            rotate(random, type);
            for (int64_t kind = 0; kind < 3; kind++) gate(random, type, kind);
        }
        run_layer(random, FLOAT32, FLOAT32, FLOAT32);
        for (int64_t kv_type : {FLOAT32, BFLOAT16, FLOAT16})
            run_layer(random, FLOAT32, BFLOAT16, kv_type);
        run_layer(random, BFLOAT16, BFLOAT16, BFLOAT16);
        run_layer(random, FLOAT32, BFLOAT16, FLOAT32, true);
        run_layer(random, BFLOAT16, BFLOAT16, BFLOAT16, true);
    }
}

}  // namespace stress

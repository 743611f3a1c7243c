// Products of rows with a weight that was packed once (panels.h), summed in float32. Each thread
// goes through neighbours among the panels.
#include <algorithm>
#include <vector>

#include "blocks.h"

namespace {

constexpr int64_t WIDENED_ROWS = 2 * BLOCK_ROWS;  // of 16 bits that become floats at a time

template <typename T>
void finish_as(const Product& a, int64_t row, int64_t first, int64_t end, const float* sums) {
    T* out = static_cast<T*>(a.out) + row * a.outputs + first;
    const int64_t left = end - first;
    for (int n = 0; n < PANEL; n += LANES) {
        Vec sum = load(sums + n);
        if (a.bias != nullptr) sum += load(a.bias + first + n);
        if (left - n >= LANES) {
            store(out + n, sum);
        } else if (left > n) {
            T rounded[LANES];
            store(rounded, sum);
            std::memcpy(out + n, rounded, (left - n) * sizeof *out);
        }
    }
}

// Writes one row's sums of a panel that begins at output `first`, of outputs up to `end`.
inline void finish(const Product& a, int64_t row, int64_t first, int64_t end, const float* sums) {
    a.out_type == 0 ? finish_as<float>(a, row, first, end, sums)
                    : finish_as<uint16_t>(a, row, first, end, sums);
}

// Multiplies by a part of the weight, whose first output is `start`.
template <typename Way>
void multiply(const Product& a, const Packed& part, int64_t start, const Way& way,
              const typename Way::Number* x) {
    const int64_t panels = (part.outputs + PANEL - 1) / PANEL, size = way.panel_units(a.inputs);
    const uint32_t* const weight = static_cast<const uint32_t*>(part.weight);
    const int64_t blocks = (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t fair = std::max<int64_t>(1, panels * blocks / (4 * a.num_threads));
    const int64_t least = std::max<int64_t>(1, TASK_UNITS / size);
    const int64_t at_once = std::min<int64_t>({fair, least, panels});
    const int64_t tasks = (panels + at_once - 1) / at_once;
    for_stretches(a.num_threads, tasks * blocks, [&](int64_t i, int64_t stretch_end) {
        const int64_t b = i / tasks, t = i % tasks, end = panels * (t + 1) / tasks;
        const int64_t row = a.rows * b / blocks, num = a.rows * (b + 1) / blocks - row;
        const int64_t behind = i + 1 < stretch_end ? end % panels : end - 1;
        space.sums.resize(num * PANEL);
        for (int64_t p = panels * t / tasks; p < end; p++) {
            const uint32_t* const next = weight + (p + 1 < end ? p + 1 : behind) * size;
            const uint32_t* panel = weight + p * size;
            if (part.is_lent) {
                space.panel.resize(size);
                pack_panel(panel, part.outputs - p * PANEL, size / PANEL, space.panel.data());
                panel = space.panel.data();
            }
            const auto use = [&](int64_t r, const float* sums) {
                finish(a, row + r, start + p * PANEL, start + part.outputs, sums);
            };
            multiply_any<false>(way, x, row, num, a.inputs, panel, next, space.sums.data(), use);
        }
    });
}

template <typename Arithmetic>
void multiply_parts(const Product& a, const typename Arithmetic::Number* x) {
    static thread_local std::vector<float> sums;
    int64_t start = 0;
    for (int64_t i = 0; i < a.num_parts; start += a.parts[i++].outputs)
        with_way<Arithmetic>(a.parts[i], x, a.rows, a.inputs, a.num_threads, sums,
                             [&](const auto& way) { multiply(a, a.parts[i], start, way, x); });
}

#ifndef HAS_PAIRS
// Rows of bfloat16, of which some at a time become floats.
void multiply_widened(const Product& a, const uint16_t* x) {
    static thread_local std::vector<float> wide;
    for (int64_t row = 0; row < a.rows; row += WIDENED_ROWS) {
        Product some = a;
        some.rows = std::min(WIDENED_ROWS, a.rows - row);
        some.out = static_cast<char*>(a.out) + row * a.outputs * (a.out_type == 0 ? 4 : 2);
        wide.resize(some.rows * a.inputs);
        float* const to = wide.data();
        const uint16_t* const from = x + row * a.inputs;
        for_parts(a.num_threads, some.rows * a.inputs, 1 << 13, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) to[i] = from_bfloat16(from[i]);
        });
        multiply_parts<Floats>(some, to);
    }
}
#endif

void multiply_all(const Product& a) {
    if (a.x_type == 0) return multiply_parts<Floats>(a, static_cast<const float*>(a.x));
    const uint16_t* x = static_cast<const uint16_t*>(a.x);
#ifdef HAS_PAIRS
    multiply_parts<Pairs>(a, x);
#else
    multiply_widened(a, x);
#endif
}

}  // namespace

extern "C" {

// The outputs of a panel; packed weights are of whole panels.
int64_t fminfer_panel() { return PANEL; }

// out = x times the weight's transpose, plus bias. Nonzero: there was no memory.
int fminfer_multiply(const Product* a) {
    return lacks_memory([&] { multiply_all(*a); });
}

// The same of `items` products: x is (items, rows, inputs), out (items, rows, outputs), and the one
// part has the weight of each item behind the other, of floats. A thread takes some rows of an item.
int fminfer_multiply_items(const Product* a, int64_t items) {
    const int64_t panels = (a->parts->outputs + PANEL - 1) / PANEL;
    const int64_t weight_bytes = panels * PANEL * a->inputs * (a->parts->type == 0 ? 4 : 2);
    const int64_t x_bytes = a->inputs * (a->x_type == 0 ? 4 : 2);
    const int64_t out_bytes = a->outputs * (a->out_type == 0 ? 4 : 2);
    const int64_t blocks = (a->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return lacks_memory([&] {
        for_pieces(a->num_threads, items * blocks, [&](int64_t i, int) {
            const int64_t item = i / blocks, block = i % blocks;
            const int64_t first = a->rows * block / blocks, end = a->rows * (block + 1) / blocks;
            Packed part = *a->parts;
            part.weight = static_cast<const char*>(part.weight) + item * weight_bytes;
            Product some = *a;
            some.parts = &part;
            some.rows = end - first;
            some.x = static_cast<const char*>(a->x) + (item * a->rows + first) * x_bytes;
            some.out = static_cast<char*>(a->out) + (item * a->rows + first) * out_bytes;
            some.num_threads = 1;
            multiply_all(some);
        });
    });
}

}  // extern "C"

// Products of rows with a weight that was packed once (panels.h), summed in float32. Each thread
// goes through neighbours among the panels.
#include <algorithm>
#include <vector>

#include "calls.h"
#include "panels.h"
#include "pool.h"

namespace {

constexpr int64_t WIDENED_ROWS = 2 * BLOCK_ROWS;  // of 16 bits that become floats at a time

template <typename T>
void finish_as(const Product& a, int64_t row, int64_t first, const float* sums) {
    T* out = static_cast<T*>(a.out) + row * a.outputs + first;
    const int64_t left = a.outputs - first;
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

// Writes one row's sums of a panel that begins at output `first`.
inline void finish(const Product& a, int64_t row, int64_t first, const float* sums) {
    a.out_type == 0 ? finish_as<float>(a, row, first, sums)
                    : finish_as<uint16_t>(a, row, first, sums);
}

template <typename Way>
void multiply(const Product& a, const typename Way::Number* x) {
    const int64_t panels = (a.outputs + PANEL - 1) / PANEL, size = a.inputs / Way::INPUTS * PANEL;
    const uint32_t* const weight = static_cast<const uint32_t*>(a.weight);
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
            const auto use = [&](int64_t r, const float* sums) {
                finish(a, row + r, p * PANEL, sums);
            };
            multiply_panel<Way, false>(x + row * a.inputs, num, a.inputs, weight + p * size, next,
                                       space.sums.data(), use);
        }
    });
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
        multiply<Widened>(some, to);
    }
}
#endif

void multiply_all(const Product& a) {
    const bool has_halves = a.weight_type == 1;
    if (a.x_type == 0) {
        const float* x = static_cast<const float*>(a.x);
        return has_halves ? multiply<Widened>(a, x) : multiply<Floats>(a, x);
    }
    const uint16_t* x = static_cast<const uint16_t*>(a.x);
#ifdef HAS_PAIRS
    multiply<Pairs>(a, x);
#else
    multiply_widened(a, x);
#endif
}

}  // namespace

extern "C" {

// The outputs of a panel; packed weights are of whole panels.
int64_t fminfer_panel() { return PANEL; }

// weight: (outputs, units of 32 bits); packed: of outputs rounded up to whole panels, 0 behind them.
void fminfer_pack(const uint32_t* weight, int64_t outputs, int64_t units, uint32_t* packed,
                  int64_t num_threads) {
    for_pieces(num_threads, (outputs + PANEL - 1) / PANEL, [&](int64_t p, int) {
        const int64_t first = p * PANEL;
        pack_panel(weight + first * units, outputs - first, units, packed + first * units);
    });
}

// out = x times the weight's transpose, plus bias. Nonzero: there was no memory.
int fminfer_multiply(const Product* a) {
    return lacks_memory([&] { multiply_all(*a); });
}

}  // extern "C"

// Products of rows with a weight that was packed once: bfloat16, summed in float32.
//
// A packed weight has panels of 64 outputs. In a panel 2 inputs of each output stand side by side,
// so that a vector has those of 16 outputs, and four vectors those of all; the next 2 inputs
// follow. A few rows at a time go through a panel. Meanwhile the next panel is fetched, as evenly
// as can be: in bursts, 16 rows ran at 290 GFLOP/s instead of 370 (two cores of an AMD Zen 4).
// Each output sums its inputs in their order, whatever the number of rows and of threads.
#include <omp.h>

#include "calls.h"
#include "halves.h"

namespace {

#ifdef HAS_PAIRS

constexpr int QUARTERS = 4, PANEL = QUARTERS * LANES;  // outputs
constexpr int MOST_ROWS = 6;                           // whose sums the registers hold

// The products of R rows, which begin at x, with a panel. For each 2 inputs, LINES are fetched at
// `next`, which goes on by `pace` / 2^16 of a line.
template <int R, int LINES>
void sum_rows(const Product& a, const uint16_t* x, const uint16_t* panel, const uint16_t* next,
              int64_t pace, Vec (*sums)[QUARTERS]) {
    Vec sum[R][QUARTERS];  // not = {}, for which gcc 12 calls memset
    for (int r = 0; r < R; r++)
        for (int q = 0; q < QUARTERS; q++) sum[r][q] = Vec{};
    for (int64_t i = 0; i < a.inputs; i += 2, panel += 2 * PANEL) {
        const uint16_t* line = next + (i / 2 * pace >> 16) * 2 * LANES;
        for (int n = 0; n < LINES; n++) fetch(line + n * 2 * LANES);
        __m512i weights[QUARTERS];
        for (int q = 0; q < QUARTERS; q++) weights[q] = bits_at(panel + q * 2 * LANES);
        for (int r = 0; r < R; r++) {
            const __m512i both = pair_at(x + r * a.inputs + i);
            for (int q = 0; q < QUARTERS; q++)
                sum[r][q] = add_products(sum[r][q], both, weights[q]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int q = 0; q < QUARTERS; q++) sums[r][q] = sum[r][q];
}

template <int LINES>
constexpr decltype(&sum_rows<1, LINES>) SUM_ROWS[] = {
    nullptr,
    sum_rows<1, LINES>,
    sum_rows<2, LINES>,
    sum_rows<3, LINES>,
    sum_rows<4, LINES>,
    sum_rows<5, LINES>,
    sum_rows<MOST_ROWS, LINES>,
};

// Writes one row's sums of a panel that begins at output `first`.
void finish(const Product& a, int64_t row, int64_t first, const Vec* sums) {
    for (int q = 0; q < QUARTERS; q++) {
        const int64_t begin = first + q * LANES, left = a.outputs - begin;
        const Vec sum = a.bias == nullptr ? sums[q] : sums[q] + load(a.bias + begin);
        uint16_t* out = a.out + row * a.outputs + begin;
        if (left >= LANES) {
            store(out, sum);
        } else if (left > 0) {
            const Half rounded = to_bfloat16(sum);
            std::memcpy(out, &rounded, left * sizeof *out);
        }
    }
}

// All rows' products with the panel that begins at output `first`; the one at `next` is fetched.
void multiply_panel(const Product& a, int64_t first, const uint16_t* next) {
    const uint16_t* panel = a.weight + first * a.inputs;
    const int64_t groups = (a.rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t lines = a.inputs / 2 * QUARTERS;  // of a panel, QUARTERS for each 2 inputs
    const auto by_rows = groups == 1 ? SUM_ROWS<4> : groups <= 3 ? SUM_ROWS<2> : SUM_ROWS<1>;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = a.rows * g / groups, end = a.rows * (g + 1) / groups;
        const uint16_t* x = a.x + begin * a.inputs;
        const uint16_t* from = next + lines * g / groups * 2 * LANES;
        Vec sums[MOST_ROWS][QUARTERS];
        by_rows[end - begin](a, x, panel, from, (QUARTERS << 16) / groups, sums);
        for (int64_t row = begin; row < end; row++) finish(a, row, first, sums[row - begin]);
    }
}

// Packs the panel that begins at output `first`; outputs beyond the last one are 0.
void pack_panel(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t first,
                uint16_t* packed) {
    uint16_t* panel = packed + first * inputs;
    for (int64_t i = 0; i < inputs; i += 2 * LANES)
        for (int q = 0; q < QUARTERS; q++) {
            UVec pairs[LANES];
            for (int n = 0; n < LANES; n++) {
                const int64_t output = first + q * LANES + n;
                pairs[n] = output < outputs ? (UVec)bits_at(weight + output * inputs + i) : UVec{};
            }
            transpose(pairs);
            for (int p = 0; p < LANES; p++)
                std::memcpy(panel + i * PANEL + (p * QUARTERS + q) * 2 * LANES, &pairs[p],
                            sizeof pairs[p]);
        }
}

#endif

}  // namespace

extern "C" {

#ifdef HAS_PAIRS

int fminfer_has_products() { return 1; }

// weight: (outputs, inputs), inputs a multiple of 32; packed: of outputs rounded up to 64.
void fminfer_pack(const uint16_t* weight, int64_t outputs, int64_t inputs, uint16_t* packed,
                  int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(int(num_threads))
    for (int64_t first = 0; first < outputs; first += PANEL)
        pack_panel(weight, outputs, inputs, first, packed);
}

// out = x times the weight's transpose, plus bias. Each thread has panels that follow one another.
void fminfer_multiply(const Product* a) {
    const int64_t panels = (a->outputs + PANEL - 1) / PANEL, size = PANEL * a->inputs;
#pragma omp parallel num_threads(int(a->num_threads))
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t end = panels * (thread + 1) / threads;
        for (int64_t p = panels * thread / threads; p < end; p++)
            multiply_panel(*a, p * PANEL, a->weight + (p + 1 < end ? p + 1 : p) * size);
    }
}

#else

int fminfer_has_products() { return 0; }

#endif

}  // extern "C"

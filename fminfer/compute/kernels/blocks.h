// Rows times panels of quantized weights (forms.h), summed in float32.
//
// Whole numbers are multiplied, and the sum of each run is then scaled: sum += scale * run's sum +
// offset * run's inputs. A few rows take numbers from packed units in registers; many rows have a
// piece of the panel unpacked once for all, near the core. Both add in the same order, so results do
// not depend on the number of rows.
#pragma once

#include "calls.h"
#include "panels.h"
#include "pool.h"

namespace blocks {

constexpr int64_t MOST_RUN = 256;      // inputs that are added up before they are scaled
constexpr int64_t NEAR_UNITS = 8192;   // of an unpacked piece, which the first cache holds
// Up to so many rows, each MOST_ROWS of them unpack the weights again in registers.
constexpr int64_t FEW_ROWS = 4 * MOST_ROWS;

template <typename Number>
struct Code;

// Rows of numbers, float or bfloat16, and how they are multiplied by a weight in blocks.
template <typename Number_>
struct Way {
    typedef Number_ Number;
    static constexpr bool IS_BLOCKS = true;

    const Code<Number>* code;
    int64_t inputs, block, run;  // of a row, of a block, and of a run
    const float* added;          // (rows, runs): the sum of each row's inputs, run by run

    int64_t runs() const { return (inputs / block) * ((block + run - 1) / run); }
    int64_t panel_units(int64_t) const {
        return inputs / block * code->scale_units + inputs / code->chunk * code->chunk_units;
    }
    Way from_row(int64_t row) const { return {code, inputs, block, run, added + row * runs()}; }
};

// Some runs of a panel, unpacked: their numbers, and scales and offsets of all outputs.
struct Unpacked {
    uint32_t* units;
    float* scales;       // (runs, 2, PANEL)
    int64_t first, num;  // runs
};

// What is compiled for a form (forms.h) and a kind of rows; blocks.cpp has it.
template <typename Number>
struct Code {
    int64_t chunk, steps;  // inputs of a chunk, and units of 32 bits that they become
    int64_t scale_units, chunk_units;
    bool has_offset, has_runs;  // runs of more than a chunk
    bool is_fast;               // to unpack: it is done in registers for any number of rows
    // Of so many rows: sums, (rows, PANEL), += rows times a whole panel.
    void (*add_few[MOST_ROWS + 1])(const Way<Number>&, const Number* x, const uint32_t* panel,
                                   float* sums);
    void (*unpack)(const Way<Number>&, const uint32_t* panel, const Unpacked& to);
    // The same of unpacked runs; `lines` lines at `next` are fetched meanwhile.
    void (*add_unpacked[MOST_ROWS + 1])(const Way<Number>&, const Unpacked& part, const Number* x,
                                        const uint32_t* next, int64_t lines, float* sums);
};

const Code<float>* find_code(int64_t kind, const float*);
const Code<uint16_t>* find_code(int64_t kind, const uint16_t*);

// Where run `r` begins.
inline int64_t start_of(int64_t r, int64_t block, int64_t run) {
    const int64_t in_block = (block + run - 1) / run;
    return r / in_block * block + r % in_block * run;
}

}  // namespace blocks

namespace {

// x, (num, inputs), times a panel: sums, (num, PANEL), and use(row, sums) for each row. The thread
// probably multiplies `behind` next.
template <typename Number, typename Use>
void multiply_blocks(const blocks::Way<Number>& way, const Number* x, int64_t num,
                     const uint32_t* panel, const uint32_t* behind, float* sums, const Use& use) {
    const auto& code = *way.code;
    const int64_t groups = (num + MOST_ROWS - 1) / MOST_ROWS;
    const auto for_groups = [&](const auto& work) {
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = num * g / groups;
            work(row, num * (g + 1) / groups - row, g);
        }
    };
    std::memset(sums, 0, num * PANEL * sizeof *sums);
    if (num <= blocks::FEW_ROWS || code.is_fast) {
        for_groups([&](int64_t row, int64_t rows, int64_t) {
            code.add_few[rows](way.from_row(row), x + row * way.inputs, panel, sums + row * PANEL);
        });
        for (int64_t r = 0; r < num; r++) use(r, sums + r * PANEL);
        return;
    }
    const int64_t all = way.runs(), size = way.panel_units(way.inputs) / LINE;
    const int64_t run_units = way.run / code.chunk * code.steps * PANEL;
    const int64_t most = std::max<int64_t>(1, blocks::NEAR_UNITS / run_units);
    const int64_t pieces = (all + most - 1) / most;
    space.widened.resize(most * run_units);
    space.scales.resize(2 * most * PANEL);
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = all * i / pieces, end = all * (i + 1) / pieces;
        const blocks::Unpacked part = {space.widened.data(), space.scales.data(), first,
                                       end - first};
        code.unpack(way, panel, part);
        // Of the next piece, which is about as large.
        const uint32_t* next = i + 1 < pieces ? panel + size * (i + 1) / pieces * LINE : behind;
        const int64_t lines = size / pieces;
        for_groups([&](int64_t row, int64_t rows, int64_t g) {
            const int64_t from = lines * g / groups, to = lines * (g + 1) / groups;
            code.add_unpacked[rows](way.from_row(row), part, x + row * way.inputs,
                                    next + from * LINE, to - from, sums + row * PANEL);
        });
    }
    for (int64_t r = 0; r < num; r++) use(r, sums + r * PANEL);
}

// x, (num, inputs) from row `row` on, times a panel in any way; see multiply_blocks, multiply_panel.
template <bool STAYS, typename Way, typename Use>
inline void multiply_any(const Way& way, const typename Way::Number* x, int64_t row, int64_t num,
                         int64_t inputs, const uint32_t* panel, const uint32_t* behind,
                         float* sums, const Use& use) {
    x += row * inputs;
    if constexpr (Way::IS_BLOCKS)
        multiply_blocks(way.from_row(row), x, num, panel, behind, sums, use);
    else
        multiply_panel<Way, STAYS>(x, num, inputs, panel, behind, sums, use);
}

// The sums of rows' inputs, (rows, runs).
template <typename Number>
void sum_runs(const blocks::Way<Number>& way, const Number* x, int64_t rows, int64_t num_threads,
              std::vector<float>& sums) {
    const int64_t runs = way.runs();
    sums.resize(rows * runs);
    float* const to = sums.data();
    for_parts(num_threads, rows * runs, 1 << 9, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t start = blocks::start_of(i % runs, way.block, way.run);
            const int64_t end = std::min(start + way.run, (start / way.block + 1) * way.block);
            const Number* const own = x + i / runs * way.inputs;
            Vec sum = {};
            for (int64_t n = start; n < end; n += LANES) sum += load(own + n);
            to[i] = 0;
            for (int lane = 0; lane < LANES; lane++) to[i] += sum[lane];
        }
    });
}

// Calls use(way) with how rows x, (rows, inputs), of Arithmetic's numbers are multiplied by a packed
// weight. `sums` keeps the sums of x that the way uses.
template <typename Arithmetic, typename Use>
inline void with_way(const Packed& weight, const typename Arithmetic::Number* x, int64_t rows,
                     int64_t inputs, int64_t num_threads, std::vector<float>& sums,
                     const Use& use) {
    if (weight.type == 1)
        return use(std::conditional_t<Arithmetic::INPUTS == 2, Arithmetic, Widened>());
    if (weight.type == 0) {
        if constexpr (Arithmetic::INPUTS == 1) use(Arithmetic());
        return;
    }
    const auto* code = blocks::find_code(weight.type, x);
    const int64_t run = code->has_runs ? std::min(weight.block, blocks::MOST_RUN) : code->chunk;
    blocks::Way<typename Arithmetic::Number> way = {code, inputs, weight.block, run, nullptr};
    if (code->has_offset) sum_runs(way, x, rows, num_threads, sums);
    way.added = sums.data();
    use(way);
}

}  // namespace

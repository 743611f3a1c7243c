// Panels of packed weights, and the sums of rows times them in float32.
//
// A packed weight has panels of PANEL outputs, which registers hold. A unit is what 32 bits hold of
// an output's inputs: one of float32, or two of bfloat16. In a panel the first units of all outputs
// stand side by side, then their second ones, and so on. A few rows at a time go through a panel,
// whose next piece is fetched meanwhile, as evenly as can be: in bursts, 16 rows ran at 290 GFLOP/s
// instead of 370 (bfloat16, two cores of an AMD Zen 4).
//
// Three ways to multiply, each a type: Floats; Widened, where a register's 16-bit numbers become
// floats; Pairs, where the processor multiplies two numbers of bfloat16 at once. Each output sums
// its inputs in their order, whatever the number of rows and of threads, so results do not depend
// on either.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "halves.h"

namespace {

constexpr int VECTORS = REGISTERS == 32 || WIDTH == 4 ? 4 : 2, PANEL = VECTORS * WIDTH;  // outputs
static_assert(PANEL % LANES == 0, "panels are packed and finished in whole vectors");
constexpr int MOST_ROWS = 6;  // whose sums the registers hold, beside a panel's unit and a number
constexpr int LINE = 16;      // units in a line of the cache
constexpr int64_t PIECE_UNITS = 3 * REGISTERS * 1024 / PANEL / 2;  // of a panel, to stay near
constexpr int64_t BLOCK_ROWS = 24 * MOST_ROWS;    // that go through a piece, one after another
constexpr int64_t TASK_UNITS = 24 * 1024;         // least that a thread takes at a time
constexpr int64_t UNPACK_ROWS = 4 * MOST_ROWS;    // more than so many: widened once for all

// `units` of a panel times R rows, that begin at x: sums, (R, PANEL), += the products.
struct Floats {
    typedef float Number;
    static constexpr int INPUTS = 1;  // of a unit

    template <int R>
    static void add(Wide (*sum)[VECTORS], const float* x, int64_t step, const uint32_t* units) {
        Wide weight[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            weight[v] = (Wide)bits_at(units + v * WIDTH);
            keep_in_register(weight[v]);
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * step] * weight[v];
    }
};

struct Widened {
    typedef float Number;
    static constexpr int INPUTS = 2;

    template <int R>
    static void add(Wide (*sum)[VECTORS], const float* x, int64_t step, const uint32_t* units) {
        for (int i = 0; i < 2; i++) {
            Wide weight[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const UWide both = bits_at(units + v * WIDTH);
                weight[v] = i == 0 ? (Wide)(both << 16) : (Wide)(both & 0xFFFF0000);
                keep_in_register(weight[v]);
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * step + i] * weight[v];
        }
    }
};

#ifdef HAS_PAIRS
struct Pairs {
    typedef uint16_t Number;
    static constexpr int INPUTS = 2;

    template <int R>
    static void add(Wide (*sum)[VECTORS], const uint16_t* x, int64_t step, const uint32_t* units) {
        __m512i weight[VECTORS];
        for (int v = 0; v < VECTORS; v++) weight[v] = (__m512i)bits_at(units + v * WIDTH);
        for (int r = 0; r < R; r++) {
            const __m512i both = pair_at(x + r * step);
            for (int v = 0; v < VECTORS; v++) sum[r][v] = add_products(sum[r][v], both, weight[v]);
        }
    }
};
#endif

// A part of a panel that rows go through, and what is fetched meanwhile.
struct Piece {
    const uint32_t* units;
    int64_t num_units;
    const uint32_t* next;
    int64_t pace;   // lines of `next` for a unit, in 2^16ths
    bool is_first;  // sums begin with it
};

// LINES: that are fetched with each unit.
template <typename Way, int R, int LINES>
void add_rows(const Piece& piece, const typename Way::Number* x, int64_t step, float* sums) {
    Wide sum[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = piece.is_first ? Wide{} : wide_at(sums + r * PANEL + v * WIDTH);
    const uint32_t* units = piece.units;
    for (int64_t u = 0; u < piece.num_units; u++, units += PANEL, x += Way::INPUTS) {
        const uint32_t* next = piece.next + (u * piece.pace >> 16) * LINE;
        for (int n = 0; n < LINES; n++) __builtin_prefetch(next + n * LINE, 0, 2);
        Way::template add<R>(sum, x, step, units);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) put_wide(sums + r * PANEL + v * WIDTH, sum[r][v]);
}

template <typename Way, int LINES>
constexpr decltype(&add_rows<Way, 1, LINES>) ADD_ROWS[] = {
    nullptr,
    add_rows<Way, 1, LINES>,
    add_rows<Way, 2, LINES>,
    add_rows<Way, 3, LINES>,
    add_rows<Way, 4, LINES>,
    add_rows<Way, 5, LINES>,
    add_rows<Way, MOST_ROWS, LINES>,
};

// `num` rows, a few at a time, through a piece of a panel; sums are (num, PANEL).
template <typename Way>
void add_block(Piece piece, const typename Way::Number* x, int64_t num, int64_t step, float* sums) {
    constexpr int MOST_LINES = PANEL / LINE;
    const int64_t groups = (num + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t lines = piece.num_units * MOST_LINES;
    const auto by_rows = groups == 1 ? ADD_ROWS<Way, MOST_LINES>
                         : groups <= 3 ? ADD_ROWS<Way, (MOST_LINES + 1) / 2> : ADD_ROWS<Way, 1>;
    const uint32_t* const next = piece.next;
    piece.pace = (int64_t(MOST_LINES) << 16) / groups;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = num * g / groups, end = num * (g + 1) / groups;
        piece.next = next + lines * g / groups * LINE;
        by_rows[end - begin](piece, x + begin * step, step, sums + begin * PANEL);
    }
}

inline void widen_units(const uint32_t* units, int64_t num, uint32_t* to) {
    for (int64_t u = 0; u < num; u++, units += PANEL, to += 2 * PANEL)
        for (int p = 0; p < PANEL; p++) {
            to[p] = units[p] << 16;
            to[PANEL + p] = units[p] & 0xFFFF0000;
        }
}

// What one thread works in.
struct Space {
    std::vector<float> sums;
    std::vector<uint32_t> widened;
};
thread_local Space space;

// Returns x, (num, inputs), times `panels` that lie side by side: (panels, num, PANEL), good until
// the thread's next call. Pieces come one behind the other, panel by panel, so that rows are near.
// `behind` is probably what this thread multiplies next.
template <typename Way>
const float* sum_panels(const typename Way::Number* x, int64_t num, int64_t inputs,
                        const uint32_t* weight, int64_t panels, const uint32_t* behind) {
    const int64_t units = inputs / Way::INPUTS, size = units * PANEL;
    const bool is_widened_once = Way::INPUTS == 2 && sizeof(typename Way::Number) == 4 &&
                                 num > UNPACK_ROWS;
    const int64_t most = num <= MOST_ROWS ? units : PIECE_UNITS / (is_widened_once ? 2 : 1);
    space.sums.resize(panels * num * PANEL);
    if (is_widened_once) space.widened.resize(2 * most * PANEL);
    for (int64_t u = 0; u < units; u += most)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t count = std::min(most, units - u);
            const uint32_t* from = weight + p * size + u * PANEL;
            const uint32_t* next = p + 1 < panels     ? from + size
                                   : u + most < units ? weight + (u + most) * PANEL
                                                      : behind;
            Piece piece = {from, count, next, 0, u == 0};
            float* const sums = space.sums.data() + p * num * PANEL;
            const typename Way::Number* rows = x + u * Way::INPUTS;
            if (!is_widened_once) {
                add_block<Way>(piece, rows, num, inputs, sums);
                continue;
            }
            if constexpr (std::is_same<Way, Widened>::value) {
                widen_units(from, count, space.widened.data());
                piece = {space.widened.data(), 2 * count, next, 0, u == 0};
                add_block<Floats>(piece, rows, num, inputs, sums);
            }
        }
    return space.sums.data();
}

// 16 outputs' next 16 units, and whatever is left of either.
inline void pack_square(const uint32_t* weight, int64_t step, int64_t outputs, int64_t units,
                        uint32_t* panel) {
    UVec square[LANES] = {};
    for (int64_t o = 0; o < outputs; o++)
        std::memcpy(square + o, weight + o * step, std::min<int64_t>(units, LANES) * 4);
    transpose(square);
    for (int64_t u = 0; u < std::min<int64_t>(units, LANES); u++)
        std::memcpy(panel + u * PANEL, square + u, sizeof *square);
}

// Packs up to PANEL outputs of a weight, (outputs, units of 32 bits), as one panel, 0 behind them.
inline void pack_panel(const uint32_t* weight, int64_t outputs, int64_t units, uint32_t* panel) {
    for (int64_t u = 0; u < units; u += LANES)
        for (int64_t n = 0; n < PANEL; n += LANES) {
            const int64_t count = std::max<int64_t>(0, std::min<int64_t>(outputs - n, LANES));
            pack_square(weight + n * units + u, units, count, units - u, panel + u * PANEL + n);
        }
}

}  // namespace

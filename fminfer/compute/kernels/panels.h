// Panels of packed weights, and the sums of rows times them in float32.
//
// A packed weight has panels of PANEL outputs, which registers hold. A unit is what 32 bits hold of
// an output's inputs: one of float32, or two of bfloat16. In a panel the first units of all outputs
// stand side by side, then their second ones, and so on. A few rows at a time go through a panel's
// piece. The next piece is fetched meanwhile, as evenly as can be: in bursts, 16 rows ran at 290
// GFLOP/s instead of 370 (bfloat16, two cores of an AMD Zen 4). Rows that all go at once fetch what
// is near, 6 KB ahead: 2 KB are too few for AVX2 (0.83 of the speed), a whole panel is too far.
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
constexpr int64_t AHEAD = 1536;  // units to what is fetched while all rows go at once
constexpr int64_t PIECE_UNITS = 2 * REGISTERS * 1024 / PANEL;  // most of a panel, to stay near
constexpr int64_t BLOCK_ROWS = 48 * MOST_ROWS;  // that go through a piece, one after another
constexpr int64_t TASK_UNITS = 24 * 1024;       // least that a thread takes at a time
constexpr int64_t UNPACK_ROWS = 4 * MOST_ROWS;  // more than so many: widened once for all

// A way to multiply weights that are floats: rows of NUMBER, and INPUTS inputs in each unit.
template <typename NUMBER, int INPUTS_>
struct InUnits {
    typedef NUMBER Number;
    static constexpr int INPUTS = INPUTS_;
    static constexpr bool IS_BLOCKS = false;

    int64_t panel_units(int64_t inputs) const { return inputs / INPUTS * PANEL; }
};

// `units` of a panel times R rows, that begin at x: sums, (R, PANEL), += the products.
struct Floats : InUnits<float, 1> {
    template <int R>
    static void add(Wide (*sum)[VECTORS], const float* x, int64_t step, const uint32_t* units) {
        UWide weight[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = bits_at(units + v * WIDTH);
        add_vectors<R>(sum, x, step, weight);
    }

    template <int R>
    static void add_vectors(Wide (*sum)[VECTORS], const float* x, int64_t step,
                            const UWide* units) {
        Wide weight[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            weight[v] = (Wide)units[v];
            keep_in_register(weight[v]);
        }
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * step] * weight[v];
    }
};

struct Widened : InUnits<float, 2> {
    template <int R>
    static void add(Wide (*sum)[VECTORS], const float* x, int64_t step, const uint32_t* units) {
        for (int i = 0; i < 2; i++) {
            Wide weight[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const UWide both = bits_at(units + v * WIDTH);
                weight[v] = i == 0 ? (Wide)(both << 16) : (Wide)(both & 0xFFFF0000);
                keep_in_register(weight[v]);
            }
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * step + i] * weight[v];
        }
    }
};

#ifdef HAS_PAIRS
struct Pairs : InUnits<uint16_t, 2> {
    template <int R>
    static void add(Wide (*sum)[VECTORS], const uint16_t* x, int64_t step, const uint32_t* units) {
        UWide weight[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = bits_at(units + v * WIDTH);
        add_vectors<R>(sum, x, step, weight);
    }

    template <int R>
    static void add_vectors(Wide (*sum)[VECTORS], const uint16_t* x, int64_t step,
                            const UWide* weight) {
        UNROLLED for (int r = 0; r < R; r++) {
            const __m512i both = pair_at(x + r * step);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sum[r][v] = add_products(sum[r][v], both, (__m512i)weight[v]);
        }
    }
};
#endif

// A part of a panel that rows go through, and what is fetched meanwhile.
struct Piece {
    const uint32_t* units;
    int64_t num_units;
    const uint32_t* next;
    int64_t lines;  // of `next`
    bool is_first, is_last;
};

// LINES: that are fetched with each unit; the first one goes on by `pace` / 2^16 of a line.
template <typename Way, int R, int LINES>
void add_rows(const Piece& piece, const typename Way::Number* x, int64_t step,
              const uint32_t* next, int64_t pace, float* sums) {
    Wide sum[R][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            sum[r][v] = piece.is_first ? Wide{} : wide_at(sums + r * PANEL + v * WIDTH);
    const uint32_t* units = piece.units;
    for (int64_t u = 0; u < piece.num_units; u++, units += PANEL, x += Way::INPUTS) {
        const uint32_t* line = next + (u * pace >> 16) * LINE;
        for (int n = 0; n < LINES; n++) __builtin_prefetch(line + n * LINE, 0, 2);
        Way::template add<R>(sum, x, step, units);
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            put_wide(sums + r * PANEL + v * WIDTH, sum[r][v]);
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

inline void widen_units(const uint32_t* units, int64_t num, uint32_t* to) {
    for (int64_t u = 0; u < num; u++, units += PANEL, to += 2 * PANEL)
        UNROLLED for (int p = 0; p < PANEL; p += WIDTH) {
            const UWide both = bits_at(units + p);
            put_bits(to + p, both << 16);
            put_bits(to + PANEL + p, both & 0xFFFF0000);
        }
}

// `num` rows, a few at a time, through a piece of a panel. x: their inputs, from the piece's first
// on, `step` apart. Calls use(row, sums) for those that are whole. Sums, (num, PANEL), wait for the
// next piece, where there is one; or for good, if STAYS.
template <typename Way, bool STAYS, typename Use>
void add_piece(const Piece& piece, const typename Way::Number* x, int64_t num, int64_t step,
               float* sums, const Use& use) {
    constexpr int MOST_LINES = PANEL / LINE;
    const int64_t groups = (num + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t pace = (piece.lines << 16) / (groups * piece.num_units);
    const bool is_near = !STAYS && piece.is_first && piece.is_last;
    const auto by_rows = groups == 1 ? ADD_ROWS<Way, MOST_LINES>
                         : groups <= 3 ? ADD_ROWS<Way, (MOST_LINES + 1) / 2> : ADD_ROWS<Way, 1>;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = num * g / groups, end = num * (g + 1) / groups;
        float* const own = is_near ? sums : sums + begin * PANEL;
        by_rows[end - begin](piece, x + begin * step, step,
                             piece.next + piece.lines * g / groups * LINE, pace, own);
        if (!piece.is_last) continue;
        for (int64_t r = begin; r < end; r++) use(r, own + (r - begin) * PANEL);
    }
}

// What one thread works in.
struct Space {
    std::vector<float> sums, scales;
    std::vector<uint32_t> widened, panel;
};
thread_local Space space;

// x, (num, inputs), times a panel, piece by piece; see add_piece. The thread probably multiplies
// `behind` next.
template <typename Way, bool STAYS, typename Use>
void multiply_panel(const typename Way::Number* x, int64_t num, int64_t inputs,
                    const uint32_t* panel, const uint32_t* behind, float* sums, const Use& use) {
    const int64_t units = inputs / Way::INPUTS;
    const bool is_one_group = num <= MOST_ROWS;
    const bool is_widened_once = std::is_same<Way, Widened>::value && num > UNPACK_ROWS;
    const int64_t most = is_widened_once ? PIECE_UNITS / 2 : PIECE_UNITS;
    const int64_t pieces = is_one_group ? 1 : (units + most - 1) / most;
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = units * i / pieces, count = units * (i + 1) / pieces - first;
        const uint32_t* const from = panel + first * PANEL;
        const uint32_t* const next = is_one_group     ? from + AHEAD
                                     : i + 1 < pieces ? from + count * PANEL
                                                      : behind;
        Piece piece = {from, count, next, count * PANEL / LINE, i == 0, i + 1 == pieces};
        const typename Way::Number* const rows = x + first * Way::INPUTS;
        if (!is_widened_once) {
            add_piece<Way, STAYS>(piece, rows, num, inputs, sums, use);
            continue;
        }
        if constexpr (std::is_same<Way, Widened>::value) {
            space.widened.resize(2 * most * PANEL);
            widen_units(from, count, space.widened.data());
            piece.units = space.widened.data();
            piece.num_units = 2 * count;
            add_piece<Floats, STAYS>(piece, rows, num, inputs, sums, use);
        }
    }
}

// LANES outputs' next units; the copies of whole squares have a size that compilers know.
inline void pack_square(const uint32_t* weight, int64_t step, int64_t outputs, int64_t units,
                        uint32_t* panel) {
    UVec square[LANES] = {};
    if (outputs == LANES && units >= LANES) {
        UNROLLED for (int o = 0; o < LANES; o++) {
            __builtin_prefetch(weight + o * step + 8 * LANES);
            std::memcpy(square + o, weight + o * step, sizeof *square);
        }
        transpose(square);
        UNROLLED for (int u = 0; u < LANES; u++)
            std::memcpy(panel + u * PANEL, square + u, sizeof *square);
        return;
    }
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

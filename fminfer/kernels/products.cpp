// Products of rows with a weight that was packed once, summed in float32.
//
// A packed weight has panels of PANEL outputs, which registers hold. A unit is what 32 bits hold of
// an output's inputs: one of float32, or two of bfloat16. In a panel the first units of all outputs
// stand side by side, then their second ones, and so on. Each thread goes through neighbours among
// the panels. A few rows at a time go through a panel's piece. The next piece is fetched meanwhile,
// as evenly as can be: in bursts, 16 rows ran at 290 GFLOP/s instead of 370 (bfloat16, two cores of
// an AMD Zen 4). Rows that all go at once fetch what is near: beyond 8 KB they ran 3 to 10 % slower.
//
// Three ways to multiply, each a type: Floats; Widened, where a register's 16-bit numbers become
// floats; Pairs, where the processor multiplies two numbers of bfloat16 at once. Each output sums
// its inputs in their order, whatever the number of rows and of threads, so results do not depend
// on either.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "halves.h"
#include "pool.h"

namespace {

constexpr int VECTORS = REGISTERS == 32 ? 4 : 2, PANEL = VECTORS * WIDTH;  // outputs
constexpr int MOST_ROWS = 6;  // whose sums the registers hold, beside a panel's unit and a number
constexpr int LINE = 16;      // units in a line of the cache
constexpr int64_t AHEAD = 512;  // units to what is fetched while all rows go at once
constexpr int64_t PIECE_UNITS = 2 * REGISTERS * 1024 / PANEL;  // most of a panel, to stay near
constexpr int64_t BLOCK_ROWS = 48 * MOST_ROWS;    // that go through a piece, one after another
constexpr int64_t WIDENED_ROWS = 2 * BLOCK_ROWS;  // of 16 bits that become floats at a time
constexpr int64_t TASK_UNITS = 24 * 1024;         // least that a thread takes at a time
constexpr int64_t UNPACK_ROWS = 4 * MOST_ROWS;    // more than so many: widened once for all

// `units` of a panel times R rows, that begin at x: sums, (R, PANEL), += the products.
struct Floats {
    typedef float Number;
    static constexpr int INPUTS = 1;  // of a unit

    template <int R>
    static void add(Wide (*sum)[VECTORS], const float* x, int64_t step, const uint32_t* units) {
        Wide weight[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            weight[v] = (Wide)bits_at(units + v * WIDTH);
            keep_in_register(weight[v]);
        }
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * step] * weight[v];
    }
};

struct Widened {
    typedef float Number;
    static constexpr int INPUTS = 2;

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
struct Pairs {
    typedef uint16_t Number;
    static constexpr int INPUTS = 2;

    template <int R>
    static void add(Wide (*sum)[VECTORS], const uint16_t* x, int64_t step, const uint32_t* units) {
        __m512i weight[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = (__m512i)bits_at(units + v * WIDTH);
        UNROLLED for (int r = 0; r < R; r++) {
            const __m512i both = pair_at(x + r * step);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sum[r][v] = add_products(sum[r][v], both, weight[v]);
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

void widen_units(const uint32_t* units, int64_t num, uint32_t* to) {
    for (int64_t u = 0; u < num; u++, units += PANEL, to += 2 * PANEL)
        for (int p = 0; p < PANEL; p++) {
            to[p] = units[p] << 16;
            to[PANEL + p] = units[p] & 0xFFFF0000;
        }
}

// Writes one row's sums of a panel that begins at output `first`.
template <typename T>
void finish(const Product& a, int64_t row, int64_t first, const float* sums) {
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

// `num` rows, a few at a time, through a piece of a panel. x: their inputs, from the piece's first
// on; row: the first one's number. Sums, (num, PANEL), wait for the next piece, where there is one.
template <typename Way, typename T>
void add_piece(const Product& a, const Piece& piece, const typename Way::Number* x, int64_t row,
               int64_t num, int64_t panel, float* sums) {
    constexpr int MOST_LINES = PANEL / LINE;
    const int64_t groups = (num + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t pace = (piece.lines << 16) / (groups * piece.num_units);
    const bool is_whole = piece.is_first && piece.is_last;
    const auto by_rows = groups == 1 ? ADD_ROWS<Way, MOST_LINES>
                         : groups <= 3 ? ADD_ROWS<Way, (MOST_LINES + 1) / 2> : ADD_ROWS<Way, 1>;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = num * g / groups, end = num * (g + 1) / groups;
        float* const own = is_whole ? sums : sums + begin * PANEL;
        by_rows[end - begin](piece, x + begin * a.inputs, a.inputs,
                             piece.next + piece.lines * g / groups * LINE, pace, own);
        if (!piece.is_last) continue;
        for (int64_t r = begin; r < end; r++)
            finish<T>(a, row + r, panel * PANEL, own + (r - begin) * PANEL);
    }
}

// What one thread works in.
struct Space {
    std::vector<float> sums;
    std::vector<uint32_t> widened;
};
thread_local Space space;

// Rows [row, row + num) times a panel, piece by piece. The thread probably has `behind` next.
template <typename Way, typename T>
void multiply_panel(const Product& a, const typename Way::Number* x, int64_t row, int64_t num,
                    int64_t panel, int64_t behind) {
    const int64_t units = a.inputs / Way::INPUTS, size = units * PANEL;
    const uint32_t* const weight = static_cast<const uint32_t*>(a.weight);
    const bool is_one_group = num <= MOST_ROWS;
    const bool is_widened_once = std::is_same<Way, Widened>::value && num > UNPACK_ROWS;
    const int64_t most = is_widened_once ? PIECE_UNITS / 2 : PIECE_UNITS;
    const int64_t pieces = is_one_group ? 1 : (units + most - 1) / most;
    space.sums.resize(num * PANEL);
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = units * i / pieces, count = units * (i + 1) / pieces - first;
        const uint32_t* const from = weight + panel * size + first * PANEL;
        const uint32_t* const next = is_one_group     ? from + AHEAD
                                     : i + 1 < pieces ? from + count * PANEL
                                                      : weight + behind * size;
        Piece piece = {from, count, next, count * PANEL / LINE, i == 0, i + 1 == pieces};
        const typename Way::Number* const rows = x + row * a.inputs + first * Way::INPUTS;
        if (!is_widened_once) {
            add_piece<Way, T>(a, piece, rows, row, num, panel, space.sums.data());
            continue;
        }
        if constexpr (std::is_same<Way, Widened>::value) {
            space.widened.resize(2 * most * PANEL);
            widen_units(from, count, space.widened.data());
            piece.units = space.widened.data();
            piece.num_units = 2 * count;
            add_piece<Floats, T>(a, piece, rows, row, num, panel, space.sums.data());
        }
    }
}

template <typename Way, typename T>
void multiply(const Product& a, const typename Way::Number* x) {
    const int64_t panels = (a.outputs + PANEL - 1) / PANEL, size = a.inputs / Way::INPUTS * PANEL;
    const int64_t blocks = (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t fair = std::max<int64_t>(1, panels * blocks / (4 * a.num_threads));
    const int64_t least = std::max<int64_t>(1, TASK_UNITS / size);
    const int64_t at_once = std::min<int64_t>({fair, least, panels});
    const int64_t tasks = (panels + at_once - 1) / at_once;
    for_stretches(a.num_threads, tasks * blocks, [&](int64_t i, int64_t stretch_end) {
        const int64_t b = i / tasks, t = i % tasks, end = panels * (t + 1) / tasks;
        const int64_t row = a.rows * b / blocks, num = a.rows * (b + 1) / blocks - row;
        const int64_t behind = i + 1 < stretch_end ? end % panels : end - 1;
        for (int64_t p = panels * t / tasks; p < end; p++)
            multiply_panel<Way, T>(a, x, row, num, p, p + 1 < end ? p + 1 : behind);
    });
}

#ifndef HAS_PAIRS
// Rows of bfloat16, of which some at a time become floats.
void multiply_widened(const Product& a, const uint16_t* x) {
    static thread_local std::vector<float> wide;
    for (int64_t row = 0; row < a.rows; row += WIDENED_ROWS) {
        Product some = a;
        some.rows = std::min(WIDENED_ROWS, a.rows - row);
        some.out = static_cast<uint16_t*>(a.out) + row * a.outputs;
        wide.resize(some.rows * a.inputs);
        float* const to = wide.data();
        const uint16_t* const from = x + row * a.inputs;
        for_parts(a.num_threads, some.rows * a.inputs, 1 << 13, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) to[i] = from_bfloat16(from[i]);
        });
        multiply<Widened, uint16_t>(some, to);
    }
}
#endif

// 16 outputs' next 16 units, and whatever is left of either.
void pack_square(const uint32_t* weight, int64_t step, int64_t outputs, int64_t units,
                 uint32_t* panel) {
    UVec square[LANES] = {};
    for (int64_t o = 0; o < outputs; o++)
        std::memcpy(square + o, weight + o * step, std::min<int64_t>(units, LANES) * 4);
    transpose(square);
    for (int64_t u = 0; u < std::min<int64_t>(units, LANES); u++)
        std::memcpy(panel + u * PANEL, square + u, sizeof *square);
}

}  // namespace

extern "C" {

// The outputs of a panel; packed weights are of whole panels.
int64_t fminfer_panel() { return PANEL; }

// weight: (outputs, units of 32 bits); packed: of outputs rounded up to whole panels, 0 behind them.
void fminfer_pack(const uint32_t* weight, int64_t outputs, int64_t units, uint32_t* packed,
                  int64_t num_threads) {
    for_pieces(num_threads, (outputs + PANEL - 1) / PANEL, [&](int64_t p, int) {
        for (int64_t u = 0; u < units; u += LANES)
            for (int64_t n = 0; n < PANEL; n += LANES) {
                const int64_t first = p * PANEL + n, left = outputs - first;
                pack_square(weight + first * units + u, units,
                            std::max<int64_t>(0, std::min<int64_t>(left, LANES)), units - u,
                            packed + p * PANEL * units + u * PANEL + n);
            }
    });
}

// out = x times the weight's transpose, plus bias.
void fminfer_multiply(const Product* a) {
    const bool has_halves = a->weight_type == 1;
    if (a->x_type == 0) {
        const float* x = static_cast<const float*>(a->x);
        return has_halves ? multiply<Widened, float>(*a, x) : multiply<Floats, float>(*a, x);
    }
    const uint16_t* x = static_cast<const uint16_t*>(a->x);
#ifdef HAS_PAIRS
    multiply<Pairs, uint16_t>(*a, x);
#else
    multiply_widened(*a, x);
#endif
}

}  // extern "C"

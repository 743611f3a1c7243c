// Logits where the processor multiplies floats: rows and weight may each be float32 or bfloat16.
//
// Some outputs at a time, and of them some inputs, are turned: then the weights of one input stand
// side by side, as floats. All rows meet them there, a few rows at a time, whose sums are in
// registers. Vectors are as wide as the processor's. Each logit sums its inputs in their order.
#pragma once

#include <utility>

#include "calls.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int MOST_SUMMED = (REGISTERS - 4) / 2;  // rows whose sums of two vectors registers hold
constexpr int TURNED = 4 * WIDTH;                 // outputs that are turned together
constexpr int TURNED_INPUTS = 128;                // of them: so many fit into the first cache
constexpr int TURNED_BLOCKS = 256 / TURNED;       // of outputs that a thread takes at a time

typedef int32_t IWide __attribute__((vector_size(4 * WIDTH)));
// Pairs of bfloat16 begin anywhere.
typedef uint32_t LooseBits __attribute__((vector_size(4 * WIDTH), aligned(2), may_alias));

// Lanes of two vectors in turns, SIZE of each, from the lower or upper HALF of each four.
template <int SIZE, int HALF>
struct InTurns {
    static constexpr int of(int lane) {
        const int of_four = lane % 4;
        return of_four / SIZE % 2 * WIDTH + lane / 4 * 4 + HALF * 2 +
               of_four / (2 * SIZE) * SIZE + of_four % SIZE;
    }
};

// Every second four of one vector, from the first or second on, then those of another.
template <int FIRST>
struct EverySecondFour {
    static constexpr int of(int lane) {
        const int four = lane / 4, half = WIDTH < 8 ? 1 : WIDTH / 8;
        return (four / half * WIDTH + (four % half * 2 + FIRST) * 4 + lane % 4) % (2 * WIDTH);
    }
};

template <typename Place, size_t... LANE>
inline UWide pick(UWide a, UWide b, std::index_sequence<LANE...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, Place::of(LANE)...);
#else
    return __builtin_shuffle(a, b, IWide{Place::of(LANE)...});
#endif
}

// Puts two picks of two vectors in their place.
template <template <int> class Place>
inline void pick_both(UWide& a, UWide& b) {
    constexpr auto lanes = std::make_index_sequence<WIDTH>();
    const UWide first = pick<Place<0>>(a, b, lanes);
    b = pick<Place<1>>(a, b, lanes);
    a = first;
}
template <int HALF>
using InTurnsOf1 = InTurns<1, HALF>;
template <int HALF>
using InTurnsOf2 = InTurns<2, HALF>;

// Picks of rows that are STEP apart.
template <template <int> class Place, int STEP>
inline void pick_rows(UWide* rows) {
    for (int first = 0; first + STEP < WIDTH; first += 2 * STEP)
        for (int i = first; i < first + STEP; i++) pick_both<Place>(rows[i], rows[i + STEP]);
}

// Row i of a square becomes column i: take(i, column i) gets each.
template <typename Take>
inline void turn(UWide* rows, Take take) {
    pick_rows<InTurnsOf1, 1>(rows);
    pick_rows<InTurnsOf2, 2>(rows);
    pick_rows<EverySecondFour, 4>(rows);
    pick_rows<EverySecondFour, 8>(rows);
    constexpr int column_of[] = {0, 2, 1, 3};
    for (int i = 0; i < WIDTH; i++) take(i / 4 * 4 + column_of[i % 4], rows[i]);
}

// What lies side by side in 32 bits: a float, or two inputs of bfloat16.
inline void put_turned(int i, UWide both, const float*, float* to) {
    *reinterpret_cast<LooseBits*>(to + i * TURNED) = both;
}
inline void put_turned(int i, UWide both, const uint16_t*, float* to) {
    *reinterpret_cast<LooseBits*>(to + 2 * i * TURNED) = both << 16;
    *reinterpret_cast<LooseBits*>(to + (2 * i + 1) * TURNED) = both & 0xFFFF0000;
}

// Turns `count` inputs, from `at` on, of the outputs from `first` on: to (count, TURNED) and a bit
// more. Behind the last output it is turned again. What is so far ahead is fetched meanwhile.
template <typename Weight>
void turn_outputs(const Head& a, int64_t first, int64_t at, int64_t count, int64_t ahead,
                  float* to) {
    constexpr int64_t step = WIDTH * sizeof(float) / sizeof(Weight);
    const Weight* weight = static_cast<const Weight*>(a.weight);
    for (int v = 0; v < TURNED; v += WIDTH) {
        const Weight* from[WIDTH];
        for (int n = 0; n < WIDTH; n++) {
            const int64_t output = first + v + n;
            from[n] = weight + (output < a.outputs ? output : a.outputs - 1) * a.inputs + at;
        }
        UWide rows[WIDTH];
        int64_t i = 0;
        for (; i + step <= count; i += step) {
            const bool is_new_line = i * sizeof(Weight) % 64 == 0;
            for (int n = 0; n < WIDTH; n++) {
                rows[n] = *reinterpret_cast<const LooseBits*>(from[n] + i);
                if (is_new_line) __builtin_prefetch(from[n] + i + ahead);
            }
            turn(rows, [&](int c, UWide column) {
                put_turned(c, column, weight, to + i * TURNED + v);
            });
        }
        if (i == count) continue;
        for (int n = 0; n < WIDTH; n++) {
            rows[n] = UWide{};
            std::memcpy(&rows[n], from[n] + i, (count - i) * sizeof(Weight));
        }
        turn(rows, [&](int c, UWide column) {
            put_turned(c, column, weight, to + i * TURNED + v);
        });
    }
}

// sums, (R, TURNED), of V vectors += `count` inputs of R rows, (count, R), times those of outputs.
template <int R, int V>
void add_inputs(const float* x, const float* weight, int64_t count, bool is_first, float* sums) {
    Wide sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            sum[r][v] = is_first ? Wide{}
                                 : wide_at(sums + r * TURNED + v * WIDTH);
    for (int64_t i = 0; i < count; i++, x += R, weight += TURNED) {
        Wide weights[V];
        for (int v = 0; v < V; v++)
            weights[v] = wide_at(weight + v * WIDTH);
        for (int r = 0; r < R; r++) {
            const Wide one = Wide{} + x[r];
            for (int v = 0; v < V; v++) sum[r][v] += one * weights[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            put_wide(sums + r * TURNED + v * WIDTH, sum[r][v]);
}

// The same of all vectors.
template <int R>
void add_rows(const float* x, const float* weight, int64_t count, bool is_first, float* sums) {
    constexpr int V = 2 * R <= MOST_SUMMED ? 4 : 2;
    for (int v = 0; v < 4; v += V)
        add_inputs<R, V>(x, weight + v * WIDTH, count, is_first, sums + v * WIDTH);
}

typedef void (*AddRows)(const float*, const float*, int64_t, bool, float*);
template <size_t... R>
constexpr AddRows add_rows_of(int64_t rows, std::index_sequence<R...>) {
    constexpr AddRows bodies[] = {add_rows<R + 1>...};
    return bodies[rows - 1];
}

// How rows are divided into groups that are summed together.
struct Groups {
    int64_t rows, num = (rows + MOST_SUMMED - 1) / MOST_SUMMED;
    int64_t begin(int64_t group) const { return rows * group / num; }
};

// Packs the rows of a group: (inputs, its rows).
template <typename Number>
void pack_group(const Head& a, int64_t begin, int64_t end, float* packed) {
    const Number* x = static_cast<const Number*>(a.x);
    float* to = packed + begin * a.inputs;
    for (int64_t r = begin; r < end; r++)
        for (int64_t i = 0; i < a.inputs; i++)
            to[i * (end - begin) + r - begin] = number(x[r * a.inputs + i]);
}

// Writes all rows' sums, (rows, TURNED), of the outputs from `first` on.
inline void finish_rows(const Head& a, int64_t first, const float* sums) {
    const int64_t left = a.outputs - first, count = left < TURNED ? left : TURNED;
    for (int64_t r = 0; r < a.rows; r++) {
        float* out = a.out + r * a.outputs + first;
        for (int64_t o = 0; o < count; o++)
            out[o] = sums[r * TURNED + o] + (a.bias == nullptr ? 0.0f : a.bias[first + o]);
    }
}

// All rows' products with the outputs from `first` on.
template <typename Weight>
void multiply_block(const Head& a, const float* packed, int64_t first, float* sums, float* turned) {
    const Groups groups{a.rows};
    for (int64_t at = 0; at < a.inputs; at += TURNED_INPUTS) {
        const int64_t left = a.inputs - at, count = left < TURNED_INPUTS ? left : TURNED_INPUTS;
        const int64_t next = left > TURNED_INPUTS ? TURNED_INPUTS : TURNED * a.inputs - at;
        turn_outputs<Weight>(a, first, at, count, next, turned);
        for (int64_t g = 0; g < groups.num; g++) {
            const int64_t begin = groups.begin(g), rows = groups.begin(g + 1) - begin;
            const AddRows add = add_rows_of(rows, std::make_index_sequence<MOST_SUMMED>());
            add(packed + begin * a.inputs + at * rows, turned, count, at == 0,
                sums + begin * TURNED);
        }
    }
    finish_rows(a, first, sums);
}

// The floats that a call needs beside its operands: rows, and for each thread sums and outputs.
inline int64_t space_of_floats(int64_t rows, int64_t inputs, int64_t num_threads) {
    return rows * inputs + num_threads * TURNED * (rows + TURNED_INPUTS);
}

template <typename Number, typename Weight>
void multiply_floats(const Head& a) {
    const Groups groups{a.rows};
    float* packed = static_cast<float*>(a.space);
    float* spaces = packed + a.rows * a.inputs;
    for_pieces(a.num_threads, groups.num, [&](int64_t g, int) {
        pack_group<Number>(a, groups.begin(g), groups.begin(g + 1), packed);
    });
    const int64_t blocks = (a.outputs + TURNED - 1) / TURNED;
    const int64_t pieces = (blocks + TURNED_BLOCKS - 1) / TURNED_BLOCKS;
    for_pieces(a.num_threads, pieces, [&](int64_t piece, int thread) {
        float* sums = spaces + thread * TURNED * (a.rows + TURNED_INPUTS);
        const int64_t end = piece + 1 < pieces ? (piece + 1) * TURNED_BLOCKS : blocks;
        for (int64_t b = piece * TURNED_BLOCKS; b < end; b++)
            multiply_block<Weight>(a, packed, b * TURNED, sums, sums + a.rows * TURNED);
    });
}

}  // namespace

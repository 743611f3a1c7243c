// Logits: rows times the head's weight, summed in float32 and left in it. Rounded to bfloat16, a
// logit of 20 would be a multiple of 1/8.
//
// The weight is read as the checkpoint has it, (outputs, inputs): it is often the embedding as
// well, and then too large for a second copy. Each logit sums its inputs in their order, whatever
// the number of rows and of threads. Floats are multiplied by head_floats.h. Where the processor
// multiplies pairs of bfloat16 and both are that, 32 outputs at a time meet all rows, 16 or 32 at a
// time; rows are packed once a call, one a lane.
#include "calls.h"
#include "halves.h"
#include "head_floats.h"
#include "pool.h"

namespace {

#ifdef HAS_PAIRS

constexpr int OUTPUTS = GROUP_KEYS;  // that are multiplied together
constexpr int MOST_ROWS = 2 * LANES;
constexpr int BLOCKS = 8;  // of so many outputs that a thread takes at a time

// Where an input stands among N * 16 rows that are packed.
inline int64_t place_of(int64_t input, int64_t row, int64_t n) {
    const int64_t tile = input / (2 * PAIRS) * n + row / LANES;
    return tile * TILE + input % (2 * PAIRS) / 2 * 2 * LANES + row % LANES * 2 + input % 2;
}

// Inputs with zeros behind them, to an odd number of cache lines: then rows do not all meet in the
// same places of a cache.
inline int64_t width_of(int64_t inputs) { return ((inputs + 31) / 32 | 1) * 32; }

// Packs the rows that begin at x and those, of zeros, that make them N * 16.
void pack_rows(const Head& a, const uint16_t* x, int64_t rows, int64_t n, uint16_t* packed) {
    const int64_t width = width_of(a.inputs);
    for (int64_t r = 0; r < n * LANES; r++)
        for (int64_t i = 0; i < width; i++) {
            const bool is_there = r < rows && i < a.inputs;
            packed[place_of(i, r, n)] = is_there ? x[r * a.inputs + i] : uint16_t(0);
        }
}

void copy_outputs(const uint16_t* weight, int64_t inputs, int64_t count, uint16_t* block) {
    const int64_t width = width_of(inputs);
    for (int64_t o = 0; o < count; o++) {
        uint16_t* to = block + o * width;
        std::memcpy(to, weight + o * inputs, inputs * sizeof *to);
        for (int64_t i = inputs; i < width; i++) to[i] = 0;
    }
}

// Whether outputs need no copy: few rows read them once only, and they do not meet in the same
// places of a cache.
inline bool serves_in_place(const Head& a, int64_t count) {
    const int64_t lines = a.inputs / 32;
    return a.rows <= MOST_ROWS && count == OUTPUTS && a.inputs % 32 == 0 && lines % 16 != 0;
}

// Writes the scores, (OUTPUTS, n * 16), of `count` outputs and the rows that begin at `row`.
void finish(const Head& a, const float* scores, int64_t n, int64_t first, int64_t count,
            int64_t row) {
    for (int64_t o = 0; o < count; o += LANES)
        for (int64_t r = 0; r < n * LANES && row + r < a.rows; r += LANES) {
            UVec square[LANES];
            for (int l = 0; l < LANES; l++)
                square[l] = (UVec)load(scores + (o + l) * n * LANES + r);
            transpose(square);
            const int64_t num = count - o < LANES ? count - o : LANES, at = first + o;
            for (int64_t l = 0; l < LANES && row + r + l < a.rows; l++) {
                Vec sum = (Vec)square[l];
                if (a.bias != nullptr)
                    for (int64_t i = 0; i < num; i++) sum[i] += a.bias[at + i];
                std::memcpy(a.out + (row + r + l) * a.outputs + at, &sum, num * sizeof(float));
            }
        }
}

// All rows' products with `count` outputs, of which `block` has room for a copy.
template <typename Body>
void multiply_outputs(const Head& a, const uint16_t* packed, int64_t first, int64_t count,
                      uint16_t* block) {
    const uint16_t* outputs = static_cast<const uint16_t*>(a.weight) + first * a.inputs;
    const int64_t width = width_of(a.inputs);
    int64_t dim = a.inputs;
    alignas(64) float scores[OUTPUTS * MOST_ROWS];
    if (!serves_in_place(a, count)) {
        copy_outputs(outputs, a.inputs, count, block);
        outputs = block;
        dim = width;
    }
    for (int64_t row = 0; row < a.rows; row += MOST_ROWS) {
        const int64_t n = a.rows - row > LANES ? 2 : 1;
        const uint16_t* rows = packed + row * width;
        n == 2 ? Body::template score<2>(rows, outputs, int(dim), scores)
               : Body::template score<1>(rows, outputs, int(dim), scores);
        finish(a, scores, n, first, count, row);
    }
}

template <typename Body>
void multiply(const Head& a) {
    const int64_t width = width_of(a.inputs), groups = (a.rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t blocks = (a.outputs + OUTPUTS - 1) / OUTPUTS;
    const uint16_t* x = static_cast<const uint16_t*>(a.x);
    uint16_t* packed = static_cast<uint16_t*>(a.space);
    uint16_t* copies = packed + groups * MOST_ROWS * width;
    for_pieces(a.num_threads, groups, [&](int64_t g, int) {
        const int64_t row = g * MOST_ROWS, left = a.rows - row;
        pack_rows(a, x + row * a.inputs, left, left > LANES ? 2 : 1, packed + row * width);
    });
    const int64_t pieces = (blocks + BLOCKS - 1) / BLOCKS;
    for_pieces(a.num_threads, pieces, [&](int64_t piece, int thread) {
        const int64_t end = piece + 1 < pieces ? (piece + 1) * BLOCKS : blocks;
        Body::begin();
        for (int64_t b = piece * BLOCKS; b < end; b++) {
            const int64_t first = b * OUTPUTS, left = a.outputs - first;
            multiply_outputs<Body>(a, packed, first, left < OUTPUTS ? left : OUTPUTS,
                                   copies + thread * OUTPUTS * width);
        }
        Body::end();
    });
}

inline int64_t space_of_pairs(int64_t rows, int64_t inputs, int64_t num_threads) {
    const int64_t packed = (rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    return (packed + num_threads * OUTPUTS) * width_of(inputs) * int64_t(sizeof(uint16_t));
}

#endif

}  // namespace

extern "C" {

// The bytes that a call needs beside its operands.
int64_t fminfer_head_space(int64_t rows, int64_t inputs, int64_t num_threads) {
    int64_t bytes = space_of_floats(rows, inputs, num_threads) * int64_t(sizeof(float));
#ifdef HAS_PAIRS
    const int64_t of_pairs = space_of_pairs(rows, inputs, num_threads);
    bytes = bytes < of_pairs ? of_pairs : bytes;
#endif
    return bytes;
}

void fminfer_head(const Head* a) {
    if (a->x_type == 0)
        return a->weight_type == 0 ? multiply_floats<float, float>(*a)
                                   : multiply_floats<float, uint16_t>(*a);
    if (a->weight_type == 0) return multiply_floats<uint16_t, float>(*a);
#ifdef HAS_TILES
    if (may_use_tiles()) return multiply<Tiles>(*a);
#endif
#ifdef HAS_PAIRS
    multiply<Vectors>(*a);
#else
    multiply_floats<uint16_t, uint16_t>(*a);
#endif
}

}  // extern "C"

// Logits: rows times the head's weight, of bfloat16, summed in float32 and left in it. Rounded to
// bfloat16, a logit of 20 would be a multiple of 1/8.
//
// The weight is read as the checkpoint has it, (outputs, inputs): it is often the embedding as
// well, and then too large for a second copy. 32 outputs at a time are copied to where they are
// near, and meet all rows there, 16 or 32 at a time. Rows are packed once a call, one a lane. Each
// logit sums its inputs in their order, whatever the number of rows and of threads.
#include "calls.h"
#include "halves.h"
#include "pool.h"

namespace {

constexpr int OUTPUTS = GROUP_KEYS;  // that are multiplied together
constexpr int MOST_ROWS = 2 * LANES;
constexpr int BLOCKS = 8;  // of so many outputs that a thread takes at a time

#ifdef HAS_PAIRS

typedef uint16_t Number;  // what is multiplied
inline void copy(const uint16_t* from, int64_t count, Number* to) {
    std::memcpy(to, from, count * sizeof *to);
}
inline Number number_of(uint16_t bits) { return bits; }

// Where an input stands among N * 16 rows that are packed.
inline int64_t place_of(int64_t input, int64_t row, int64_t n) {
    const int64_t tile = input / (2 * PAIRS) * n + row / LANES;
    return tile * TILE + input % (2 * PAIRS) / 2 * 2 * LANES + row % LANES * 2 + input % 2;
}

#else

typedef float Number;
inline void copy(const uint16_t* from, int64_t count, Number* to) {
    typedef uint32_t Bits __attribute__((may_alias));
    Bits* bits = reinterpret_cast<Bits*>(to);
    for (int64_t i = 0; i < count; i++) bits[i] = uint32_t(from[i]) << 16;
}
inline Number number_of(uint16_t bits) { return from_bfloat16(bits); }
inline int64_t place_of(int64_t input, int64_t row, int64_t n) {
    return input * n * LANES + row;
}

#ifdef __AVX512F__
typedef Loose Wide;
constexpr int HELD = 16;  // vectors of sums that the registers hold
#else
// g++ keeps sums of its longer vectors in memory where the processor has shorter ones.
typedef float Wide __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int HELD = 8;
#endif

// Where the processor has no products of pairs; see halves.h.
struct Floats {
    static void begin() {}
    static void end() {}

    template <int N>
    static void score(const float* rows, const float* weight, int dim, float* scores) {
        constexpr int WIDTH = sizeof(Wide) / sizeof(float), V = N * LANES / WIDTH;
        constexpr int J = HELD / V;  // outputs at a time
        for (int first = 0; first < OUTPUTS; first += J) {
            const float *from = weight + int64_t(first) * dim, *row = rows;
            Wide sum[J][V];
            for (int j = 0; j < J; j++)
                for (int v = 0; v < V; v++) sum[j][v] = Wide{};
            for (int d = 0; d < dim; d++, row += N * LANES)
                for (int j = 0; j < J; j++)
                    for (int v = 0; v < V; v++)
                        sum[j][v] += *reinterpret_cast<const Wide*>(row + v * WIDTH) *
                                     from[j * dim + d];
            for (int j = 0; j < J; j++)
                for (int v = 0; v < V; v++)
                    *reinterpret_cast<Wide*>(scores + (first + j) * N * LANES + v * WIDTH) =
                        sum[j][v];
        }
    }
};

#endif

// Inputs with zeros behind them, to an odd number of cache lines: then rows do not all meet in the
// same places of a cache.
inline int64_t width_of(int64_t inputs) { return ((inputs + 31) / 32 | 1) * 32; }

// Packs the rows that begin at x and those, of zeros, that make them N * 16.
void pack_rows(const Head& a, const uint16_t* x, int64_t rows, int64_t n, Number* packed) {
    const int64_t width = width_of(a.inputs);
    for (int64_t r = 0; r < n * LANES; r++)
        for (int64_t i = 0; i < width; i++) {
            const bool is_there = r < rows && i < a.inputs;
            packed[place_of(i, r, n)] = is_there ? number_of(x[r * a.inputs + i]) : Number(0);
        }
}

void copy_outputs(const Head& a, int64_t first, int64_t count, Number* block) {
    const int64_t width = width_of(a.inputs);
    for (int64_t o = 0; o < count; o++) {
        Number* to = block + o * width;
        copy(a.weight + (first + o) * a.inputs, a.inputs, to);
        for (int64_t i = a.inputs; i < width; i++) to[i] = Number(0);
    }
}

// Whether outputs need no copy: few rows read them once only, and they do not meet in the same
// places of a cache.
inline bool serves_in_place(const Head& a, int64_t count) {
#ifdef HAS_PAIRS
    const int64_t lines = a.inputs / 32;
    return a.rows <= MOST_ROWS && count == OUTPUTS && a.inputs % 32 == 0 && lines % 16 != 0;
#else
    return false;  // they are copied as floats
#endif
}

inline const Number* in_place(const Head& a, int64_t first) {
#ifdef HAS_PAIRS
    return a.weight + first * a.inputs;
#else
    return nullptr;
#endif
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
void multiply_outputs(const Head& a, const Number* packed, int64_t first, int64_t count,
                      Number* block) {
    const int64_t width = width_of(a.inputs);
    const Number* outputs = block;
    int64_t dim = width;
    alignas(64) float scores[OUTPUTS * MOST_ROWS];
    if (serves_in_place(a, count)) {
        outputs = in_place(a, first);
        dim = a.inputs;
    } else {
        copy_outputs(a, first, count, block);
    }
    for (int64_t row = 0; row < a.rows; row += MOST_ROWS) {
        const int64_t n = a.rows - row > LANES ? 2 : 1;
        const Number* rows = packed + row * width;
        n == 2 ? Body::template score<2>(rows, outputs, int(dim), scores)
               : Body::template score<1>(rows, outputs, int(dim), scores);
        finish(a, scores, n, first, count, row);
    }
}

template <typename Body>
void multiply(const Head& a) {
    const int64_t width = width_of(a.inputs), groups = (a.rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t blocks = (a.outputs + OUTPUTS - 1) / OUTPUTS;
    Number* packed = static_cast<Number*>(a.space);
    Number* copies = packed + groups * MOST_ROWS * width;
    for_pieces(a.num_threads, groups, [&](int64_t g, int) {
        const int64_t row = g * MOST_ROWS, left = a.rows - row;
        pack_rows(a, a.x + row * a.inputs, left, left > LANES ? 2 : 1, packed + row * width);
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

}  // namespace

extern "C" {

// The bytes that a call needs beside its operands.
int64_t fminfer_head_space(int64_t rows, int64_t inputs, int64_t num_threads) {
    const int64_t packed = (rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    return (packed + num_threads * OUTPUTS) * width_of(inputs) * int64_t(sizeof(Number));
}

void fminfer_head(const Head* a) {
#ifdef HAS_TILES
    if (may_use_tiles()) return multiply<Tiles>(*a);
#endif
#ifdef HAS_PAIRS
    multiply<Vectors>(*a);
#else
    multiply<Floats>(*a);
#endif
}

}  // extern "C"

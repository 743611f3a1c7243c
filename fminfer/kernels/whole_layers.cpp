// A whole layer in bfloat16, with norms before attention and MLP, in one call: the steps are those
// of the other files, one after another, and so are their results, to the last bit. Called one by
// one from Python they cost 0.5 ms a layer beside the arithmetic (an AMD Zen 4).

#include <omp.h>

#include <cstring>

#include "calls.h"
#include "halves.h"
#include "vectors.h"

#ifdef HAS_PAIRS

extern "C" {

// Must agree with Norm, Linear and Layer of whole_layers.py.
struct Norm {
    const void *weight, *bias;  // null: no norm; no bias: an RMS norm
    float eps, offset;
};

struct Linear {
    const uint16_t* weight;  // packed
    const float* bias;
    int64_t inputs, outputs;
};

struct Layer {
    Norm first, second, of_query, of_key;  // of_query, of_key: of each head
    Linear qkv, out, up, down;  // up: gate and up side by side, if it has twice down's inputs
    void *keys, *values;        // of the cache
    const float* slopes;        // of ALiBi, or null
    // Of what qkv gives: from a head to the next, and where the first key and first value begin.
    int64_t head_step, key_at, value_at;
    int64_t activation, window;
    float scaling, softcap;
};

// Where the time goes, in seconds; the rest of a call is not counted.
struct Spent {
    double products, attention;
};

}  // extern "C"

namespace {

class Caller {
   public:
    Caller(int64_t num_threads, Spent* spent) : num_threads(num_threads), spent(spent) {}

    void norm(const Norm& n, const uint16_t* x, uint16_t* out, int64_t rows, int64_t width,
              const uint16_t* other = nullptr, uint16_t* sum = nullptr) const {
        const Rows r = {x, out, rows, 1, width, width, 0, 1, num_threads};
        if (n.bias)
            fminfer_layer_norm(&r, n.weight, n.bias, n.eps, other, sum);
        else
            fminfer_rms_norm(&r, n.weight, n.eps, n.offset, other, sum);
    }

    void multiply(const Linear& l, const uint16_t* x, uint16_t* out, int64_t rows) const {
        const double start = spent ? omp_get_wtime() : 0;
        const Product p = {x, l.weight, l.bias, out, rows, l.inputs, l.outputs, num_threads};
        fminfer_multiply(&p);
        if (spent) spent->products += omp_get_wtime() - start;
    }

    int attend(const Arguments& a) const {
        const double start = spent ? omp_get_wtime() : 0;
        const int failed = fminfer_attention(&a);
        if (spent) spent->attention += omp_get_wtime() - start;
        return failed;
    }

    const int64_t num_threads;
    Spent* const spent;
};

// Puts rows `kept` of (…, width) one behind the other, where they may also lie.
void keep_rows(const uint16_t* rows, int64_t width, const int64_t* kept, int64_t num,
               uint16_t* to) {
    for (int64_t i = 0; i < num; i++)
        std::memmove(to + i * width, rows + kept[i] * width, width * sizeof *to);
}

}  // namespace

extern "C" {

int fminfer_has_layers() { return 1; }

// The numbers that `space` must have for each token.
int64_t fminfer_layer_space(const Layer* l) {
    const int64_t before = 2 * l->qkv.outputs;
    const int64_t behind = l->qkv.inputs + l->up.outputs + l->down.inputs;
    return l->qkv.inputs + l->out.inputs + (before > behind ? before : behind);
}

// out = the layer's output for hidden states x, (tokens, hidden). `given` tells all of attention
// but the tensors of the layer. `turned` 0: there are no rotary positions. Of tokens, only `kept`
// ones, which ascend, go on behind attention and are in `out`; null: all. Nonzero: there was no
// memory.
int fminfer_layer(const Layer* layer, const Arguments* given, const float* cos, const float* sin,
                  int64_t turned, const int64_t* kept, int64_t num_kept, const uint16_t* x,
                  uint16_t* out, uint16_t* space, Spent* spent) {
    const Layer& l = *layer;
    Arguments a = *given;
    const Caller call(a.num_threads, spent);
    const int64_t tokens = a.num_tokens, hidden = l.qkv.inputs, dim = a.head_dim;
    const int64_t of_query = a.heads * dim, of_key = a.kv_heads * dim, turning = of_query + of_key;
    const auto take = [&](int64_t width) {
        uint16_t* const from = space;
        space += width * tokens;
        return from;
    };
    uint16_t *const normed = take(hidden), *const attended = take(of_query);
    uint16_t* const rest = space;  // what attention reads, then what follows it
    uint16_t *const qkv = take(l.qkv.outputs), *const query = take(turning);

    call.norm(l.first, x, normed, tokens, hidden);
    call.multiply(l.qkv, normed, qkv, tokens);
    const auto turn = [&](const uint16_t* from, int64_t step, uint16_t* to, int64_t heads) {
        const Rows r = {from, to, tokens, heads, dim, step, dim, 1, call.num_threads};
        fminfer_rotate(&r, cos, sin, turned);
    };
    const auto norm_and_turn = [&](const Norm& n, const uint16_t* from, uint16_t* to,
                                   int64_t heads) {
        uint16_t* const between = attended;
        const Rows r = {from, between, tokens, heads, dim, l.qkv.outputs, dim, 1, call.num_threads};
        fminfer_rms_norm(&r, n.weight, n.eps, n.offset, nullptr, nullptr);
        turn(between, heads * dim, to, heads);
    };
    const bool is_normed = l.of_query.weight != nullptr;
    const uint16_t* const key = query + of_query * (is_normed ? tokens : 1);
    if (turned == 0) {
        // Queries and keys are read where they are.
    } else if (is_normed) {
        norm_and_turn(l.of_query, qkv, query, a.heads);
        norm_and_turn(l.of_key, qkv + l.key_at, query + of_query * tokens, a.kv_heads);
    } else {
        turn(qkv, l.qkv.outputs, query, a.heads + a.kv_heads);
    }
    a.query = turned ? query : qkv;
    a.new_keys = turned ? key : qkv + l.key_at;
    a.new_values = qkv + l.value_at;
    a.query_head = a.new_key_head = a.new_value_head = l.head_step;
    a.query_token = !turned ? l.qkv.outputs : is_normed ? of_query : turning;
    a.new_key_token = !turned ? l.qkv.outputs : is_normed ? of_key : turning;
    a.new_value_token = l.qkv.outputs;
    a.slopes = l.slopes;
    a.out = attended;
    a.keys = l.keys;
    a.values = l.values;
    a.window = l.window;
    a.scaling = l.scaling;
    a.softcap = l.softcap;
    if (call.attend(a)) return 1;

    const int64_t rows = kept ? num_kept : tokens, wide = l.down.inputs;
    if (kept) {
        keep_rows(attended, of_query, kept, rows, attended);
        keep_rows(x, hidden, kept, rows, normed);
    }
    space = rest;
    const bool gates = l.up.outputs == 2 * wide;
    uint16_t *const again = take(hidden), *const both = take(l.up.outputs);
    uint16_t* const gated = take(wide);
    uint16_t* const sum = normed;
    call.multiply(l.out, attended, out, rows);
    call.norm(l.second, kept ? normed : x, again, rows, hidden, out, sum);
    call.multiply(l.up, again, both, rows);
    const Rows r = {both, gated, rows, 1, wide, l.up.outputs, 0, 1, call.num_threads};
    fminfer_gate(&r, gates ? both + wide : nullptr, l.activation);
    call.multiply(l.down, gated, out, rows);
    const int64_t num = rows * hidden / LANES;
#pragma omp parallel for schedule(static) num_threads(int(call.num_threads))
    for (int64_t i = 0; i < num; i++)
        store(out + i * LANES, load(sum + i * LANES) + load(out + i * LANES));
    return 0;
}

}  // extern "C"

#else

extern "C" int fminfer_has_layers() { return 0; }

#endif

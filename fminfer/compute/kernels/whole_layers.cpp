// A whole layer, in float32 or bfloat16, with norms before attention and MLP, in one call: the steps are those
// of the other files, one after another, and so are their results, to the last bit. Called one by
// one from Python they cost 0.5 ms a layer beside the arithmetic (an AMD Zen 4).

#include <chrono>
#include <cstring>
#include <new>
#include <type_traits>

#include "calls.h"
#include "pool.h"
#include "sums.h"
#include "vectors.h"

extern "C" {

// Must agree with Norm, Linear and Layer of whole_layers.py.
struct Norm {
    const void *weight, *bias;  // null: no norm; no bias: an RMS norm
    float eps, offset;
};

struct Linear {
    const Packed* parts;
    const float* bias;
    int64_t num_parts, inputs, outputs;
};

struct Layer {
    Norm first, second, of_query, of_key;  // of_query, of_key: of each head
    // up: gate and up side by side, if it has twice down's inputs; null: the MLP is another's.
    Linear qkv, out, up, down;
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

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

template <typename T>
class Caller {
   public:
    Caller(int64_t num_threads, Spent* spent) : num_threads(num_threads), spent(spent) {}

    void norm(const Norm& n, const T* x, T* out, int64_t rows, int64_t width,
              const T* other = nullptr, T* sum = nullptr) const {
        const Rows r = {x, out, rows, 1, width, width, 0, TYPE, num_threads};
        if (n.bias)
            fminfer_layer_norm(&r, n.weight, n.bias, n.eps, other, sum);
        else
            fminfer_rms_norm(&r, n.weight, n.eps, n.offset, other, sum);
    }

    void multiply(const Linear& l, const T* x, T* out, int64_t rows) const {
        const double start = spent ? seconds() : 0;
        const Product p = {x, l.parts, l.bias, out, l.num_parts, rows,
                           l.inputs, l.outputs, TYPE, TYPE, num_threads};
        if (fminfer_multiply(&p)) throw std::bad_alloc();
        if (spent) spent->products += seconds() - start;
    }

    void attend(const Arguments& a) const {
        const double start = spent ? seconds() : 0;
        if (fminfer_attention(&a)) throw std::bad_alloc();
        if (spent) spent->attention += seconds() - start;
    }

    static constexpr int64_t TYPE = sizeof(T) == 4 ? 0 : 1;
    const int64_t num_threads;
    Spent* const spent;
};

// Puts rows `kept` of (…, width) one behind the other, where they may also lie.
template <typename T>
void keep_rows(const T* rows, int64_t width, const int64_t* kept, int64_t num,
               T* to) {
    for (int64_t i = 0; i < num; i++)
        std::memmove(to + i * width, rows + kept[i] * width, width * sizeof *to);
}

// out = the layer's output for hidden states x, (tokens, hidden). `given` tells all of attention
// but the tensors of the layer. `turned` 0: there are no rotary positions. Of tokens, only `kept`
// ones, which ascend, go on behind attention and are in `out`; null: all. Without an MLP `out` is
// what it is added to, and `for_mlp` what it takes. `sums`: the layer is a shard, and what `out` and
// `down` give is added up over all of them; null: it is whole. Nonzero: a sum cannot be. Throws
// std::bad_alloc.
template <typename T>
int run(const Layer* layer, const Arguments* given, const float* cos, const float* sin,
         int64_t turned, const int64_t* kept, int64_t num_kept, const T* x, T* out, T* for_mlp,
         T* space, Sums* sums, Spent* spent) {
    const Layer& l = *layer;
    Arguments a = *given;
    const Caller<T> call(a.num_threads, spent);
    const int64_t tokens = a.num_tokens, hidden = l.qkv.inputs, dim = a.head_dim;
    const int64_t of_query = a.heads * dim, of_key = a.kv_heads * dim, turning = of_query + of_key;
    const auto take = [&](int64_t width) {
        T* const from = space;
        space += width * tokens;
        return from;
    };
    T *const normed = take(hidden), *const attended = take(of_query);
    T* const rest = space;  // what attention reads, then what follows it
    T *const qkv = take(l.qkv.outputs), *const query = take(turning);

    call.norm(l.first, x, normed, tokens, hidden);
    call.multiply(l.qkv, normed, qkv, tokens);
    const auto turn = [&](const T* from, int64_t step, T* to, int64_t heads) {
        const Rows r = {from, to, tokens, heads, dim, step, dim, call.TYPE, call.num_threads};
        fminfer_rotate(&r, cos, sin, turned);
    };
    const auto norm_and_turn = [&](const Norm& n, const T* from, T* to,
                                   int64_t heads) {
        T* const between = attended;
        const Rows r = {from, between, tokens, heads, dim, l.qkv.outputs, dim, call.TYPE, call.num_threads};
        fminfer_rms_norm(&r, n.weight, n.eps, n.offset, nullptr, nullptr);
        turn(between, heads * dim, to, heads);
    };
    const bool is_normed = l.of_query.weight != nullptr;
    const T* const key = query + of_query * (is_normed ? tokens : 1);
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
    call.attend(a);

    const int64_t rows = kept ? num_kept : tokens, wide = l.down.inputs;
    if (kept) {
        keep_rows(attended, of_query, kept, rows, attended);
        keep_rows(x, hidden, kept, rows, normed);
    }
    space = rest;
    const bool gates = l.up.outputs == 2 * wide, has_mlp = l.up.parts != nullptr;
    T *const again = has_mlp ? take(hidden) : for_mlp, *const both = take(l.up.outputs);
    T* const gated = take(wide);
    T* const sum = has_mlp ? normed : out;
    const int64_t num = rows * hidden;
    const auto add_up = [&] { return sums ? fminfer_sum(sums, out, num, call.TYPE, call.num_threads) : 0; };
    call.multiply(l.out, attended, out, rows);
    if (const int failed = add_up()) return failed;
    call.norm(l.second, kept ? normed : x, again, rows, hidden, out, sum);
    if (!has_mlp) return 0;
    call.multiply(l.up, again, both, rows);
    const Rows r = {both, gated, rows, 1, wide, l.up.outputs, 0, call.TYPE, call.num_threads};
    fminfer_gate(&r, gates ? both + wide : nullptr, l.activation);
    call.multiply(l.down, gated, out, rows);
    if (const int failed = add_up()) return failed;
    for_parts(call.num_threads, (num + LANES - 1) / LANES, 1024, [&](int64_t first, int64_t last) {
        for (int64_t i = first * LANES; i < last * LANES; i += LANES) {
            const int n = num - i < LANES ? int(num - i) : LANES;
            store_some(out + i, load_some(sum + i, n) + load_some(out + i, n), n);
        }
    });
    return 0;
}

}  // namespace

extern "C" {

// The numbers that `space` must have for each token.
int64_t fminfer_layer_space(const Layer* l) {
    const int64_t before = 2 * l->qkv.outputs;
    const int64_t behind = l->qkv.inputs + l->up.outputs + l->down.inputs;
    return l->qkv.inputs + l->out.inputs + (before > behind ? before : behind);
}

// 1: there was no memory. Others: as fminfer_sum.
int fminfer_layer(const Layer* layer, const Arguments* given, const float* cos, const float* sin,
                  int64_t turned, const int64_t* kept, int64_t num_kept, const void* x, void* out,
                  void* for_mlp, void* space, Sums* sums, Spent* spent) {
    const auto run_as = [&](auto* to) {
        typedef std::remove_pointer_t<decltype(to)> T;
        return run(layer, given, cos, sin, turned, kept, num_kept, static_cast<const T*>(x), to,
                   static_cast<T*>(for_mlp), static_cast<T*>(space), sums, spent);
    };
    int failed = 0;
    const int lacks = lacks_memory([&] {
        failed = given->type == 0 ? run_as(static_cast<float*>(out))
                                  : run_as(static_cast<uint16_t*>(out));
    });
    return lacks ? lacks : failed;
}

}  // extern "C"

// What the library's functions are called with. All numbers of a call are its caller's to check.
#pragma once

#include <cstdint>

extern "C" {

// Must agree with library_calls.py's Arguments.
struct Arguments {
    const void* query;  // element (head, token, i) at head * query_head + token * query_token + i
    void* out;          // (tokens, heads, head_dim)
    void* keys;         // (pool, kv_heads, block_size, head_dim), of `kv_type`
    void* values;
    const void* new_keys;    // of `type`, rounded as they are kept: element (head, token, i) at
    const void* new_values;  // head * new_…_head + token * new_…_token + i
    const int64_t* slots;    // (num_tokens,): block * block_size + place, of each token's key
    const int64_t* rows;     // (num_rows, ROW): first token, tokens, position, start in `tables`,
                             // the first key of no run
    const int32_t* tables;   // block tables
    const int64_t* runs;     // (num_runs, RUN): first in `members`, their number, keys
                             // [first, last), runs before them; ascending in the last
    const int64_t* members;  // rows of each run, one run after another; of one token each
    const float* slopes;     // (heads,) of ALiBi, or null
    const float* sinks;      // (heads,): scores of a key more, which has no value; or null
    const float* relative;   // (heads, 2 * reach + 1): biases by query position - key position,
                             // from -reach to reach; what is farther has that of the end. Or null
    int64_t num_rows, num_runs, num_tokens, query_head, query_token;
    int64_t new_key_head, new_key_token, new_value_head, new_value_token;
    int64_t heads, kv_heads, head_dim, block_size;
    int64_t window;  // keys that a query sees, itself included; 0: all
    int64_t ahead;   // keys behind its own that it sees, at most, of its row's
    int64_t reach;
    int64_t type;    // of query, out and new keys and values: 0 float32, 1 bfloat16
    int64_t kv_type;  // of the cache: these, or 2 float16
    int64_t num_threads;
    float scaling, softcap;  // softcap 0: none
};

// Must agree with library_calls.py's RowSizes.
struct Rows {
    const void* x;
    void* out;  // (outer, inner, width), in one piece
    int64_t outer, inner, width, outer_step, inner_step;
    int64_t type;  // 0 float32, 1 bfloat16; of x, of out, and of weights and `up`
    int64_t num_threads;
};

// A packed weight, or some outputs of one. Must agree with library_calls.py's PackedCall.
struct Packed {
    const void* weight;
    int64_t outputs;
    int64_t type;     // 0 float32, 1 bfloat16, or a Kind of forms.h
    int64_t block;    // inputs of a block, of a Kind
    int64_t is_lent;  // floats as they are stored, (outputs, inputs): each panel is packed in use
};

// Must agree with library_calls.py's ProductCall.
struct Product {
    const void* x;        // (rows, inputs)
    const Packed* parts;  // of the weight, one below the other
    const float* bias;    // one for each output, and a panel more; null: none
    void* out;            // (rows, outputs)
    int64_t num_parts, rows, inputs, outputs;
    // 0 float32, 1 bfloat16; x of bfloat16 has no weights of float32, and out is float32 or as x.
    int64_t x_type, out_type;
    int64_t num_threads;
};

// Must agree with library_calls.py's ExpertCall.
struct Mixture {
    const void* x;          // (tokens, hidden)
    Packed up, down;        // of all experts, as fminfer_pack_experts packs them
    const int64_t* chosen;  // (tokens, top_k): the experts of each token
    const float* shares;    // (tokens, top_k): what their results are multiplied by
    void* out;              // (tokens, hidden), of x's type
    float* space;           // (tokens * top_k, hidden + size)
    const float* up_bias;   // (experts, outputs of `up`), gates first; null: none
    const float* down_bias;  // (experts, hidden), or null
    int64_t tokens, top_k, num_experts, hidden, size;  // size: the inputs of `down`
    int64_t is_gated, activation;                      // of activations.h
    int64_t x_type;  // as a Product's
    int64_t num_threads;
    float limit;  // gates are at most that; what they are multiplied by is from -limit to it, and
                  // 1 is added. 0: neither
};

// Nonzero: there was no memory.
int fminfer_attention(const Arguments* arguments);
int fminfer_multiply(const Product* a);

void fminfer_rms_norm(const Rows* r, const void* weight, float eps, float offset,
                      const void* other, void* sum);
void fminfer_layer_norm(const Rows* r, const void* weight, const void* bias, float eps,
                        const void* other, void* sum);
void fminfer_rotate(const Rows* r, const float* cos, const float* sin, int64_t turned);
void fminfer_gate(const Rows* r, const void* up, int64_t kind);

}  // extern "C"

// Attention of packed rows over the paged KV cache, on the CPU; fminfer/compute/kernels/kernel_build.py builds it.
//
// The step's new keys and values are put into their blocks first. Then each row's queries attend to
// the row's keys up to their own position. Work is cut into items: one row, one KV head, and up to
// 32 of its queries (tokens times the heads that share the KV head). An item goes over the row's
// blocks once and keeps the largest score and the sum of exponentials of each query as it goes
// (Milakov and Gimelshein 2018, the "online softmax"; Dao et al. 2022). Items of one KV head follow
// one another, so that what rows share is read from the cache nearby. Items of few queries have
// several KV heads, whose keys in a block lie one behind the other: they are read in that order.
//
// Rows of one token that begin with the same blocks, a run, attend to those together (Juravsky et al.
// 2024, "Hydragen"): an item is then up to 32 queries of several rows. It ends where a step of the
// softmax does and leaves each row's sums, with which runs inside it and the row's own item go on.
//
// So a query's numbers are added up in one order, whatever stands beside it: scores in a few
// parts, weights and weighted values key by key from the first that is seen, in pieces that begin at
// fixed places. Tiles have an order of their own, in which few queries are not computed.
//
// Bodies: in float32 for all types (attention_floats.h), and in pairs and tiles of bfloat16 on
// processors that have them (attention_pairs.h). Scores, exponentials and sums are in float32.
// What lies behind a row's end may be nan and never reaches a sum. Neither do values that a query
// must not see, of later tokens or from before its window: their weight is 0, but 0 times nan is nan.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "attention_floats.h"
#include "attention_pairs.h"
#include "pool.h"

namespace {

// Queries of a head that are multiplied one after another, and the same in pairs of bfloat16.
constexpr int MOST_ALONE = 3, MOST_IN_PAIRS = 8;

// Calls use(a number of the type) for the type of the cache.
template <typename Use>
inline void with_type(int64_t type, Use use) {
    if (type == 0) return use(float{});
    if (type == 1) return use(uint16_t{});
    use(Float16{});
}

#ifdef HAS_PAIRS
// Each of the item's queries by itself: it reads no value that it does not see.
void attend_singly(const Arguments& a, const Item& item, Space& space) {
    for (int64_t h = 0; h < item.heads; h++) {
        Item single = head_of(item, h);
        for (int64_t q = item.first; q < item.last; q++) {
            single.first = q;
            single.last = q + 1;
            attend_few_in_pairs(a, single, space);
        }
    }
}
#endif

// Few queries of each of the item's heads.
void attend_few(const Arguments& a, const Item& item, Space& space) {
#ifdef HAS_PAIRS
    if (fits_halves(a))
        return hides_odd_value(a, item) ? attend_singly(a, item, space)
                                        : attend_few_in_pairs(a, item, space);
#endif
    with_type(a.kv_type, [&](auto kind) {
        for (int64_t h = 0; h < item.heads; h++)
            for (int64_t q = item.first; q < item.last; q++)
                attend_alone<decltype(kind)>(a, head_of(item, h), q, space);
    });
}

#ifdef HAS_PAIRS
// Up to N * LANES queries.
template <int N>
void attend_in_halves(const Arguments& a, const Item& item, Space& space) {
#ifdef HAS_TILES
    if (may_use_tiles()) return attend_in_tiles<Tiles, N>(a, item, space);
#endif
    attend_in_tiles<Vectors, N>(a, item, space);
}
#endif

// Up to MOST_QUERIES queries.
void attend_together(const Arguments& a, const Item& item, Space& space) {
    const int64_t num = item.last - item.first;
#ifdef HAS_PAIRS
    if (fits_halves(a))
        return hides_odd_value(a, item) ? attend_singly(a, item, space)
               : num <= LANES           ? attend_in_halves<1>(a, item, space)
                                        : attend_in_halves<2>(a, item, space);
#endif
    with_type(a.kv_type, [&](auto kind) {
        typedef decltype(kind) T;
        constexpr int most = MOST_QUERIES / WIDTH;
        num <= WIDTH           ? attend_by_lanes<1, T>(a, item, space)
        : num <= most / 2 * WIDTH ? attend_by_lanes<most / 2, T>(a, item, space)
                               : attend_by_lanes<most, T>(a, item, space);
    });
}

// Whether an item's queries are multiplied one after another, each alone.
inline bool is_small(const Arguments& a, const Item& item) {
    bool is_in_pairs = false;
#ifdef HAS_PAIRS
    is_in_pairs = fits_halves(a);
#endif
#ifdef HAS_TILES
    is_in_pairs = is_in_pairs && !may_use_tiles();
#endif
    return item.last - item.first <= (is_in_pairs ? MOST_IN_PAIRS : MOST_ALONE);
}

void attend(const Arguments& a, const Item& item, Space& space) {
    if (is_small(a, item)) return attend_few(a, item, space);
    attend_together(a, item, space);
}

// Put one token's new keys or values into its block.
template <typename From, typename To>
void keep_token(const Arguments& a, To* cache, const From* from, int64_t head_step,
                int64_t token_step, int64_t token) {
    const int64_t block = a.slots[token] / a.block_size, place = a.slots[token] % a.block_size;
    for (int64_t head = 0; head < a.kv_heads; head++)
        convert(from + head * head_step + token * token_step, a.head_dim,
                cache + ((block * a.kv_heads + head) * a.block_size + place) * a.head_dim);
}

void keep_token(const Arguments& a, int64_t token) {
    with_type(a.type, [&](auto given) {
        with_type(a.kv_type, [&](auto kept) {
            typedef decltype(given) From;
            typedef decltype(kept) To;
            keep_token(a, static_cast<To*>(a.keys), static_cast<const From*>(a.new_keys),
                       a.new_key_head, a.new_key_token, token);
            keep_token(a, static_cast<To*>(a.values), static_cast<const From*>(a.new_values),
                       a.new_value_head, a.new_value_token, token);
        });
    });
}

// Throws std::bad_alloc if there is none for the threads' working space.
void attend_all(const Arguments& a) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t num_runs = a.window > 0 ? 0 : a.num_runs;  // a window hides what is shared
    enum { LARGE, SMALL, KINDS };
    std::vector<Item> items;  // of runs, large and small ones, each for all heads
    std::vector<int64_t> levels;  // ends of the runs that may go at once
    const auto cut = [&](Item item, int64_t num_queries, int kind) {
        for (item.first = 0; item.first < num_queries; item.first = item.last) {
            const int64_t left = num_queries - item.first;
            item.last = item.first + (left < MOST_QUERIES ? left : MOST_QUERIES);
            if (kind == KINDS || is_small(a, item) == (kind == SMALL)) items.push_back(item);
        }
    };
    for (const int64_t* run = a.runs; run != a.runs + RUN * num_runs; run += RUN) {
        if (run != a.runs && run[4] > run[4 - RUN]) levels.push_back(items.size());
        const int64_t* members = a.members + run[0];
        cut({a.rows + ROW * members[0], 0, 0, 0, run[2], run[3], members}, run[1] * group, KINDS);
    }
    levels.push_back(items.size());
    int64_t ends[KINDS];
    for (int kind = LARGE; kind < KINDS; kind++) {
        for (const int64_t* row = a.rows; row != a.rows + ROW * a.num_rows; row += ROW)
            cut({row, 0, 0, 0, num_runs ? row[4] : 0, INT64_MAX, nullptr}, row[1] * group, kind);
        ends[kind] = items.size();
    }
    const size_t of_runs = sizeof(float) * a.num_rows * a.heads * state_size(a);
    const std::unique_ptr<float, decltype(&std::free)> states(
        static_cast<float*>(num_runs ? std::aligned_alloc(64, of_runs) : nullptr), std::free);
    if (num_runs && !states) throw std::bad_alloc();
    const int64_t num_large = ends[LARGE] - levels.back();
    const int64_t num_small = ends[SMALL] - ends[LARGE];
    // Small items are of as many heads as there is room for and leave each thread something to do.
    int64_t most = 1;
    for (int64_t i = ends[LARGE]; i < ends[SMALL]; i++)
        most = items[i].last - items[i].first > most ? items[i].last - items[i].first : most;
    int64_t parts = (a.kv_heads + MOST_QUERIES / most - 1) / (MOST_QUERIES / most);
    while (parts < a.kv_heads && num_small * parts < 4 * a.num_threads) parts++;
    std::vector<std::unique_ptr<Space>> spaces(a.num_threads);
    const auto attend_heads = [&](Item item, int64_t first, int64_t last, int thread) {
        if (!spaces[thread]) spaces[thread].reset(new Space(a, states.get()));
        item.kv_head = first;
        item.heads = last - first;
        attend(a, item, *spaces[thread]);
    };
    // Item after item of one head: they may share keys.
    const auto attend_by_head = [&](int64_t first, int64_t num, int64_t i, int thread) {
        attend_heads(items[first + i % num], i / num, i / num + 1, thread);
    };
    for_parts(a.num_threads, a.num_tokens, 8, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) keep_token(a, token);
    });
    int64_t first = 0;
    for (const int64_t end : levels) {
        const int64_t num = end - first;
        for_pieces(a.num_threads, num * a.kv_heads,
                   [&](int64_t i, int thread) { attend_by_head(first, num, i, thread); });
        first = end;
    }
    const int64_t of_large = num_large * a.kv_heads;
    for_pieces(a.num_threads, of_large + num_small * parts, [&](int64_t i, int thread) {
        if (i < of_large) return attend_by_head(first, num_large, i, thread);
        const int64_t part = (i - of_large) % parts;
        attend_heads(items[ends[LARGE] + (i - of_large) / parts], a.kv_heads * part / parts,
                     a.kv_heads * (part + 1) / parts, thread);
    });
}

}  // namespace

extern "C" int fminfer_attention(const Arguments* arguments) {
    return lacks_memory([&] { attend_all(*arguments); });
}

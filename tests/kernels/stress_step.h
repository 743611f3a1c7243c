// A step of random rows over a paged cache: prompt chunks and single tokens, some of which begin
// with the same blocks. In the cache all is nan but what a query may see.
#pragma once

#include <algorithm>
#include <numeric>

#include "stress.h"

namespace stress {

class Step {
   public:
    // head_dim is a multiple of `unit`.
    Step(Random& random, int64_t type, int64_t kv_type, int64_t unit)
        : keys(0, kv_type), values(0, kv_type) {
        const bool fits_pairs = random.is_so();
        arguments.type = type;
        arguments.kv_type = kv_type;
        arguments.kv_heads = random.from(1, 3);
        arguments.heads = arguments.kv_heads * random.from(1, 5);
        arguments.head_dim = fits_pairs ? 32 * random.from(1, 5)
                                        : unit * random.from(1, 70 / unit);
        arguments.block_size = fits_pairs ? 32 * random.from(1, 2) : random.from(1, 20);
        arguments.window = random.is_so() ? random.from(1, 40) : 0;
        arguments.softcap = random.from(0, 2) == 0 ? 2.0f : 0;
        arguments.scaling = 1 / std::sqrt(float(arguments.head_dim));
        make_rows(random);
        fill_cache(random);
        if (random.is_so())
            for (int64_t h = 0; h < arguments.heads; h++) slopes.push_back(random.from(0, 8) / 16.0f);
        if (random.is_so())
            for (int64_t h = 0; h < arguments.heads; h++) sinks.push_back(random.from(-40, 40) / 16.0f);
        point();
    }
    Step(const Step&) = delete;

    int64_t table_of(int64_t row) const { return rows[5 * row + 3]; }
    int64_t num_rows() const { return int64_t(rows.size()) / 5; }

    // Where in the cache a row's key or value stands.
    int64_t place(int64_t row, int64_t position, int64_t kv_head) const {
        const Arguments& a = arguments;
        const int64_t block = tables[table_of(row) + position / a.block_size];
        return ((block * a.kv_heads + kv_head) * a.block_size + position % a.block_size) *
               a.head_dim;
    }

    // The first key that a query at some position sees.
    int64_t first_key(int64_t position) const {
        return arguments.window > 0 ? std::max<int64_t>(0, position - arguments.window + 1) : 0;
    }

    Arguments arguments = {};
    std::vector<int64_t> rows;
    std::vector<int64_t> wanted;  // tokens that attend: a row may leave out its first ones
    Numbers keys, values;
    std::vector<float> slopes, sinks;

   private:
    void make_rows(Random& random) {
        const int64_t size = arguments.block_size, num = random.from(1, 12);
        const int64_t shared = random.is_so() ? random.from(1, 2) : 0;  // blocks
        num_blocks = shared + 1;
        std::vector<int64_t> of_run, of_longer_run;
        for (int64_t r = 0; r < num; r++) {
            const int64_t tokens = random.from(0, 2) == 0 ? random.from(2, 50) : 1;
            const bool is_member = shared > 0 && tokens == 1, is_longer = is_member && r % 2 == 0;
            const int64_t common = shared + is_longer;
            const int64_t position = common * size + random.from(0, 2 * size);
            const int64_t skipped = random.from(0, 3) == 0 ? random.from(0, tokens - 1) : 0;
            rows.insert(rows.end(), {num_tokens + skipped, tokens - skipped, position + skipped,
                                     int64_t(tables.size()),
                                     is_member ? common * size : 0});
            if (is_member) of_run.push_back(r);
            if (is_longer) of_longer_run.push_back(r);
            for (int64_t b = 0; b <= (position + tokens - 1) / size; b++)
                tables.push_back(int32_t(b < common ? b : num_blocks++));
            for (int64_t t = 0; t < tokens; t++) {
                const int64_t block = tables[table_of(r) + (position + t) / size];
                slots.push_back(block * size + (position + t) % size);
                if (t >= skipped) wanted.push_back(num_tokens + t);
            }
            num_tokens += tokens;
        }
        add_run(of_run, 0, shared * size, 0);
        add_run(of_longer_run, shared * size, (shared + 1) * size, 1);
        shuffle_blocks(random);
    }

    void add_run(const std::vector<int64_t>& of_run, int64_t first, int64_t last,
                 int64_t before) {
        if (of_run.empty()) return;
        const int64_t num = int64_t(of_run.size());
        runs.insert(runs.end(), {int64_t(members.size()), num, first, last, before});
        members.insert(members.end(), of_run.begin(), of_run.end());
    }

    void shuffle_blocks(Random& random) {
        std::vector<int64_t> order(num_blocks);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        for (int32_t& block : tables) block = int32_t(order[block]);
        const int64_t size = arguments.block_size;
        for (int64_t& slot : slots) slot = order[slot / size] * size + slot % size;
    }

    // What no query sees is nan in one of the heads.
    void fill_cache(Random& random) {
        const Arguments& a = arguments;
        const int64_t count = num_blocks * a.kv_heads * a.block_size * a.head_dim;
        keys = values = Numbers(count, a.kv_type);
        for (int64_t r = 0; r < num_rows(); r++) {
            const int64_t position = rows[5 * r + 2], odd_head = random.from(0, a.kv_heads - 1);
            for (int64_t p = 0; p < position; p++)
                for (int64_t h = 0; h < a.kv_heads; h++) {
                    if (p < first_key(position) && h == odd_head) continue;
                    for (int64_t i = place(r, p, h), end = i + a.head_dim; i < end; i++) {
                        keys.put(i, random.number());
                        values.put(i, random.number());
                    }
                }
        }
    }

    void point() {
        Arguments& a = arguments;
        a.keys = keys.data();
        a.values = values.data();
        a.slots = slots.data();
        a.rows = rows.data();
        a.tables = tables.data();
        a.runs = runs.data();
        a.members = members.data();
        a.slopes = slopes.empty() ? nullptr : slopes.data();
        a.sinks = sinks.empty() ? nullptr : sinks.data();
        a.num_rows = num_rows();
        a.num_runs = int64_t(runs.size()) / 5;
        a.num_tokens = num_tokens;
    }

    int64_t num_tokens = 0, num_blocks = 0;
    std::vector<int64_t> slots, runs, members;
    std::vector<int32_t> tables;
};

}  // namespace stress

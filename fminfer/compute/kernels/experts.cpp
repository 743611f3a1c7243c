// A mixture of experts: the MLPs of all chosen experts, then the sum of each token's, in one call.
//
// The rows of an expert lie side by side, copied once. A piece of work is some of them times some
// panels (panels.h) of their expert. Gates lie beside what they are multiplied by, panel by panel, so
// a piece has both and writes only what `down` reads. Results stay float32 until a token's are added
// up, in the order in which it chose its experts: neither other tokens nor threads change them.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "blocks.h"
#include "wide.h"

namespace {

constexpr int64_t COPIED = 1 << 13;  // numbers that one thread copies sooner than two

// Groups of panels, [first, last), of an expert times `num` rows from `row` on. A group is a gate's
// panel and its partner's, or one panel.
struct Part {
    int64_t expert, row, num, first, last;
};

// Where the rows of each expert lie.
struct Places {
    std::vector<int64_t> starts;  // (num_experts + 1,): an expert's first row
    std::vector<int64_t> of;      // (tokens * top_k,): the row of each token's choice
};

Places place_rows(const Mixture& a) {
    Places places = {std::vector<int64_t>(a.num_experts + 1), {}};
    const int64_t num = a.tokens * a.top_k;
    for (int64_t i = 0; i < num; i++) places.starts[a.chosen[i] + 1]++;
    for (int64_t e = 0; e < a.num_experts; e++) places.starts[e + 1] += places.starts[e];
    std::vector<int64_t> next = places.starts;
    places.of.resize(num);
    for (int64_t i = 0; i < num; i++) places.of[i] = next[a.chosen[i]]++;
    return places;
}

inline int64_t blocks_of(int64_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

// Divides experts of `groups` each into parts, as `multiply` of products.cpp divides one weight.
std::vector<Part> divide(const Places& places, int64_t groups, int64_t group_units,
                         int64_t num_threads) {
    const int64_t experts = places.starts.size() - 1;
    const auto rows_of = [&](int64_t e) { return places.starts[e + 1] - places.starts[e]; };
    int64_t all = 0;
    for (int64_t e = 0; e < experts; e++) all += blocks_of(rows_of(e)) * groups;
    const int64_t fair = std::max<int64_t>(1, all / (4 * num_threads));
    const int64_t least = std::max<int64_t>(1, TASK_UNITS / group_units);
    const int64_t at_once = std::min<int64_t>({fair, least, groups});
    const int64_t num = (groups + at_once - 1) / at_once;
    std::vector<Part> parts;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t blocks = blocks_of(rows_of(e));
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = rows_of(e) * b / blocks, end = rows_of(e) * (b + 1) / blocks;
            for (int64_t p = 0; p < num; p++)
                parts.push_back({e, places.starts[e] + row, end - row, groups * p / num,
                                 groups * (p + 1) / num});
        }
    }
    return parts;
}

// Returns rows x from `row` on times `panels` that lie side by side: (panels, num, PANEL), good
// until the thread's next call.
template <typename Way>
const float* sum_panels(const Way& way, const typename Way::Number* x, int64_t row, int64_t num,
                        int64_t inputs, const uint32_t* weight, int64_t panels,
                        const uint32_t* behind) {
    const int64_t size = way.panel_units(inputs);
    space.sums.resize(panels * num * PANEL);
    for (int64_t p = 0; p < panels; p++, weight += size)
        multiply_any<true>(way, x, row, num, inputs, weight, p + 1 < panels ? weight + size : behind,
                           space.sums.data() + p * num * PANEL, [](int64_t, float*) {});
    return space.sums.data();
}

// Multiplies rows x by all experts' weights, in groups of `width` panels with `outputs` in each of
// the `width` parts. Calls use(expert, row, output, sums, step): a panel's sums of a row, which begin
// with `output`, and `step` numbers behind them those of the group's next panel.
template <typename Way, typename Use>
void multiply_experts(const Mixture& a, const Places& places, const Way& way, const Packed& weight,
                      int64_t width, const typename Way::Number* x, int64_t inputs,
                      const void* behind, const Use& use) {
    const int64_t groups = (weight.outputs + PANEL - 1) / PANEL;
    const int64_t units = width * way.panel_units(inputs);
    const std::vector<Part> parts = divide(places, groups, units, a.num_threads);
    const auto start_of = [&](const Part& p) {
        return static_cast<const uint32_t*>(weight.weight) + (p.expert * groups + p.first) * units;
    };
    for_pieces(a.num_threads, parts.size(), [&](int64_t i, int) {
        const Part& p = parts[i];
        const int64_t later = i + a.num_threads;
        const uint32_t* next = later < int64_t(parts.size()) ? start_of(parts[later])
                                                             : static_cast<const uint32_t*>(behind);
        const float* sums = sum_panels(way, x, p.row, p.num, inputs, start_of(p),
                                       (p.last - p.first) * width, next);
        for (int64_t g = p.first; g < p.last; g++, sums += width * p.num * PANEL)
            for (int64_t r = 0; r < p.num; r++)
                use(p.expert, p.row + r, g * PANEL, sums + r * PANEL, p.num * PANEL);
    });
}

// Calls use(place, count) for the numbers of a panel that begins at `first` of `all`.
template <typename Use>
inline void for_lanes(int64_t first, int64_t all, const Use& use) {
    for (int64_t n = 0; n < PANEL && first + n < all; n += LANES)
        use(n, int(std::min<int64_t>(LANES, all - first - n)));
}

// `count` sums, plus their biases, which are `at` numbers behind where all begin.
inline Vec add_bias(const float* sums, const float* bias, int64_t at, int count) {
    const Vec sum = load(sums);
    return bias == nullptr ? sum : sum + load_some(bias + at, count);
}

// T: of x and out; Arithmetic's numbers are what is multiplied.
template <typename Arithmetic, typename T>
void mix(const Mixture& a) {
    typedef typename Arithmetic::Number Number;
    static thread_local std::vector<float> added;
    const Places places = place_rows(a);
    const T* const x = static_cast<const T*>(a.x);
    const int64_t num = a.tokens * a.top_k;
    float* const outs = a.space;                              // (num, hidden)
    Number* const rows = reinterpret_cast<Number*>(a.space);  // (num, hidden), until outs are
    Number* const inner = reinterpret_cast<Number*>(a.space + num * a.hidden);  // (num, size)
    for_parts(a.num_threads, num, COPIED / a.hidden + 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++)
            convert(x + i / a.top_k * a.hidden, a.hidden, rows + places.of[i] * a.hidden);
    });
    const int64_t width = a.is_gated ? 2 : 1;
    const auto bend_row = [&](int64_t expert, int64_t row, int64_t first, const float* sums,
                              int64_t step) {
        for_lanes(first, a.size, [&](int64_t n, int count) {
            const int64_t at = expert * width * a.size + first + n;
            Vec value = add_bias(sums + n, a.up_bias, at, count);
            if (a.limit > 0) value = value > a.limit ? all(a.limit) : value;
            value = bend(value, a.activation);
            if (a.is_gated) {
                Vec other = add_bias(sums + step + n, a.up_bias, at + a.size, count);
                if (a.limit > 0) {
                    other = other > a.limit ? all(a.limit) : other;
                    other = (other < -a.limit ? all(-a.limit) : other) + 1.0f;
                }
                value *= other;
            }
            store_some(inner + row * a.size + first + n, value, count);
        });
    };
    with_way<Arithmetic>(a.up, rows, num, a.hidden, a.num_threads, added, [&](const auto& way) {
        multiply_experts(a, places, way, a.up, width, rows, a.hidden, a.down.weight, bend_row);
    });
    const auto keep_row = [&](int64_t expert, int64_t row, int64_t first, const float* sums,
                              int64_t) {
        for_lanes(first, a.hidden, [&](int64_t n, int count) {
            const Vec value = add_bias(sums + n, a.down_bias, expert * a.hidden + first + n, count);
            store_some(outs + row * a.hidden + first + n, value, count);
        });
    };
    with_way<Arithmetic>(a.down, inner, num, a.size, a.num_threads, added, [&](const auto& way) {
        multiply_experts(a, places, way, a.down, 1, inner, a.size, a.up.weight, keep_row);
    });
    T* const out = static_cast<T*>(a.out);
    const int64_t least = COPIED / (a.hidden * a.top_k) + 1;
    for_parts(a.num_threads, a.tokens, least, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++)
            for (int64_t i = 0; i < a.hidden; i += LANES) {
                const int count = int(std::min<int64_t>(LANES, a.hidden - i));
                Vec sum = {};
                for (int64_t k = t * a.top_k; k < (t + 1) * a.top_k; k++)
                    sum += a.shares[k] * load_some(outs + places.of[k] * a.hidden + i, count);
                store_some(out + t * a.hidden + i, sum, count);
            }
    });
}

void mix_all(const Mixture& a) {
    if (a.x_type == 0) return mix<Floats, float>(a);
#ifdef HAS_PAIRS
    mix<Pairs, uint16_t>(a);
#else
    mix<Floats, uint16_t>(a);
#endif
}

}  // namespace

extern "C" {

// weight: (experts, parts * outputs, units of 32 bits); packed: panel p of each part of an expert
// side by side, then panel p + 1, each part rounded up to whole panels, 0 behind it.
void fminfer_pack_experts(const uint32_t* weight, int64_t experts, int64_t parts, int64_t outputs,
                          int64_t units, uint32_t* packed, int64_t num_threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    for_pieces(num_threads, experts * panels * parts, [&](int64_t i, int) {
        const int64_t first = i / parts % panels * PANEL;
        const int64_t start = (i / parts / panels * parts + i % parts) * outputs + first;
        pack_panel(weight + start * units, outputs - first, units, packed + i * PANEL * units);
    });
}

// out = of each token's chosen experts down(act(up(x))) or down(act(gate(x)) * up(x)), times their
// shares, added up. Nonzero: there was no memory.
int fminfer_mix(const Mixture* a) {
    return lacks_memory([&] { mix_all(*a); });
}

}  // extern "C"

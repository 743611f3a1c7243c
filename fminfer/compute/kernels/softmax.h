// The softmax over keys that come in pieces, as they are read: of many queries, one a lane, or of one,
// with keys in the lanes. Both round alike, at each step, and add up WIDTH weights at a time alike.
#pragma once

#include "attention_work.h"

namespace {

inline Wide lowest() { return Wide{} + LOWEST; }

inline Wide tanh_of(Wide x) {
    const Wide sign = x < Wide{} ? Wide{} - 1.0f : Wide{} + 1.0f;
    const Wide e = exp_of(-2.0f * x * sign);
    return sign * (1.0f - e) / (1.0f + e);
}

inline IWide lanes() {
    IWide lanes;
    for (int lane = 0; lane < WIDTH; lane++) lanes[lane] = lane;
    return lanes;
}

// Whether scores are more than products to be scaled. What is not bent is scaled as it becomes a weight.
inline bool is_bent(const Arguments& a) {
    return a.slopes || a.relative || a.softcap > 0 || !(a.scaling > 0);
}
inline float scaling_left(const Arguments& a) { return is_bent(a) ? 1.0f : a.scaling; }

// All that can happen to scores before their exponentials, but for masks.
inline Wide bend(const Arguments& a, Wide score, Wide slope, IWide distance) {
    score *= a.scaling;
    keep_in_register(score);  // else a compiler may choose what it fuses with
    if (a.softcap > 0) score = a.softcap * tanh_of(score / a.softcap);
    if (a.slopes) score -= slope * __builtin_convertvector(distance, Wide);
    return score;
}

inline Wide hide(const Arguments& a, Wide score, IWide distance) {
    score = distance < -int32_t(a.ahead) ? lowest() : score;
    if (a.window > 0) score = distance >= int32_t(a.window) ? lowest() : score;
    return score;
}

// Of up to V * WIDTH queries, one a lane.
template <int V>
struct Softmax {
    Wide largest[V], total[V], slope[V];
    IWide position[V];
    int64_t earliest, latest;  // of the positions
    const float* table[V * WIDTH];  // of biases
    bool in_order;  // the lanes are consecutive tokens

    Softmax(const Arguments& a, const Item& item) {
        const int64_t group = a.heads / a.kv_heads, last = item.last - 1;
        earliest = latest = position_of(a, item, item.first / group);
        in_order = group == 1 && !item.members;
        for (int lane = 0; lane < V * WIDTH; lane++) {
            const int64_t q = item.first + lane < last ? item.first + lane : last;
            const int64_t here = position_of(a, item, q / group);
            earliest = here < earliest ? here : earliest;
            latest = here > latest ? here : latest;
            position[lane / WIDTH][lane % WIDTH] = int32_t(here);
            slope[lane / WIDTH][lane % WIDTH] =
                a.slopes ? a.slopes[item.kv_head * group + q % group] : 0;
            table[lane] = table_of(a, item.kv_head * group + q % group);
        }
        for (int v = 0; v < V; v++) {
            largest[v] = lowest();
            total[v] = Wide{};
        }
    }

    Marks marks_of(int lane) const {
        return {largest[lane / WIDTH][lane % WIDTH], total[lane / WIDTH][lane % WIDTH]};
    }
    void set_marks(int lane, Marks marks) {
        largest[lane / WIDTH][lane % WIDTH] = marks.largest;
        total[lane / WIDTH][lane % WIDTH] = marks.total;
    }

    // Of keys at `start` and after: whether a query does not see all of them.
    bool hides(const Arguments& a, int64_t start, int count) const {
        return start + count - 1 > earliest + a.ahead || (a.window > 0 && latest - start >= a.window);
    }

    // Of `count` keys at `start` and after: the first one that a query sees, and the end of them.
    int first_seen(const Arguments& a, int lane, int64_t start, int count) const {
        const int64_t place = position[lane / WIDTH][lane % WIDTH] - a.window + 1 - start;
        return a.window <= 0 || place <= 0 ? 0 : place < count ? int(place) : count;
    }
    int end_seen(const Arguments& a, int lane, int64_t start, int count) const {
        const int64_t place = position[lane / WIDTH][lane % WIDTH] + a.ahead + 1 - start;
        return place >= count ? count : place > 0 ? int(place) : 0;
    }

    // Bends the scores, (count, V * WIDTH), of keys at `start` and after if need be, and brings
    // what was summed before, (num, width), to the measure of their largest. Hidden ones are LOWEST.
    void measure(const Arguments& a, float* scores, int64_t start, int count, float* sums, int num,
                 int width) {
        const bool is_masked = hides(a, start, count);
        const float scaling = scaling_left(a);
        for (int v = 0; v < V; v++, scores += WIDTH) {
            if (is_masked || is_bent(a)) bend_all(a, scores, start, count, v, is_masked);
            Wide most = lowest();
            for (int j = 0; j < count; j++) {
                const Wide score = wide_at(scores + j * V * WIDTH);
                most = score > most ? score : most;
            }
            most = most * scaling > largest[v] ? most * scaling : largest[v];
            const Wide factor = exp_of(largest[v] - most);
            float factors[WIDTH];
            put_wide(factors, factor);
            for (int lane = 0; lane < WIDTH && v * WIDTH + lane < num; lane++)
                if (factors[lane] != 1.0f) {
                    float* row = sums + (v * WIDTH + lane) * width;
                    for (int d = 0; d < width; d += WIDTH)
                        put_wide(row + d, wide_at(row + d) * factors[lane]);
                }
            largest[v] = most;
            total[v] *= factor;
            keep_in_register(total[v]);
        }
    }

    // Turns the scores into weights, and all else as `measure` does.
    void weigh(const Arguments& a, float* scores, int64_t start, int count, float* sums, int num,
               int width) {
        measure(a, scores, start, count, sums, num, width);
        const bool is_masked = hides(a, start, count);
        const float scaling = scaling_left(a);
        for (int v = 0; v < V; v++, scores += WIDTH) {
            const auto weigh_at = [&](float* place) {
                const Wide score = wide_at(place);
                Wide weight = exp_of(score * scaling - largest[v]);
                if (is_masked) weight = score == lowest() ? Wide{} : weight;
                put_wide(place, weight);
                return weight;
            };
            for (int first = 0; first < count; first += WIDTH)
                total[v] += tree_of([&](int j) {
                    const bool is_there = first + j < count;
                    return is_there ? weigh_at(scores + (first + j) * V * WIDTH) : Wide{};
                });
        }
    }

    Wide biases(const Arguments& a, int v, IWide distance) const {
        const float* const* tables = table + v * WIDTH;
        const bool is_near = distance[0] >= -a.reach && distance[0] + WIDTH - 1 <= a.reach;
        if (in_order && is_near) return wide_at(tables[0] + a.reach + distance[0]);
        Wide found;
        for (int lane = 0; lane < WIDTH; lane++)
            found[lane] = bias_at(a, tables[lane], distance[lane]);
        return found;
    }

    void bend_all(const Arguments& a, float* scores, int64_t start, int count, int v,
                  bool is_masked) {
        for (int j = 0; j < count; j++) {
            float* place = scores + j * V * WIDTH;
            const IWide distance = position[v] - int32_t(start + j);
            Wide score = wide_at(place);
            if (is_bent(a)) score = bend(a, score, slope[v], distance);
            if (a.relative) score += biases(a, v, distance);
            put_wide(place, is_masked ? hide(a, score, distance) : score);
        }
    }
};

// Of one query, with keys in its lanes.
struct SoftmaxAlone {
    Marks marks;
    float slope;
    const float* table;  // of biases
    int64_t position;

    SoftmaxAlone() = default;
    SoftmaxAlone(const Arguments& a, const Item& item, int64_t q) {
        const int64_t group = a.heads / a.kv_heads;
        position = position_of(a, item, q / group);
        slope = a.slopes ? a.slopes[item.kv_head * group + q % group] : 0;
        table = table_of(a, item.kv_head * group + q % group);
    }

    // Bends the scores of `count` keys at `start` and after if need be, and brings what was summed
    // before, (width,), to the measure of their largest. Those that are hidden, or behind the last
    // up to whole lanes, are LOWEST.
    void measure(const Arguments& a, float* scores, int64_t start, int count, float* sums,
                 int width) {
        const int64_t behind = start + count - 1;
        const bool is_masked = behind > position + a.ahead || (a.window > 0 && position - start >= a.window);
        Wide highest = lowest();
        for (int j = 0; j < count; j += WIDTH) {
            const IWide distance = int32_t(position - start - j) - lanes();
            Wide score = wide_at(scores + j);
            if (is_bent(a)) score = bend(a, score, Wide{} + slope, distance);
            for (int lane = 0; a.relative && lane < WIDTH; lane++)
                score[lane] += bias_at(a, table, distance[lane]);
            if (is_masked) score = hide(a, score, distance);
            if (j + WIDTH > count) score = lanes() >= count - j ? lowest() : score;
            put_wide(scores + j, score);
            highest = score > highest ? score : highest;
        }
        const float found = largest_of(highest) * scaling_left(a);
        const float most = found > marks.largest ? found : marks.largest;
        const float factor = exp_of(Wide{} + (marks.largest - most))[0];
        marks.total *= factor;
        keep_in_register(marks.total);
        if (factor != 1.0f)
            for (int d = 0; d < width; d += WIDTH) put_wide(sums + d, wide_at(sums + d) * factor);
        marks.largest = most;
    }

    // Turns the scores into weights, and all else as `measure` does.
    void weigh(const Arguments& a, float* scores, int64_t start, int count, float* sums,
               int width) {
        measure(a, scores, start, count, sums, width);
        const float scaling = scaling_left(a);
        for (int j = 0; j < count; j += WIDTH) {
            const Wide score = wide_at(scores + j);
            const Wide weight = exp_of(score * scaling - marks.largest);
            const Wide seen = score == lowest() ? Wide{} : weight;
            put_wide(scores + j, seen);
            marks.total += sum_of(seen);
        }
    }
};

}  // namespace
